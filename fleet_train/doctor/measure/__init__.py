"""Facts of one machine, each with a bound on how long it takes."""
