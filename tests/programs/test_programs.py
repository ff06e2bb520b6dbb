"""Programs as users write them: two ranks reach the result of one process, or refuse with a reason.

One process of plain Paddle with the joint batch is the reference (``alone.py``). Lossy strategies, and programs that
draw random numbers, are compared with the simulation of all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import paddle
import pytest

from tests.programs.alone import read_records
from tests.programs.catalogue import ALWAYS, EXACT, LOSSY, Program, Strategy, programs
from tests.support.processes import ROOT
from tests.support.ranks import run_ranks

FOLDER = ROOT / "tests/programs"
# One process draws start values in the order of the program, as a profile with one executor thread has it.
IN_PROGRAM_ORDER = {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}

PROGRAMS = programs()
COMPARED = [name for name, one in PROGRAMS.items() if not one.random]
SIMULATED = [name for name, one in PROGRAMS.items() if one.simulated]
# Beside those that every program meets: so many, in turn.
DEALT_OUT = 2

# What is odd in its communication, where collectives are enqueued and end late as on GPUs.
UNDER_LATE_STREAMS: dict[str, tuple[str, ...]] = {
    "gan_in_one_program": ("multi_node", "unfused"),
    "tied_embedding": ("merge",),
    "cond_sharing_a_layer": ("unfused",),
    "minimize_after_start": ("multi_node",),
    "two_programs_same_parameters": ("unfused",),
    "bfloat16": ("checked every step",),
}

# Subjects that `make test` trains, each in a launch that its first test waits for; `make test-long` trains the others.
SHORT = ("settings",)
# What oneDNN computes in bfloat16 by the program's own will: on processors without AVX-512 plain Paddle raises.
IN_BFLOAT16 = ("bfloat16", "own_auto_cast")
NO_BFLOAT16 = pytest.mark.skipif(
    not paddle.base.core.supports_bfloat16(), reason="this processor has no AVX-512, and plain Paddle no bfloat16 on it"
)

IN_LOW_PRECISION = 2e-2
# Where 16 bits are rounded, the last bit of a float32 decides now and then to which side.
ROUNDED = 1e-3

Case = tuple[str, str]
Record = dict[str, Any]


@dataclass
class Found:
    """What the ranks have recorded of each case, by label; the output of a launch that failed."""

    ranks: list[dict[str, Record]]
    output: str

    def of(self, case: Case) -> list[Record]:
        return [rank.get(", ".join(case), {}) for rank in self.ranks]

    def complaint(self, case: Case) -> str:
        """Why there is no result, or nothing."""
        for rank, record in enumerate(self.of(case)):
            if "error" in record:
                return f"{case}: rank {rank}: {record['error']}\n{record['traceback']}"
        if not all(record.get("ended") for record in self.of(case)):
            return f"{case}: {'did not end' if any(self.of(case)) else 'was not reached'}\n{self.output}"
        return ""


def run_cases(cases: Sequence[Case], folder: Path, alone: Path, late_streams: bool = False) -> Found:
    """Cases on two ranks, a node each, up to the first that fails."""
    result = run_ranks(
        FOLDER / "on_ranks.py",
        2,
        nodes=2,
        folder=folder,
        args=[json.dumps(cases), str(alone)],
        env={"FLEET_TRAIN_JOIN_TIMEOUT": "60"},
        timeout_seconds=800,
        check=False,
        late_streams=late_streams,
    )
    records = [read_records(folder / f"rank{rank}.jsonl") for rank in (0, 1)]
    return Found(records, result.report() if any(result.exit_codes) else "")


@dataclass
class Alone:
    """Programs in one process: the folder with its numbers, and what each has recorded."""

    folder: Path
    run: Callable[[str], dict[str, Record]]

    def __getitem__(self, name: str) -> Record:
        return self.run(PROGRAMS[name].subject).get(name, {})


Run = Callable[[str], Found]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def run(subject: str) -> dict[str, Record]:
        names = [name for name, one in PROGRAMS.items() if one.subject == subject]
        args, own = [json.dumps(names), str(folder)], folder / subject
        run_ranks(FOLDER / "alone.py", 1, nodes=0, folder=own, args=args, env=IN_PROGRAM_ORDER, timeout_seconds=500)
        return read_records(folder / "alone.jsonl")

    return Alone(folder, run)


@pytest.fixture(scope="module")
def on_two_ranks(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What two ranks found for a program, whose subject is run in one launch."""

    @cache
    def run(subject: str) -> Found:
        chosen = [one for one in PROGRAMS.values() if one.subject == subject]
        cases = [case for one in chosen for case in cases_of(one, alone[one.name])]
        return run_cases(cases, tmp_path_factory.mktemp(subject), alone.folder)

    return lambda name: run(PROGRAMS[name].subject)


@pytest.fixture(scope="module")
def on_late_streams(alone: Alone, tmp_path_factory: pytest.TempPathFactory) -> Found:
    cases = [(name, strategy) for name, chosen in UNDER_LATE_STREAMS.items() if alone[name] for strategy in chosen]
    return run_cases(cases, tmp_path_factory.mktemp("streams"), alone.folder, late_streams=True)


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    rows = []
    for name in names:
        marks = [NO_BFLOAT16] if name in IN_BFLOAT16 else []
        marks += [] if PROGRAMS[name].subject in SHORT else [pytest.mark.long]
        rows.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("name", rows)


def cases_of(program: Program, reference: Record) -> list[Case]:
    """The strategies that a program is run with on two ranks."""
    return [(program.name, name) for name in [*exact_cases(program, reference), *lossy_cases(program, reference)]]


def exact_cases(program: Program, reference: Record) -> list[str]:
    if program.random or not reference.get("ended"):
        return []
    if program.only:
        return list(program.only)
    chosen = (*ALWAYS, *dealt_out(program.name))
    return [name for name in chosen if _fits(name, EXACT[name], program, reference)]


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


@each(PROGRAMS)
def test_one_process_of_plain_paddle_trains_it(alone: Alone, name: str) -> None:
    record = alone[name]
    assert record.get("ended"), f"{record.get('error', 'the process ended before it')}\n{record.get('traceback')}"
    assert record["moved"] > 1e-3, "nothing was trained"


@each(COMPARED)
def test_two_ranks_reach_the_result_of_one_process(alone: Alone, on_two_ranks: Run, name: str) -> None:
    strategies = exact_cases(PROGRAMS[name], alone[name])
    assert strategies
    expect_equal(on_two_ranks(name), name, strategies, alone)


@each(SIMULATED)
def test_lossy_strategies_follow_the_simulation(alone: Alone, on_two_ranks: Run, name: str) -> None:
    program, found = PROGRAMS[name], on_two_ranks(name)
    wrong = []
    for strategy in lossy_cases(program, alone[name]):
        case = (name, strategy)
        if complaint := found.complaint(case):
            wrong.append(complaint)
            continue
        tolerance = ROUNDED if any(rounded in strategy for rounded in ("bf16", "int8")) else program.tolerance
        for rank, record in enumerate(found.of(case)):
            wrong += unequal(f"{case}: rank {rank}", record["simulated"], tolerance)
        if len({record["replica"] for record in found.of(case)}) > 1:
            wrong.append(f"{case}: the replicas differ at the end, where all parameters were made equal")
    assert not wrong, "\n".join(wrong)


@pytest.mark.long
@each(UNDER_LATE_STREAMS)
def test_programs_reach_the_same_result_if_collectives_end_late(
    alone: Alone, on_late_streams: Found, name: str
) -> None:
    expect_equal(on_late_streams, name, UNDER_LATE_STREAMS[name], alone)


def expect_equal(found: Found, name: str, strategies: Iterable[str], alone: Alone) -> None:
    """The result of one process under these strategies; a refusal where the program says so."""
    cases = [(name, strategy) for strategy in strategies]
    wrong = [one for case in cases for one in differences(found, case, alone[name], PROGRAMS[name])]
    assert not wrong, f"{PROGRAMS[name].sentence}\n" + "\n".join(wrong)


def differences(found: Found, case: Case, reference: Record, program: Program) -> list[str]:
    """Everything in which the ranks' results differ from one process's, or from each other's."""
    if complaint := found.complaint(case):
        return [complaint]
    records, strategy, where = found.of(case), EXACT[case[1]], ", ".join(case)
    if refusal := program.refusal(case[1]):
        texts = [record.get("refused", "it was not refused") for record in records]
        return [f"{where}: rank {rank}: {text}" for rank, text in enumerate(texts) if refusal not in text]
    wrong = []
    for record in records:
        wrong += unequal(f"{where}: start values: ", record["start"] | {"more": []}, 0.0)
    if len({record["replica"] for record in records}) > 1:
        wrong.append(f"{where}: the replicas differ")
    accused = [place for place in records[0]["accused"] if not program.said or program.said not in place]
    wrong += [f"{where}: {place}, is said of the loss" for place in accused]
    if any(record["alike"] is False for record in records):
        wrong.append(
            f"{where}: with equal counts the bits are not those of average_over: ranks, or of a step's own update"
        )
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
