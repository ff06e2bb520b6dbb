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

from tests.programs.random_programs.draw import Case, draw
from tests.programs.random_programs.judge import Verdict, in_float64, judge, reordered
from tests.programs.random_programs.optimizers import FLOAT32_CLIPS

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
            verdicts += _without_rounding(part, Path(folder) / f"{first}, float64")
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


def _without_rounding(verdicts: list[Verdict], folder: Path) -> list[Verdict]:
    """The same list, in which float32 programs that are equal in float64 are no longer wrong."""
    off = [one for one in verdicts if one.wrong and one.off and one.case.dtype == "float32"]
    off = [one for one in off if not one.case.in_low_precision]
    _excuse_float32_clips([one for one in off if one.case.clip in FLOAT32_CLIPS], folder)
    doubted: list[Case] = [one.case for one in off if one.case.clip not in FLOAT32_CLIPS]
    again = {one.case.seed: one for one in judge(in_float64(doubted), folder)} if doubted else {}
    for verdict in verdicts:
        wide = again.get(verdict.case.seed)
        if wide is not None and not wide.wrong and not wide.no_reference and not wide.refused:
            print(f"rounding: {verdict}\n  and equal in float64", flush=True)
            verdict.wrong = []
        elif wide is not None:
            verdict.wrong.append(f"in float64: {wide.no_reference or wide.refused or wide.wrong}")
    return verdicts


def _excuse_float32_clips(verdicts: list[Verdict], folder: Path) -> None:
    """Clips without a kernel for float64: one process with its samples in another order shows how much is rounding."""
    own = reordered([one.case for one in verdicts], folder.with_name(f"{folder.name}, reordered")) if verdicts else {}
    for verdict in verdicts:
        text = f"one process is {own[verdict.case.seed]:.1e} from itself with its samples in another order"
        if verdict.off <= 10 * own[verdict.case.seed]:
            print(f"rounding: {verdict}\n  and {text}", flush=True)
            verdict.wrong = []
        else:
            verdict.wrong.append(text)


if __name__ == "__main__":
    sys.exit(main())
