"""The parts of tools/bench_strategies.py: what is trained, who trains it, in which order, and what is made of it."""
