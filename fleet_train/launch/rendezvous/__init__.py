"""The launchers among themselves: membership and leader, rendezvous rounds, whether there is another attempt."""
