"""From a dataset and a sampler to feeds: in threads, in worker processes over shared memory, or with DALI."""
