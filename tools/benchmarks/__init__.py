"""Parts of ``tools/bench.py``: a module for each benchmark, and what they share (records, jobs, networks)."""
