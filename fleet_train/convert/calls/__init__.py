"""The facade's calls that are not about the optimizer: ranks and devices, collective calls, saving and loading."""
