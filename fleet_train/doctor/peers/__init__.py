"""The doctors of all machines: how they connect, measure the network between them, and exchange all results."""
