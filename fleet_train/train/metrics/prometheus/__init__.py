"""The newest record for Prometheus, on a port of rank 0's machine. The trainer opens `sink`."""
