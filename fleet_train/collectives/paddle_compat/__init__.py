"""Adapts to the installed Paddle: a check of its version, dynamic mode for one thread, its allocator."""
