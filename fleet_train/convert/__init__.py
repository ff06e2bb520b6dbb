"""The facade ``fleet``, and what rewrites a program for it by carrying out a plan."""
