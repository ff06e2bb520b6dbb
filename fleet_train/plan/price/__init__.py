"""Seconds and bytes of a plan on a network described by numbers, and the settings chosen by them.

Every result is a prediction.
"""
