"""Checkpoints on more than one node of the job: who keeps copies, how they travel, which is the newest.

`kept` is what others import.
"""
