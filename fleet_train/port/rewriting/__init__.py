"""One pass over a syntax tree: names, calls, methods and imports as the tables say; TODO lines for the rest."""
