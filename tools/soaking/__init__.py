"""Parts of ``tools/soak.py``: the job, the faults that it is given, and the ledger of what its ranks trained."""
