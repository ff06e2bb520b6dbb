"""What the installed Paddle needs of us: a check of its version, dynamic mode for one thread, its allocator."""
