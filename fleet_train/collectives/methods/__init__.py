"""How the gradients of a bucket become averages: dense, PowerSGD, DGC, few bits.

`registry` makes the method of a plan's bucket.
"""
