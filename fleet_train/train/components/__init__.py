"""What trainers are put together from: settings, evaluation, signals, weight averages, skipped updates.

`fleet_train.train` offers the public ones; nothing here imports a sibling folder.
"""
