"""The root cause, where the order in which processes end is misleading: real ranks, real launchers."""

from __future__ import annotations

import re

import pytest

from tests.integration.launch.conftest import Bench
from tests.support.processes import ROOT

SCRIPT = ROOT / "tests" / "integration" / "launch" / "faulty_rank.py"


def rows(output: str) -> list[list[str]]:
    """The table below the launcher's last words: role, rank, endpoint, how it ended, after, log file."""
    lines = [line for line in output.splitlines() if line.startswith(("failed first", "secondary"))]
    return [re.split(r"\s{2,}", line) for line in lines]


def check_table(bench: Bench, output: str, guilty: str, how: str) -> None:
    first, other = rows(output)
    assert first[:3] == ["failed first", "1", guilty], bench.job.report()
    assert re.fullmatch(how, first[3]), bench.job.report()
    assert other[:2] == ["secondary", "0"], bench.job.report()


def _exits(code: int, why: str) -> str:
    """How such a rank ends; one that is still exiting 5 s after its failure, as on a busy machine, is stopped."""
    return rf"exit code {code} \({why}\)|{why}, then stopped by SIGTERM"


_LEFT = r"left the job while others waited for it at step 3"
_BROKE = r"was lost \(its connection broke\) while others waited for it at step 3"
_MISSED = r"did not arrive at step 3 within 2 s"
_MISSED_THERE = r"did not arrive at a collective that failed within 5 s"


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "exit_code", "how", "last_line", "told"),
    [
        # Its exit handler and its thread would run for a minute; the launcher does not wait so long.
        ("raise, then exit slowly", 1, "ValueError, then stopped by SIG(TERM|KILL)", "ValueError: boom", "boom"),
        ("raise, another hook", 10, _exits(10, "DataError"), "fleet_train.errors.DataError: bad row", "bad row"),
        ("data loader", 1, _exits(1, r"\w*Error"), None, "stopped with"),
        ("sys.exit text", 1, _exits(1, r"sys\.exit"), "no disk left", "sys.exit: no disk left"),
        ("raise SystemExit 3", 3, _exits(3, _LEFT), None, "left the job"),
        ("exit 0", 11, _exits(0, _LEFT), None, "left the job"),
        ("os._exit 0", 11, _exits(0, _BROKE), None, "was lost"),
        ("freeze", 11, f"{_MISSED}, then stopped by SIGKILL", None, "did not arrive within 2 s"),
        # Gloo's own timeout comes before that of the profile, which has no influence on a collective that has begun.
        ("freeze in the step", 11, rf"{_MISSED_THERE}, then stopped by SIGKILL", None, "TIMEOUT"),
    ],
)  # fmt: skip
def test_the_rank_that_failed_is_named_on_both_nodes(
    bench: Bench, fault: str, exit_code: int, how: str, last_line: str | None, told: str
) -> None:
    bench.start_two(SCRIPT, fault)
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [exit_code, exit_code], bench.job.report()
    for one in ended:
        check_table(bench, one.output, f"127.0.0.3:{bench.first_port}", how)
        if last_line is not None:
            assert f"  | {last_line}" in one.output.splitlines(), bench.job.report()
    (line,) = [line for line in bench.log().splitlines() if line.startswith("fleet_train: WorkerFailed:")]
    assert f"rank 1 (127.0.0.3:{bench.first_port})" in line
    assert told in line
    if fault == "raise, another hook":
        assert "other hook: bad row" in bench.log("node1/log/workerlog.0").splitlines()
    assert bench.job.leftovers() == []


@pytest.mark.parametrize(
    ("fault", "exit_code", "how"),
    [
        pytest.param("loop", 11, f"{_MISSED}, then stopped by SIGTERM", marks=pytest.mark.long),
        ("sys.exit 3", 3, _exits(3, r"sys\.exit\(3\)")),
        pytest.param(
            "never join", 11, r"exit code 0 \(left the job while others waited for it at join\)", marks=pytest.mark.long
        ),
    ],
)
def test_the_rank_that_failed_is_named_on_one_node(bench: Bench, fault: str, exit_code: int, how: str) -> None:
    bench.start(SCRIPT, fault, flags=["--nproc_per_node=2"])
    (ended,) = bench.ended(120.0)
    assert ended.exit_code == exit_code, bench.job.report()
    check_table(bench, ended.output, f"127.0.0.1:{bench.first_port + 1}", how)
    assert bench.job.leftovers() == []


def test_a_full_disk_of_rank_0_is_rank_0s_failure_though_all_ranks_raise_it(bench: Bench) -> None:
    bench.start_two(SCRIPT, "full disk")
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [9, 9], bench.job.report()
    for one in ended:
        first, other = rows(one.output)
        assert first[:4] == ["failed first", "0", f"127.0.0.2:{bench.first_port}", "exit code 9 (CheckpointError)"]
        assert other[:2] == ["secondary", "1"], bench.job.report()
        assert "rank 0 cannot use its disk: [Errno 28] No space left on device" in one.output


def test_a_network_fault_between_living_ranks_is_no_ranks_failure_and_restarts(bench: Bench) -> None:
    bench.start_two(SCRIPT, "links break", flags=["--max_restarts=1"])
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [0, 0], bench.job.report()
    for one in ended:
        (line,) = [line for line in one.output.splitlines() if line.startswith("fleet_train: attempt 0: ")]
        assert re.match(r"fleet_train: attempt 0: step 3\b.*: the collective failed on every rank \(", line), line
        assert "all ranks are alive" in line
        assert "failed first" not in one.output


def test_children_of_a_rank_have_no_part_in_its_job(bench: Bench) -> None:
    bench.start_two(SCRIPT, "children")
    ended = bench.ended(120.0)
    assert [one.exit_code for one in ended] == [0, 0], bench.job.report()
    log = bench.log("node1/log/workerlog.0")
    assert "a child was told: process" in log
    assert "was forked from rank 1" in log
    assert "all steps made" in log


@pytest.mark.long
def test_a_rank_that_left_long_before_it_was_missed_fails_on_its_own_node_too(bench: Bench) -> None:
    """Longer than the launchers of one job ever wait for each other at its end."""
    bench.start_two(SCRIPT, "exit 0, missed late", flags=["--join_timeout=10"])
    ended = bench.ended(200.0)
    assert [one.exit_code for one in ended] == [11, 11], bench.job.report()
    for one in ended:
        check_table(bench, one.output, f"127.0.0.3:{bench.first_port}", _exits(0, _LEFT))
    assert "this node's ranks have ended; waiting for those of node 0 (127.0.0.2)\n" in ended[1].output
