"""What members and servers of the store say: frames, greetings, payloads, refusals, and the tree of servers."""
