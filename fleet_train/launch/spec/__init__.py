"""What is launched and where: the request, this machine, this node's ranks and their environment."""
