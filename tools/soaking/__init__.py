"""Parts of ``tools/soak.py``: plan faults, inject them into a real job, check that nothing was lost."""
