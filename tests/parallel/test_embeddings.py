"""Embeddings whose rows are sent, on two, three and four ranks, on the host and on streams, and through the launcher.

Exact ones are compared with one process that has the joint batch, the others with the same ranks that send whole
tables.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.parallel.embeddings import BESIDE_DENSE, CASES, EXACT
from tests.support.ports import free_ports
from tests.support.processes import ROOT, python
from tests.support.ranks import RanksResult, run_launchers, run_ranks

SCRIPT = ROOT / "tests/parallel/embeddings.py"
LOOKUP, SCATTER = "pd_op.embedding_grad", "pd_op.scatter_"
WHOLE = ("off", "auto on a fast link", "sharded, Lamb")
# bf16 rounds what is sent; whole tables are also added in bfloat16, rows in float32.
ROUNDED = ("bf16",)
# Paddle's streams have no local groups, and no host that counts rows.
ON_STREAMS = [name for name in CASES if name not in ("local groups", "auto switches") and "same bits" not in name]
ON_STREAMS = [name for name in ON_STREAMS if name not in BESIDE_DENSE or name == "amp"]
Found = Callable[[int, str], list[dict[str, Any]]]
LAUNCHES: tuple[tuple[int, int, list[str], bool], ...] = (
    (2, 2, list(CASES), False),
    (2, 2, ON_STREAMS, True),
    (3, 3, list(EXACT), False),
    (4, 2, list(EXACT), False),
)
EACH = pytest.mark.parametrize(
    ("launch", "name"),
    [
        pytest.param(number, name, marks=pytest.mark.long if number > 1 else (), id=f"{ranks}-{late}-{name}")
        for number, (ranks, _, names, late) in enumerate(LAUNCHES)
        for name in names
    ],
)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RanksResult]:
    @cache
    def launch(number: int) -> RanksResult:
        ranks, nodes, names, late = LAUNCHES[number]
        folder = tmp_path_factory.mktemp("embeddings")
        more = [str(folder)] if number == 0 else []
        return run_ranks(
            SCRIPT,
            ranks,
            folder=folder,
            nodes=nodes,
            args=[json.dumps(names), *more],
            timeout_seconds=300,
            late_streams=late,
        )

    return launch


@pytest.fixture(scope="module")
def found(result: Callable[[int], RanksResult]) -> Found:
    return lambda number, name: [rank[name] for rank in result(number).of_all("cases")]


@EACH
def test_ranks_train_as_one_process_or_as_with_whole_tables(found: Found, launch: int, name: str) -> None:
    ranks = found(launch, name)
    assert ranks[0]["moved"] > 1e-5
    for rank in ranks:
        assert rank["error"] < (1e-2 if name in ROUNDED else 1e-6)
        if "same bits" in name or "local sgd" in name:
            assert rank["digest"] == rank["digest beside"]
    assert (len({rank["digest"] for rank in ranks}) == 1) == (name != "local sgd")  # which ends in a local step
    assert len({rank["plan"] for rank in ranks}) == 1


@EACH
def test_a_dense_gradient_is_made_of_whole_tables_only(found: Found, launch: int, name: str) -> None:
    rank = found(launch, name)[0]
    if name in WHOLE:
        assert rank["rows"] == []
        assert rank["operators"].count(LOOKUP) == 3
        return
    multiplied = name == "a table that is multiplied, too"
    assert rank["rows"]
    assert rank["operators"].count(LOOKUP) == multiplied
    told = [line for line in rank["said"] if "its whole table is sent, because pd_op.mean_grad makes a part" in line]
    assert len(told) == multiplied
    # On streams the host does not know how many rows there are.
    updates_rows = CASES[name].optimizer.__name__ in ("sgd", "<lambda>") and not LAUNCHES[launch][3]
    updates_rows = updates_rows and CASES[name].settings.get("accumulate_steps", 1) == 1
    alone = len(rank["rows"]) - (name == "a table with a decay")
    assert rank["operators"].count(SCATTER) == alone * updates_rows


def test_auto_goes_to_whole_tables_and_back_and_says_so_with_the_numbers(found: Found) -> None:
    first, second = found(0, "auto switches")
    told = [line for line in first["said"] if "rows of a rank in step" in line]
    assert [line.partition("]: ")[2].partition(":")[0] for line in told] == [
        "500 rows of a rank in step 4, the 4th in a row, are more than the 429 that pay",
        "25 rows of a rank in step 64 are well below the 429 that pay",
    ]
    assert not any("rows of a rank" in line for line in second["said"])


def test_lazy_mode_is_said_not_to_be_carried_out(found: Found) -> None:
    said = [line for line in found(0, "adam")[0]["said"] if "lazy_mode" in line]
    assert len(said) == 1


@pytest.mark.parametrize("name", ["rows", "padded", "rows, then tables", "tables, then rows"])
def test_a_save_between_micro_batches_continues_with_the_same_bits(
    result: Callable[[int], RanksResult], name: str
) -> None:
    digests = [rank[name]["digests"] for rank in result(0).of_all("resumed")]
    assert len({each for pair in digests for each in pair}) == 1


@pytest.mark.parametrize("name", ["sgd", "several uses", "two tables", "adam"])
def test_paddle_writes_the_program_of_one_card(result: Callable[[int], RanksResult], name: str) -> None:
    rank = result(0).of_all("written")[0][name]
    assert not [operator for operator in rank["operators"] if "fleet_train" in operator or operator == SCATTER]
    assert rank["digests"][0] == rank["digests"][1]


@pytest.mark.parametrize("name", ["sgd", "two tables", "adam"])
def test_the_norm_of_the_gradient_is_that_of_whole_tables(result: Callable[[int], RanksResult], name: str) -> None:
    rows, whole = result(0).of_all("norms")[0][name]
    assert rows == pytest.approx(whole, rel=1e-6)
    assert rows > 0


def test_through_the_launcher(tmp_path: Any) -> None:
    names = ["sgd", "two tables"]
    line = ["-m", "fleet_train", "launch", "--nproc_per_node=2", f"--started_port={free_ports(4)}"]
    ranks = run_launchers([python(*line, str(SCRIPT), json.dumps(names))], folder=tmp_path).of_all("cases")
    assert len(ranks) == 2
    for name in names:
        assert max(rank[name]["error"] for rank in ranks) < 1e-6
        assert ranks[0][name]["rows"]
