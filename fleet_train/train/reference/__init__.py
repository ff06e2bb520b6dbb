"""The reference trainer, `fleet_train train`: flags, data, networks and programs; a user of `Trainer` like any other.

The command line reads `config` and `model_names` before Paddle is imported, and calls `job`.
"""
