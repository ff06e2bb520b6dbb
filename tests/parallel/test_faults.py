"""When a rank fails, differs or does not take part, every other one ends soon, with one line that names it."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from fleet_train.errors import DataError, JoinTimeout, ScheduleMismatch, WorkerFailed
from tests.parallel.faults import TIMEOUT_SECONDS
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

SCRIPT = ROOT / "tests/parallel/faults.py"
LOST, OTHER = WorkerFailed.exit_code, ScheduleMismatch.exit_code
RANK_1 = r"rank 1 \(127.0.0.3:"
# The profile's timeout ended the wait, and not one of Gloo: two ranks that Gloo gives up at once end with SIGABRT.
WATCHED = r".*\(the collective ended with: no collective has ended for"
GUARDED = r"call fleet.save_persistables\('out'\) on all ranks, without `if rank == 0` around it"
UNEQUAL = r"in fleet.barrier_worker\(\).* they have made unequal numbers of steps before it(; rank [01] waits in .*)?$"
GONE = "finished and left the job while others still wait for it"
MADE = r"; rank 1 made 3 steps, the last one in \w+\.py, line \d+; rank 0 has begun 4 steps, .*fleet\.all_reduce"
# Gloo's own timeout; where a connection breaks it fails at once.
GLOO_SECONDS = 30


def run(case: str, folder: Path, world_size: int = 2, *args: str, **options: Any) -> RanksResult:
    options = {"nodes": world_size, "check": False} | options
    return run_ranks(SCRIPT, world_size, folder=folder, args=[case, *args], **options)


def last_line(result: RanksResult, rank: int) -> str:
    lines = [line for line in result.ranks[rank].output.splitlines() if line.startswith("fleet_train:")]
    return lines[-1] if lines else result.report()


def assert_told(result: RanksResult, ranks: Any, *told: str) -> None:
    for rank in ranks:
        for words in told:
            assert re.search(words, last_line(result, rank)), f"rank {rank}: {words}\n{result.report()}"


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("case", "codes", "told"),
    [
        # The codes of the ranks, None for any; what is told by each rank that has a code of the package.
        ("die", [LOST, None, LOST], ["WorkerFailed: step 4: " + RANK_1, "was lost"]),
        # Its averages of step 3 are on their way while step 4 begins.
        ("die, next step", [LOST, None, LOST], ["WorkerFailed: (step [34]|counts)", RANK_1, "was lost"]),
        ("throw", [LOST, 1], [RANK_1, "stopped with ValueError: boom$"]),
        pytest.param("throw, next step", [LOST, 1], [RANK_1, "stopped with ValueError: boom$"], marks=LONG),
        pytest.param("exit with text", [LOST, 1], [r"\) stopped with sys.exit: no disk left$"], marks=LONG),
        pytest.param("leave early", [LOST, 0], [RANK_1, GONE, MADE]),
        pytest.param("leave early, next step", [LOST, 0], [RANK_1, GONE, MADE], marks=LONG),
        # Where calls are enqueued, a rank that leaves waits for the others.
        pytest.param("late leave early", [OTHER, 0], [RANK_1 + r"\d+\) at 'leaving'"], marks=LONG),
        pytest.param("command", [LOST, DataError.exit_code], ["no such folder on this machine"], marks=LONG),
        pytest.param(
            "save on rank 0",
            [OTHER, OTHER],
            [r"in fleet.save_persistables\('out'\), " + RANK_1 + ".* at 'step 4'; " + GUARDED],
            marks=LONG,
        ),
        pytest.param(
            "save on rank 0 at the end",
            [LOST, 0],
            [r"finished and left the job while others wait for it in fleet.save_persistables\('out'\); " + GUARDED],
            marks=LONG,
        ),
        pytest.param("save on rank 0, few barriers", [None] * 3, ["rank 0 .127.0.0.2:", GUARDED], marks=LONG),
        pytest.param("barrier after unequal steps", [OTHER, OTHER], [UNEQUAL], marks=LONG),
    ],
)
def test_the_others_end_and_name_the_rank_and_what_it_did(
    tmp_path: Path, case: str, codes: list[int | None], told: list[str]
) -> None:
    result = run(case, tmp_path, len(codes))
    for found, code in zip(result.exit_codes, codes, strict=True):
        assert found == code if code is not None else found != 0, result.report()
    assert_told(result, [rank for rank, code in enumerate(codes) if code in (LOST, OTHER)], *told)
    if None in codes and LOST not in codes:
        assert_told(result, range(len(codes)), *told)
    if case == "throw":
        assert "Traceback" not in result.ranks[0].output
        assert "ValueError: boom" in result.ranks[1].output


def test_stalled_rank_is_named_after_the_profiles_bound(tmp_path: Path) -> None:
    began = time.monotonic()
    result = run("stall", tmp_path, patience_after_failure_seconds=1.0)
    assert result.exit_codes[0] == LOST, result.report()
    assert_told(result, [0], "step 4: " + RANK_1, r"did not arrive within 2 s(; rank 1 stands in faults\.py:.*)?$")
    assert time.monotonic() - began < 90


@pytest.mark.long
def test_a_busy_rank_is_waited_for_behind_a_barrier(tmp_path: Path) -> None:
    result = run("busy for longer than gloo waits", tmp_path)
    assert result.exit_codes == [0, 0], result.report()
    assert len(set(result.of_all("state"))) == 1


# barrier_every_steps: without a barrier before it, a collective itself fails, and the attribution of the failure finds
# out why.
@pytest.mark.long
@pytest.mark.parametrize(("case", "told"), [("die", "was lost"), ("leave early", "finished and left the job")])
def test_a_rank_that_dies_between_two_barriers_is_named_at_once(tmp_path: Path, case: str, told: str) -> None:
    for attempt in range(2):
        result = run(f"{case}, few barriers", tmp_path / str(attempt), 3)
        seconds = time.monotonic() - result.values[1]["failed_at"]  # on a busy machine ranks start late
        # Once in a while Gloo does not notice a connection that breaks as it is first used, and waits.
        if seconds < GLOO_SECONDS:
            break
    assert seconds < GLOO_SECONDS
    assert [result.exit_codes[rank] for rank in (0, 2)] == [LOST] * 2, result.report()
    assert_told(result, (0, 2), RANK_1, told, "^(?!.*rank [02] .127)")


@pytest.mark.long
def test_frozen_rank_is_named_after_gloos_timeout_between_two_barriers(tmp_path: Path) -> None:
    for attempt in range(3):
        began = time.monotonic()
        result = run("freeze, few barriers", tmp_path / str(attempt), 3, patience_after_failure_seconds=12.0)
        assert time.monotonic() - began > GLOO_SECONDS
        # Gloo itself aborts a process now and then, where two ranks' timeouts meet: docs/faults.md.
        if -signal.SIGABRT not in result.exit_codes or "gloo::EnforceNotMet" not in result.report():
            break
    assert [result.exit_codes[rank] for rank in (0, 2)] == [LOST] * 2, result.report()
    told = [
        r"WorkerFailed: step 4, (bucket 0 \(|counts of the batch)",
        RANK_1,
        "did not arrive within 1.5 s",
        "^(?!.*rank [02] .127)",
    ]
    assert_told(result, (0, 2), *told)


def test_rank_that_never_comes_is_named_at_the_join_timeout(tmp_path: Path) -> None:
    result = run("never come", tmp_path, 3, env={"FLEET_TRAIN_JOIN_TIMEOUT": "4"})
    # Whose patience ends first reports it, and the other learns it from there.
    codes = {result.exit_codes[rank] for rank in (0, 2)}
    assert JoinTimeout.exit_code in codes, result.report()
    assert codes <= {JoinTimeout.exit_code, LOST}, result.report()
    assert_told(result, (0, 2), "join: " + RANK_1, "did not arrive within 4 s$")


def test_every_difference_is_named_on_every_rank(tmp_path: Path) -> None:
    expected = {
        "dtype": "'fc_1.b_0' [8] float32 in bucket 0 (allreduce, communicator 0) here, 'fc_1.b_0' [8] float64",
        "shape": "'fc_2.b_0' [8] float32 in bucket 0 (allreduce, communicator 0) here, 'fc_2.b_0' [9] float32",
        "more layers": "float32 in bucket 0",
        "knob outside the plan": "divergence_check_steps is 100 here, 50 there",
        "knob of the plan": "nccl_comm_num is 1 here, 2 there",
        "variable": "environment.NCCL_DEBUG has another value there (values are not shown)",
        "variable on one rank": "environment.NCCL_DEBUG has no value here (values are not shown)",
        "optimizer's state": "2 parameters, 0 statistics and 1 values of the optimizer's state per parameter, "
        "every 2 steps here, 2 parameters, 0 statistics and 2 values",
        "batch norm": "exchanges inside the passes: 3 of 140 bytes here, 1 of 8 bytes there",
        "steps per epoch": "steps per epoch: rank 0 (127.0.0.2:",
    }
    told = run("mismatches", tmp_path, 3, check=True).of_all("told")
    assert all(rank == told[0] for rank in told)
    for case, message in told[0].items():
        assert expected.get(case, "") in message
        assert bool(message) == (case in expected), f"{case}: {message}"
        assert not message or "rank 1 (127.0.0.3:" in message
        assert "secret" not in message
    assert "has 100, rank 1" in told[0]["steps per epoch"]
    assert "(ranks that also differ: 2)" in told[0]["steps per epoch"]


@pytest.mark.parametrize(
    ("every", "before", "told_at", "late"),
    [
        pytest.param("2", "3", 5, False, id="in a run"),
        pytest.param("2", "3", 5, True, id="in a run on streams", marks=LONG),
        pytest.param("1", "5", 6, True, id="before a save on streams", marks=LONG),
    ],
)
def test_parameter_changed_on_one_rank_stops_the_job_and_is_named(
    tmp_path: Path, every: str, before: str, told_at: int, late: bool
) -> None:
    """Where collectives end late, the ranks compare a step later, and before they save."""
    result = run("drift", tmp_path, 3, every, before, late_streams=late)
    assert result.exit_codes == [OTHER] * 3, result.report()
    told = rf"ScheduleMismatch.* diverged at step {told_at}: 'fc_1.w_0' of rank 2 \(127.0.0.4:"
    assert_told(result, range(3), told)
    assert not (tmp_path / "saved").exists()


@pytest.mark.long
def test_local_sgd_does_not_begin_from_unequal_parameters(tmp_path: Path) -> None:
    result = run("unequal start", tmp_path)
    assert result.exit_codes == [OTHER] * 2, result.report()
    assert not result.values
    assert "replicas have diverged at the start: 'linear_0.w_0' differs between rank 0" in result.report()


@pytest.mark.long
def test_two_processes_with_one_number_are_refused(tmp_path: Path) -> None:
    result = run("train", tmp_path, nodes=1, env={"PADDLE_TRAINER_ID": "1", "FLEET_TRAIN_JOIN_TIMEOUT": "3"})
    assert 0 not in result.exit_codes, result.report()


@pytest.mark.parametrize(
    ("case", "codes", "told"),
    [
        ("die in a collective", [LOST, -9, LOST], "WorkerFailed: step 4, (bucket|counts).*: rank 1 .* was lost"),
        *(
            pytest.param(case, [LOST, None, LOST], told, marks=LONG)
            for case, told in {
                "calc die in a collective": "WorkerFailed: step 4, (bucket|counts).*: rank 1 .* was lost",
                "calc freeze in a collective": "WorkerFailed: step 4.*: rank 1 .* did not arrive within" + WATCHED,
                "freeze in a collective": "WorkerFailed: step 4.*: rank 1 .* did not arrive within",
                "freeze, few barriers": "WorkerFailed: step 4, (bucket|counts).*: rank 1 .* did not arrive within"
                + WATCHED,
                "die, few barriers": "WorkerFailed: step 4, (bucket|counts).*: rank 1 .* was lost" + WATCHED,
            }.items()
        ),
        pytest.param("skip", [LOST, OTHER, LOST], r"step 4, bucket 0 \(fc_.*rank 1 \(\S+\) at 'step 5'", marks=LONG),
        pytest.param(
            "never end",
            [LOST] * 3,
            rf"LinkFailed: step 4, bucket 0 \(fc_.*no collective has ended for {TIMEOUT_SECONDS} s.*"
            "all ranks are alive, so look at the network between them",
            marks=LONG,
        ),
    ],
)
def test_where_collectives_are_enqueued_the_others_end_in_time_and_name_the_rank(
    tmp_path: Path, case: str, codes: list[int | None], told: str
) -> None:
    # The one at fault may never end; the others have the timeout and 10 s.
    patience = TIMEOUT_SECONDS + 10.0
    result = run(f"late {case}", tmp_path, 3, nodes=1, patience_after_failure_seconds=patience)
    for rank in (rank for rank, code in enumerate(codes) if code == LOST):
        assert result.exit_codes[rank] == LOST, result.report()
        assert not result.ranks[rank].killed
        pattern = r"^fleet_train: (?!barrier_every_steps).*$"
        said = re.findall(pattern, result.ranks[rank].output, re.MULTILINE)
        assert len(said) == 1, result.report()
        assert re.search(told, said[0]), result.report()
    for found, code in zip(result.exit_codes, codes, strict=True):
        assert code in (None, found), result.report()
