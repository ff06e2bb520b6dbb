"""Turns a dataset and a sampler into feeds: in threads, in worker processes over shared memory, or with DALI."""
