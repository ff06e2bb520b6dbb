"""Settings of Fleet's own strategy objects, read as the corresponding knobs."""
