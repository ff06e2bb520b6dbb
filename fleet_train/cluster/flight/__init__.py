"""What ranks do and did: the events that each records, and where it stands, seen from other processes."""
