"""Compressions of gradients that are parts: a folder each, found by the list in `fleet_train.profile.methods`."""
