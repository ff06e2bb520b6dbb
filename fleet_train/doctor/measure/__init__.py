"""Measures the facts of one machine, each within a time limit."""
