"""What is launched and where: the request, this machine, this node's share, and the environment of its ranks."""
