"""Turns facts into findings. Pure."""
