"""``fleet_train.spawn``: the ranks of one machine as children of a script or a notebook, without the launcher."""
