"""Methods that average the gradients of a bucket: dense, quantised, rows.

`registry` makes the method of a plan's bucket.
"""
