"""``python -m tests.programs.random_programs --seeds 0:300 --ranks 3``: train random programs, list what is wrong.

What differs in float32 is trained again in float64: where it is equal there, one process and ranks rounded otherwise,
which is said with both numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.programs.random_programs.draw import draw
from tests.programs.random_programs.judge import Verdict, judge, without_rounding

AT_ONCE = 60


def main() -> int:
    """1 if anything is wrong, or plain Paddle cannot train a program."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.random_programs", description=__doc__)
    parser.add_argument("--seeds", required=True, help="FIRST:END, such as 0:300, or seeds with commas")
    parser.add_argument("--ranks", type=int, default=0, help="2, 3 or 4; default: each in turn")
    parser.add_argument("--show", action="store_true", help="print the cases, and train nothing")
    given = parser.parse_args()
    cases = [draw(seed, given.ranks or 2 + seed % 3) for seed in _seeds(given.seeds)]
    if given.show:
        print("\n".join(map(str, cases)))
        return 0
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(cases), AT_ONCE):
            part = judge(cases[first : first + AT_ONCE], Path(folder) / str(first))
            verdicts += without_rounding(part, Path(folder) / f"{first}, float64")
            print(f"{first + len(part)} of {len(cases)}: {dict(Counter(map(_kind, verdicts)))}", flush=True)
            for verdict in part:
                if _kind(verdict) not in ("equal", "rounded"):
                    print(f"{_kind(verdict)}: {verdict}", flush=True)
    return int(any(_kind(verdict) in ("WRONG", "NOT TRAINED ALONE") for verdict in verdicts))


def _seeds(text: str) -> Sequence[int]:
    if ":" in text:
        first, end = map(int, text.split(":"))
        return range(first, end)
    return [int(part) for part in text.split(",")]


def _kind(verdict: Verdict) -> str:
    if verdict.no_reference:
        return "NOT TRAINED ALONE"
    if verdict.refused:
        return "refused"
    return "WRONG" if verdict.wrong else "equal"


if __name__ == "__main__":
    sys.exit(main())
