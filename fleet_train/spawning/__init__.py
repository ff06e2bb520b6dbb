"""``fleet_train.spawn``: starts one machine's ranks as children of a script or a notebook, without the launcher."""
