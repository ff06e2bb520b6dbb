"""The processes of this node: the stock launcher and what it runs as each rank, their signals and output."""
