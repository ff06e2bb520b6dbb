"""Jobs one after another in one process, or as one of several ranks, recorded one line each.

Arguments: ``alone`` or ``ranks``; a file with one job in JSON a line; the folder with what ``alone`` wrote; the process
with which it ends. A case is recorded as what its parameters are, what each step has fetched, and, of ranks, how far
that is from one process.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import psutil

from tests.joint_batch import Case, cases
from tests.joint_batch.batches import Array, Feeds
from tests.joint_batch.builder import Builder
from tests.joint_batch.profiles import WAYS, Job, Way
from tests.programs.alone import attempt, clean_state
from tests.support.worker import digest

MOMENTUM, RATE = 0.9, 0.1
_IN_PROGRAM_ORDER = {"FLAGS_new_executor_serial_run": True, "FLAGS_new_executor_sequential_run": True}


class Training:
    """One program with its feeds: of one process, or of one of several ranks."""

    def __init__(self, case: Case, job: Job, rank: int | None) -> None:
        self.way: Way = WAYS[job.way]
        mode = "static" if case.static and self.way.mode == "unlike" else self.way.mode
        self.feeds = Feeds(case.name, mode, job.parts, case.ends_empty)
        self.rank = rank
        self.fetched: list[float] = []
        known = mode == "static"
        self._exe = paddle.static.Executor(paddle.CPUPlace())
        self._case, self._optimizer = case, job.optimizer
        size = sum(self.feeds.sizes(0)[:1] if rank is not None or self.way.plain else self.feeds.sizes(0))
        ranks = 1 if rank is None and not self.way.plain else job.ranks
        self.builder = Builder(self.way.dtype, size if known else None, ranks, self.way.synchronized)

    def build(self, minimize: Callable[[Any, Any], Any]) -> Any:
        """Build the program, and start it. Returns what ``minimize(optimizer, loss)`` does."""
        paddle.set_default_dtype(self.way.dtype)
        self.loss = self._case.build(self.builder)
        found = minimize(self._new_optimizer(), self.loss)
        chosen = paddle.get_flags(list(_IN_PROGRAM_ORDER))
        paddle.set_flags(_IN_PROGRAM_ORDER)  # random start values are drawn in the order of the program
        self._exe.run(paddle.static.default_startup_program())
        paddle.set_flags(chosen)
        self.start = self.parameters()
        return found

    def _new_optimizer(self) -> Any:
        if self._optimizer == "adam":
            # A smaller epsilon would enlarge the rounding of gradients that are zero, as of the bias of keys.
            return paddle.optimizer.Adam(0.01, epsilon=1e-3)
        return paddle.optimizer.Momentum(RATE, MOMENTUM)

    def train(self) -> None:
        micro = self.way.micro_batches
        for step in range(self.feeds.steps):
            joint = self.feeds.joint(self.builder.inputs, step)
            parts = [None] if self.rank is None else range(self.rank * micro, (self.rank + 1) * micro)
            values = [self.run(joint, step, part, [self.loss])[0] for part in parts]
            self.fetched.append(float(np.mean(values)))

    def run(self, joint: dict[str, Array], step: int, part: int | None, fetch: list[Any]) -> list[Array]:
        own = self.feeds.share(joint, self.builder.inputs, step, part)
        found: list[Array] = self._exe.run(feed=own, fetch_list=fetch)
        return found

    def train_by_plain_mean(self, pairs: list[tuple[Any, Any]]) -> None:
        """Momentum in numpy, by the mean of the gradients of all parts."""
        parts, fetch = self.feeds.parts, [self.loss, *(gradient for _, gradient in pairs)]
        moments: dict[str, Any] = {parameter.name: 0.0 for parameter, _ in pairs}
        for step in range(self.feeds.steps):
            joint = self.feeds.joint(self.builder.inputs, step)
            results = [self.run(joint, step, part, fetch) for part in range(parts)]
            self.fetched.append(float(np.mean([result[0] for result in results])))
            held = self._tensors()
            for name in moments:
                own = [at for at, (parameter, _) in enumerate(pairs, 1) if parameter.name == name]
                gradient = sum(result[at] for result in results for at in own) / parts
                moments[name] = MOMENTUM * moments[name] + gradient
                held[name].set(np.array(held[name]) - RATE * moments[name], paddle.CPUPlace())

    def _tensors(self) -> Any:
        return paddle.static.default_main_program().state_dict("param", paddle.static.global_scope())

    def parameters(self) -> dict[str, Array]:
        return {name: np.array(value) for name, value in self._tensors().items()}


def run_alone(case: Case, job: Job, folder: Path) -> dict[str, Any]:
    with clean_state(0):
        training = Training(case, job, None)
        if training.way.plain:
            pairs = training.build(lambda optimizer, loss: optimizer.backward(loss))
            training.train_by_plain_mean([pair for pair in pairs if pair[1] is not None])
        else:
            training.build(lambda optimizer, loss: optimizer.minimize(loss))
            training.train()
        end = training.parameters()
    arrays = {f"start/{name}": value for name, value in training.start.items()}
    arrays |= {f"end/{name}": value for name, value in end.items()}
    np.savez(folder / f"{job.reference(case.static)}.npz", **arrays)
    moved = max(float(np.abs(end[name] - training.start[name]).max(initial=0.0)) for name in end)
    return {"fetched": training.fetched, "moved": moved}


def run_on_rank(case: Case, job: Job, folder: Path) -> dict[str, Any]:
    from fleet_train import fleet
    from fleet_train.convert.session import current
    from fleet_train.errors import FleetTrainError
    from fleet_train.log import _logged
    from fleet_train.profile import Profile

    way = WAYS[job.way]
    known = {name: value for name, value in way.settings.items() if name in Profile.model_fields}
    said = _Said()
    _logged.clear()  # what is said once is said of each job
    with clean_state(fleet.worker_index()), said:
        training = Training(case, job, fleet.worker_index())
        wrap = partial(fleet.distributed_optimizer, strategy=Profile(**known))
        current().is_strict = way.strict
        try:
            training.build(lambda optimizer, loss: wrap(optimizer).minimize(loss))
        except FleetTrainError as error:
            return {"refused": f"{type(error).__name__}: {error}"}
        training.train()
        fleet.synchronize_parameters(paddle.static.default_main_program())
        end = training.parameters()
    with np.load(folder / f"{job.reference(case.static)}.npz", allow_pickle=False) as saved:
        start = {name: saved[f"start/{name}"] for name in end}
        expected = {name: saved[f"end/{name}"] for name in end}
    return {
        "fetched": training.fetched,
        "replica": digest(end),
        "start": max(float(np.abs(training.start[name] - start[name]).max(initial=0.0)) for name in end),
        "apart": apart(end, expected, start, way),
        "said": said.messages,
    }


def apart(ours: Mapping[str, Array], expected: Mapping[str, Array], start: Mapping[str, Array], way: Way) -> Any:
    """How far the parameters are from where one process has moved them, in parts of that way, and the worst one."""
    wide = [{name: one[name].astype("float64") for name in expected} for one in (ours, expected, start)]
    broken = [name for name in expected if not np.array_equal(np.isnan(wide[0][name]), np.isnan(wide[1][name]))]
    if broken:
        has = ["NaN" if np.isnan(one[broken[0]]).any() else "numbers" for one in wide[:2]]
        return {"difference": float("inf"), "worst": f"{broken[0]} has {has[0]}, one process {has[1]}"}
    off = {name: _largest(wide[0][name] - wide[1][name]) for name in expected}
    way_of = {name: _largest(wide[1][name] - wide[2][name]) for name in expected}
    # What rounding alone moves: a bias that a softmax takes out again.
    least = max(way_of.values()) * (1e-6 if way.dtype == "float64" else 1e-2)
    if way.together:
        norms = [
            np.sqrt(sum(np.square(np.nan_to_num(one[n] - wide[1][n])).sum() for n in expected))
            for one in (wide[0], wide[2])
        ]
        return {
            "difference": float(norms[0] / max(norms[1], 1e-12)),
            "worst": max(off, key=lambda name: off[name], default=""),
        }
    parts = {name: off[name] / max(way_of[name], least, 1e-12) for name in expected}
    worst = max(parts, key=lambda name: parts[name], default="")
    return {"difference": parts.get(worst, 0.0), "worst": worst}


def _largest(values: Array) -> float:
    found = np.abs(values[~np.isnan(values)])
    return float(found.max(initial=0.0))


class _Said(logging.Handler):
    """What the package says while a case is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def __enter__(self) -> None:
        logging.getLogger("fleet_train").addHandler(self)

    def __exit__(self, *_: object) -> None:
        logging.getLogger("fleet_train").removeHandler(self)


def end_with(judge: int) -> None:
    """Be killed when the process ``judge`` ends, however it does: nobody else would end this one (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if not psutil.pid_exists(judge):
        sys.exit("nobody waits for this")


def main() -> None:
    end_with(int(sys.argv[4]))
    paddle.enable_static()
    how, folder = sys.argv[1], Path(sys.argv[3])
    jobs = [Job(**json.loads(line)) for line in Path(sys.argv[2]).read_text().splitlines()]
    known = cases()
    if how == "alone":
        done: set[str] = set()
        for job in jobs:
            name = job.reference(known[job.case].static)
            if name not in done:
                attempt(folder / "alone.jsonl", name, partial(run_alone, known[job.case], job, folder))
            done.add(name)
        assert not any(module.startswith("fleet_train.convert") for module in sys.modules), "not plain Paddle"
        return
    from fleet_train import fleet, role_maker

    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    records = Path(f"rank{fleet.worker_index()}.jsonl")
    for job in jobs:
        if not attempt(records, job.label, partial(run_on_rank, known[job.case], job, folder)):
            sys.exit(f"{job} failed")  # the ranks may stand at different places


if __name__ == "__main__":
    main()
