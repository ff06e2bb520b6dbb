"""Parts of tools/bench_strategies.py: tasks, contestants, rounds, and the records and tables made of them."""
