"""What `tools/bench_start.py` is made of: the two scripts that it starts, their time stamps, and the record's page."""
