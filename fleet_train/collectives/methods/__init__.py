"""Methods that average the gradients of a bucket: dense, PowerSGD, quantised.

`registry` makes the method of a plan's bucket.
"""
