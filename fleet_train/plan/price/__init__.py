"""Seconds and bytes of a plan on a network that is described by numbers, and what is chosen by them.

Every result is a prediction.
"""
