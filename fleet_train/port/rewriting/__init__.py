"""One pass over a syntax tree: names, calls, methods and imports rewritten by the tables; TODO lines for the rest."""
