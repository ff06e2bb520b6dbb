"""Settings of Fleet's own strategy objects, read as the knobs that they stand for."""
