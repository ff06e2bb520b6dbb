"""Carries out a plan in a program: finds the gradients and inserts operators."""
