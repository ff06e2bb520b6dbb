"""Parts of ``tools/bench_control_plane.py``: servers of the store in separate processes, and simulated ranks."""
