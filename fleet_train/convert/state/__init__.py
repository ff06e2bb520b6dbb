"""A program's state between a scope and a disk: what is saved, in which files, and whether it fits the program."""
