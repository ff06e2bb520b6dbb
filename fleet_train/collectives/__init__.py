"""How ranks talk: process groups, gates, and the host operators inside a program that carry out a plan."""
