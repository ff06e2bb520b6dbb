"""Code shared by several commands: options, number parsing, completion of values, tables of profiles."""
