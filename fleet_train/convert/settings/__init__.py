"""What scripts and profiles ask for: `DistributedStrategy`, wrapped optimizers, knobs that are passes."""
