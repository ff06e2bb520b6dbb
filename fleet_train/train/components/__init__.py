"""The parts of trainers: settings, evaluation, signals, weight averages, skipped updates.

`fleet_train.train` offers the public ones; nothing here imports a sibling folder.
"""
