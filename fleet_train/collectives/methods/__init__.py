"""Methods that average the gradients of a bucket: dense, PowerSGD, DGC, quantised.

`registry` makes the method of a plan's bucket.
"""
