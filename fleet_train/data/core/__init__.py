"""Datasets, assignment of samples to ranks and steps, random numbers per sample, and prefetching.

No Paddle.
"""
