"""Checkpoints on more than one node of the job: which nodes keep copies, how they are sent, which is the newest.

Other packages import `kept`.
"""
