"""What several commands share: options, how numbers are read, completion of values, tables of profiles."""
