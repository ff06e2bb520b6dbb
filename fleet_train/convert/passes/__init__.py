"""Passes over the program of one rank: they change what is computed, not what is communicated."""
