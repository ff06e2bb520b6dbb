"""Carrying out a plan in a program: where gradients are, and which operators are inserted."""
