"""Parts of ``tools/bench_control_plane.py``: servers of the store in processes of their own, stand-ins for ranks."""
