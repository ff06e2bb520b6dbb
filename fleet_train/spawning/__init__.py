"""``fleet_train.spawn``: a function in ranks of this machine, from a script or a notebook; and in Ray's workers."""
