"""The corpus of hangs is the same every time and knows its lines; a report is judged by what it says."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.hangs import Heard, judge
from tools.soaking.hanging import CROSSED, HERE, KINDS, Case, cases

SCRIPTS = {each.kind: each for each in cases(1, len(KINDS))}


def test_a_seed_gives_the_same_cases_and_each_script_has_its_line_once() -> None:
    corpus = cases(1, 100)
    assert corpus == cases(1, 100) != cases(2, 100)
    assert set(Counter(each.kind for each in corpus).values()) == {7, 8}
    for each in [*corpus, *cases(2, 100)]:
        compile(each.script, each.kind, "exec")
        marked = [number for number, line in enumerate(each.script.splitlines(), 1) if line.endswith(HERE)]
        assert len(marked) == (each.kind not in ("stopped", "network"))
        assert each.kind == "stopped" or list(each.lines) == marked
        assert each.rank < each.world_size <= 4


def heard(each: Case, rank: int, off: int = 0, seconds: float = 104.0, first: int = -1) -> list[Heard]:
    """What a job says in which ``rank`` is missing, ``off`` lines behind the case's."""
    line = next(iter(each.lines), 1) + off
    said = f"rank {rank} (10.78.0.1:6170) did not arrive within 3 s; rank {rank} stands in train.py:{line} `x`"
    row = f"failed first  {rank if first < 0 else first}     10.78.0.1:6170  did not arrive"
    log = f"log{1 - each.node}/workerlog.1"
    return [Heard(seconds, log, f"fleet_train: WorkerFailed: step 9: {said}"), Heard(seconds + 1, log, row)]


@pytest.mark.parametrize("kind", ["disk", "worker", "deadlock", "slow", "swap"])
def test_a_right_report_is_accepted_and_a_wrong_one_is_refused(kind: str) -> None:
    each = SCRIPTS[kind]
    assert judge(each, heard(each, each.rank), 100.0).is_right
    assert not judge(each, heard(each, each.rank, off=1), 100.0).is_line
    assert not judge(each, heard(each, each.rank, first=each.rank + 1), 100.0).is_rank
    assert not judge(each, [*heard(each, each.rank), *heard(each, each.rank + 1)], 100.0).is_rank
    for late_or_nothing in (heard(each, each.rank, seconds=108.1), []):
        assert not judge(each, late_or_nothing, 100.0).is_right


@pytest.mark.parametrize("kind", CROSSED)
def test_ranks_at_different_points_are_no_accusation_and_a_cut_off_node_cannot_judge(kind: str) -> None:
    each = SCRIPTS[kind]
    where = f"rank {each.rank} stands in train.py:{next(iter(each.lines))} `x`"
    right = Heard(101.0, "log0/workerlog.0", f"the ranks wait for each other at different points: ...; {where}")
    assert judge(each, [right], 100.0).is_right
    waits = where.replace(f"rank {each.rank} stands in", f"ranks 0-{each.rank} wait in step 9, barrier, at")
    assert judge(each, [Heard(101.0, "x", right.text.replace(where, waits))], 100.0).is_right
    assert not judge(each, [right, *heard(each, each.rank)], 100.0).is_rank
    each = SCRIPTS["network"]
    own = Heard(101.0, f"launcher{each.node}.log", "the launcher of node 0 (10.78.0.1) was lost")
    assert judge(each, [own, *heard(each, each.rank)], 100.0).is_right
    assert not judge(each, [own], 100.0).is_rank
