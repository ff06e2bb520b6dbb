"""Random static programs, each drawn from a seed: ranks reach what one process of plain Paddle reaches.

`vectors`, `sequences` and `images` are what programs are made of, one function each; `draw` makes a case from a seed:
blocks, a loss, an optimizer, a schedule, a clip and a profile; `child` runs cases, alone or as ranks; `judge` launches
both and compares.

    python -m tests.programs.random_programs --seeds 0:300 --ranks 3
"""
