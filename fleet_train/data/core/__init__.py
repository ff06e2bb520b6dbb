"""Datasets, who reads which sample at which step, random numbers that belong to a sample, and reading ahead.

No Paddle.
"""
