"""The rendezvous store: servers in launchers, one of them the root and the others relays, and the members' clients."""
