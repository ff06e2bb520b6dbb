"""The processes of this node: the stock launcher and the wrapper of each rank, their signals and output."""
