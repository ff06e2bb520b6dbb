"""Converts a script's program for one card into one rank of a job: the facade `fleet` and the converting optimizer.

Scripts import from `fleet_train`; other layers may import any module here.
"""
