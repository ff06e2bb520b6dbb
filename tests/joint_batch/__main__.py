"""``python -m tests.joint_batch --ranks 2 --case masked_mean``: train cases on ranks and in one process, as a table.

``--case`` takes names with commas, parts of names that end in ``*``, or a subject such as ``masks``; without it, all.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path

from tests.joint_batch import OPTIMIZERS, Case, cases
from tests.joint_batch.judge import Verdict, judge
from tests.joint_batch.profiles import WAYS, Job


def main() -> int:
    """1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.joint_batch", description=__doc__)
    parser.add_argument("--ranks", default="2", help="numbers with commas, from 2 to 4")
    parser.add_argument("--case", default="*", help="names, patterns or subjects, with commas")
    parser.add_argument("--profile", default="default", help=f"with ;, or all: {'; '.join(WAYS)}")
    parser.add_argument("--optimizer", default=",".join(OPTIMIZERS))
    parser.add_argument("--list", action="store_true", help="print the cases, and train nothing")
    parser.add_argument("--traceback", action="store_true", help="print the whole errors")
    parser.add_argument("--wrong", action="store_true", help="print only what is wrong")
    parser.add_argument("--losses", action="store_true", help="print what fetched losses are unlike one process's")
    parser.add_argument("--said", action="store_true", help="print what the package says")
    given = parser.parse_args()
    chosen = [one for one in cases().values() if _is_wanted(one, given.case.split(","))]
    if given.list:
        print("\n".join(f"{one.subject:10} {one.name:36} {one.sentence}" for one in chosen))
        return 0
    ways = list(WAYS) if given.profile == "all" else given.profile.split(";")
    jobs = [
        Job(one.name, optimizer, ranks, way)
        for way in map(str.strip, ways)
        for ranks in map(int, given.ranks.split(","))
        for one in chosen
        for optimizer in given.optimizer.split(",")
        if optimizer in WAYS[way].optimizers and way not in one.without
    ]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit("stopped"))  # so that the ranks are ended
    with tempfile.TemporaryDirectory() as folder:
        verdicts = judge(jobs, Path(folder) / "jobs", lambda verdict: _print(verdict, given))
    wrong = sum(bool(verdict.wrong) for verdict in verdicts)
    print(f"{len(verdicts)} trained, {wrong} wrong, {sum(bool(one.refused) for one in verdicts)} refused")
    return int(wrong > 0)


def _print(verdict: Verdict, given: argparse.Namespace) -> None:
    if verdict.wrong or not given.wrong:
        job, told = verdict.job, " | ".join(_short(text) for text in [*verdict.wrong, verdict.refused] if text)
        row = f"{job.case:34} {job.optimizer:9} {job.way:12} {job.ranks}"
        print(f"{row}  {verdict.off:8.1e}  {verdict.kind:8} {told}".rstrip(), flush=True)
    if given.losses and verdict.losses:
        print(f"    {verdict.losses[0]}", flush=True)
    if given.said and verdict.said:
        print("    said: " + "\n    said: ".join(verdict.said), flush=True)
    if verdict.wrong and given.traceback:
        print(verdict, flush=True)


def _short(text: str) -> str:
    """The first line of an error that has a traceback."""
    return text if text.count("\n") < 2 else text.partition("\n")[0]


def _is_wanted(one: Case, wanted: list[str]) -> bool:
    return any(one.subject == part or fnmatch(one.name, part) for part in wanted)


if __name__ == "__main__":
    sys.exit(main())
