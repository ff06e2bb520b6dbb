"""Parts of `tools/bench_start.py`: the two scripts that it starts, their time stamps, and the record's page."""
