"""The servers of the store: rounds and barriers, sessions with members, relays between a node and its parent."""
