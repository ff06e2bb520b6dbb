"""The joint batch: what a loss takes over the whole batch is taken over the batches of all ranks."""
