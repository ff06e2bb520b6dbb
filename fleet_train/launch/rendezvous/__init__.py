"""Coordination of the launchers: membership and leader, rendezvous rounds, whether there is another attempt."""
