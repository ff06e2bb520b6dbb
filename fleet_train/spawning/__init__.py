"""``fleet_train.spawn``: starts the ranks of one machine as children of a script or a notebook, without the launcher."""
