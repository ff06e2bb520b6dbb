"""The protocol of the store's members and servers: frames, greetings, payloads, refusals, and the tree of servers."""
