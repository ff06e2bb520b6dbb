"""Kill ranks of a real job again and again, and see whether anything was lost."""
