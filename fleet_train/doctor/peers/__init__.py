"""The doctors of all machines: how they find each other, what they measure between them, how all learn everything."""
