"""Programs as users write them: two ranks reach the result of one process, or refuse with a reason.

One process of plain Paddle with the joint batch is the reference (``alone.py``). Lossy strategies, and programs that
draw random numbers, are compared with the simulation of all ranks.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import paddle
import pytest

from tests.programs.alone import read_records
from tests.programs.catalogue import ALWAYS, EXACT, LOSSY, Program, Strategy, optimizers, programs, values
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

FOLDER = ROOT / "tests/programs"
# One process draws start values in the order of the program, as a profile with one executor thread has it.
IN_PROGRAM_ORDER = {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}
# Cases that die, or stop their launch, before the rest is given up.
MOST_LAUNCHES = 6


PROGRAMS = programs()
SEED = 0
COMPARED = [name for name, one in PROGRAMS.items() if not one.random]
SIMULATED = [name for name, one in PROGRAMS.items() if one.simulated]
# What a job of one process is tried with: a profile that leaves the program alone; in turn two that rewrite it.
ONE_PROCESS = ("multi_node",)
REWRITING = ("merge", "recompute")
# Beside those that every program meets: so many, in turn. All of them for FLEET_TRAIN_TEST_ALL_STRATEGIES=1.
DEALT_OUT = 2
EVERYTHING = bool(os.environ.get("FLEET_TRAIN_TEST_ALL_STRATEGIES"))

# A few more launches of what is odd in its communication, where collectives are enqueued and end late as on GPUs.
UNDER_LATE_STREAMS: dict[str, tuple[str, ...]] = {
    "gan_in_one_program": ("multi_node", "unfused"),
    "two_tasks": ("three communicators", "executor's threads"),
    "tied_embedding": ("multi_node", "merge"),
    "clip_by_global_norm": ("unfused", "merge"),
    "adamw": ("powersgd, late",),
    "momentum": ("local_sgd, every step",),
    "batch_norm_and_evaluation": ("sync batch norm",),
    "cond_sharing_a_layer": ("unfused",),
    "while_loop_between_layers": ("multi_node",),
    "save_and_load": ("merge", "executor's threads"),
    "minimize_after_start": ("multi_node",),
    "two_programs_same_parameters": ("unfused",),
    "two_dtypes": ("waiting",),
    "bfloat16": ("checked every step",),
}

# The first test of a subject waits for the launch of all its cases.
# Subjects whose programs `make test` trains on two ranks; `make test-long` trains those of the others.
SHORT = ("settings",)
# What oneDNN computes in bfloat16 by the program's own will: on processors without AVX-512 plain Paddle raises.
IN_BFLOAT16 = ("bfloat16", "own_auto_cast")
NO_BFLOAT16 = pytest.mark.skipif(
    not paddle.base.core.supports_bfloat16(), reason="this processor has no AVX-512, and plain Paddle no bfloat16 on it"
)

IN_LOW_PRECISION = 2e-2
# Where 16 bits are rounded, the last bit of a float32 decides now and then to which side.
ROUNDED = 1e-3

Case = tuple[str, int, str]
Record = dict[str, Any]


def label(case: Case) -> str:
    program, seed, strategy = case
    return f"{program}-{seed}, {strategy}"


@dataclass
class Found:
    """What the ranks have recorded of each case, by label; the output of launches that failed."""

    ranks: list[dict[str, Record]]
    outputs: list[str]

    def of(self, case: Case) -> list[Record]:
        return [rank.get(label(case), {}) for rank in self.ranks]

    def complaint(self, case: Case) -> str:
        """Why there is no result, or nothing."""
        for rank, record in enumerate(self.of(case)):
            if "error" in record:
                return f"{label(case)}: rank {rank}: {record['error']}\n{record['traceback']}"
        if not all(record.get("ended") for record in self.of(case)):
            began = any(self.of(case))
            return f"{label(case)}: {'did not end' if began else 'was not reached'}\n" + "\n".join(self.outputs)
        return ""


def run_cases(cases: Sequence[Case], folder: Path, alone: Path, world_size: int, late_streams: bool = False) -> Found:
    """Cases on ranks, a node each (or in one process without a launcher): each launch goes on behind the last case
    that the one before has begun."""
    found, left = Found([{} for _ in range(world_size)], []), list(cases)
    for number in range(MOST_LAUNCHES):
        own = folder / f"launch{number}"
        own.mkdir()
        result = run_ranks(
            FOLDER / "on_ranks.py",
            world_size,
            nodes=world_size if world_size > 1 else 0,
            folder=own,
            args=[json.dumps(left), str(alone)],
            env={"FLEET_TRAIN_JOIN_TIMEOUT": "60"},
            timeout_seconds=800,
            check=False,
            late_streams=late_streams,
        )
        records = [read_records(own / f"rank{rank}.jsonl") for rank in range(world_size)]
        for kept, new in zip(found.ranks, records, strict=True):
            kept.update(new)
        if any(result.exit_codes):
            found.outputs.append(result.report())
        left = [case for case in left if not any(label(case) in rank for rank in records)]
        if not left or not any(records):
            break
    return found


Alone = tuple[Path, dict[str, Record]]
Run = Callable[[str], Found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    """Every program in one process: the folder with its numbers, and a record by program."""
    folder = tmp_path_factory.mktemp("alone")
    cases = json.dumps([(name, SEED) for name in PROGRAMS])
    run_ranks(
        FOLDER / "alone.py",
        1,
        nodes=0,
        folder=folder,
        args=[cases, str(folder)],
        env=IN_PROGRAM_ORDER,
        timeout_seconds=500,
    )
    records = read_records(folder / "alone.jsonl")
    return folder, {name: records.get(f"{name}-{SEED}", {}) for name in PROGRAMS}


@pytest.fixture(scope="module")
def on_two_ranks(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What two ranks found for a program, whose subject is run in one launch."""
    folder, records = alone

    @cache
    def run(subject: str) -> Found:
        chosen = [one for one in PROGRAMS.values() if one.subject == subject]
        cases = [case for one in chosen for case in cases_of(one, records[one.name])]
        return run_cases(cases, tmp_path_factory.mktemp(subject), folder, 2)

    return lambda name: run(PROGRAMS[name].subject)


@pytest.fixture(scope="module")
def in_one_process(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Found:
    cases = [case for name in COMPARED for case in one_process_cases(PROGRAMS[name])]
    return run_cases(cases, tmp_path_factory.mktemp("one"), alone[0], 1)


@pytest.fixture(scope="module")
def on_late_streams(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Found:
    cases = [(name, SEED, strategy) for name, chosen in UNDER_LATE_STREAMS.items() for strategy in chosen]
    return run_cases(cases, tmp_path_factory.mktemp("streams"), alone[0], 2, late_streams=True)


def each(names: Iterable[str], launched: bool = False) -> pytest.MarkDecorator:
    """``launched``: with the other programs of its subject, on two ranks."""
    rows = []
    for name in names:
        marks = [NO_BFLOAT16] if name in IN_BFLOAT16 else []
        if launched and PROGRAMS[name].subject not in SHORT:
            marks.append(pytest.mark.long)
        rows.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("name", rows)


def cases_of(program: Program, reference: Record) -> list[Case]:
    """The strategies that a program is run with on two ranks."""
    names = [*exact_cases(program, reference), *lossy_cases(program, reference)]
    return [(program.name, SEED, name) for name in names]


def exact_cases(program: Program, reference: Record) -> list[str]:
    if program.random or not reference.get("ended"):
        return []
    if program.only:
        return list(program.only)
    chosen = EXACT if EVERYTHING else (*ALWAYS, *dealt_out(program.name))
    fitting = [name for name in chosen if _fits(name, EXACT[name], program, reference)]
    return [*fitting, *(name for name in program.refused if name not in fitting)]


def dealt_out(program: str) -> list[str]:
    """The next strategies in turn; a program that cannot have one of them goes without it."""
    rest = [name for name, one in EXACT.items() if name not in ALWAYS and not one.asked_for]
    first = DEALT_OUT * list(PROGRAMS).index(program)
    return [rest[(first + number) % len(rest)] for number in range(DEALT_OUT)]


def lossy_cases(program: Program, reference: Record) -> list[str]:
    if not program.simulated or not reference.get("ended"):
        return []
    exact = ["unfused"] if program.random else []
    return exact + [name for name, one in LOSSY.items() if _fits(name, one, program, reference)]


def _fits(name: str, strategy: Strategy, program: Program, reference: Record) -> bool:
    merges = "merge" in program.without and strategy.settings.get("accumulate_steps", 1) > 1
    fits = name not in program.without and not merges and not strategy.asked_for
    return fits and (reference["linear"] or not strategy.linear)


def one_process_cases(program: Program) -> list[Case]:
    place = list(PROGRAMS).index(program.name)
    chosen = program.only or ((*ONE_PROCESS, REWRITING[place // 4 % 2]) if place % 4 == 0 else ONE_PROCESS)
    return [(program.name, SEED, name) for name in chosen if name in EXACT and name not in program.without]


@each(PROGRAMS)
def test_one_process_of_plain_paddle_trains_it(alone: Alone, name: str) -> None:
    record = alone[1][name]
    assert record.get("ended"), f"{record.get('error', 'the process ended before it')}\n{record.get('traceback')}"
    assert record["moved"] > 1e-3, "nothing was trained"


@each(COMPARED, launched=True)
def test_two_ranks_reach_the_result_of_one_process(alone: Alone, on_two_ranks: Run, name: str) -> None:
    strategies = exact_cases(PROGRAMS[name], alone[1][name])
    assert strategies
    expect_equal(on_two_ranks(name), name, strategies, alone)


@each(SIMULATED, launched=True)
def test_lossy_strategies_follow_the_simulation(alone: Alone, on_two_ranks: Run, name: str) -> None:
    program, reference, found = PROGRAMS[name], alone[1][name], on_two_ranks(name)
    wrong = []
    for strategy in lossy_cases(program, reference):
        case = (name, SEED, strategy)
        if complaint := found.complaint(case):
            wrong.append(complaint)
            continue
        tolerance = ROUNDED if any(rounded in strategy for rounded in ("bf16", "int8")) else program.tolerance
        for rank, record in enumerate(found.of(case)):
            wrong += unequal(f"{label(case)}: rank {rank}", record["simulated"], tolerance)
        if len({record["replica"] for record in found.of(case)}) > 1:
            wrong.append(f"{label(case)}: the replicas differ at the end, where all parameters were made equal")
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@each(COMPARED)
def test_job_of_one_process_is_plain_paddle(alone: Alone, in_one_process: Found, name: str) -> None:
    program = PROGRAMS[name]
    cases = one_process_cases(program)
    expect_equal(in_one_process, name, [strategy for _, _, strategy in cases], alone)
    if (name, SEED, "multi_node") in cases and not (program.rewritten or program.sums):
        (record,) = in_one_process.of((name, SEED, "multi_node"))
        assert record["end"] == alone[1][name]["end"], "other bits than plain Paddle's"


@pytest.mark.long
@each(UNDER_LATE_STREAMS)
def test_programs_reach_the_same_result_if_collectives_end_late(
    alone: Alone, on_late_streams: Found, name: str
) -> None:
    expect_equal(on_late_streams, name, UNDER_LATE_STREAMS[name], alone)


def expect_equal(found: Found, name: str, strategies: Iterable[str], alone: Alone) -> None:
    """The result of one process under these strategies; a refusal where the program says so."""
    cases = [(name, SEED, strategy) for strategy in strategies]
    wrong = [one for case in cases for one in differences(found, case, alone[1][name], PROGRAMS[name])]
    assert not wrong, f"{PROGRAMS[name].sentence}\n" + "\n".join(wrong)


def differences(found: Found, case: Case, reference: Record, program: Program) -> list[str]:
    """Everything in which the ranks' results differ from one process's, or from each other's."""
    if complaint := found.complaint(case):
        return [complaint]
    records, strategy, where = found.of(case), EXACT[case[2]], label(case)
    if refusal := program.refusal(case[2]):
        texts = [record.get("refused", "it was not refused") for record in records]
        return [f"{where}: rank {rank}: {text}" for rank, text in enumerate(texts) if refusal not in text]
    wrong = []
    for record in records:
        wrong += unequal(f"{where}: start values: ", record["start"] | {"more": []}, 0.0)
    if len({record["replica"] for record in records}) > 1:
        wrong.append(f"{where}: the replicas differ")
    wrong += [f"{where}: {place} is accused as a sum over the batch" for place in records[0]["accused"]]
    if strategy.rounded:
        return wrong + unequal_losses(where, records, reference["fetched"], IN_LOW_PRECISION)
    wrong += unequal(f"{where}: parameters", records[0]["parameters"], program.tolerance)
    if not strategy.own_state:
        # A velocity may be the small rest of gradients that took each other away.
        wrong += unequal(f"{where}: state", records[0]["state"], 10 * program.tolerance)
    return wrong + unequal_losses(where, records, reference["fetched"], program.tolerance)


def unequal(where: str, compared: dict[str, Any], tolerance: float) -> list[str]:
    wrong = []
    if not compared["difference"] <= tolerance:
        wrong.append(f"{where}: {compared['worst']} is off by {compared['difference']:.1e}")
    wrong += [f"{where}: {kind} names {compared[kind]}" for kind in ("missing", "more") if compared[kind]]
    return wrong


def unequal_losses(where: str, records: list[Record], expected: list[float], tolerance: float) -> list[str]:
    """The mean of what the ranks fetched beside what one process fetched."""
    means = [sum(values) / len(values) for values in zip(*(record["fetched"] for record in records), strict=True)]
    if len(means) != len(expected):
        return [f"{where}: {len(means)} values were fetched, by one process {len(expected)}"]
    off = [abs(mean - one) / max(abs(one), 1e-3) for mean, one in zip(means, expected, strict=True)]
    return [f"{where}: a fetched value is off by {max(off):.1e}"] if off and max(off) > tolerance else []


def test_every_strategy_meets_many_programs() -> None:
    free = [one for one in PROGRAMS.values() if not (one.only or one.random)]
    met = Counter(name for one in free for name in exact_cases(one, {"ended": True, "linear": True}))
    asked = Counter(name for one in PROGRAMS.values() for name in one.only)
    assert all(asked[name] if one.asked_for else met[name] >= 18 for name, one in EXACT.items())


def test_every_optimizer_clip_decay_and_schedule_of_paddle_is_in_a_program() -> None:
    paddle.enable_static()
    try:
        made = [make() for make in optimizers.OPTIMIZERS.values()]
    finally:
        paddle.disable_static()
    assert {type(one).__name__ for one in made} | optimizers.NOT_STATIC == set(paddle.optimizer.__all__)
    clips = {type(one._grad_clip).__name__ for one in made if one._grad_clip is not None}
    # Not in today's programs: ClipGradByValue raises NotImplementedError in plain Paddle.
    assert clips | {"ClipGradByValue"} == {name for name in paddle.nn.__all__ if name.startswith("ClipGrad")}
    assert {type(one.regularization).__name__ for one in made} >= set(paddle.regularizer.__all__)
    assert values.SCHEDULES.keys() | values.NOT_HERE == set(paddle.optimizer.lr.__all__)
