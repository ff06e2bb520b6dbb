"""The facade's calls that are not about the optimizer: who and where, values among ranks, saving and loading."""
