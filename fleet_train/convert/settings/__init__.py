"""The settings of scripts and profiles: `DistributedStrategy`, wrapped optimizers, knobs that are passes."""
