"""``launch --verify_joint_batch``: is the average of the ranks' gradients the gradient of the joint batch?

In a program's first runs all ranks' feeds go to rank 0, which runs the script's own program on all of them at once
(`passes.joint_program`) with the parameters of that run, and compares. What each rank's program has computed is
averaged for it in float64, plainly: what is asked is what the loss means on several ranks, not what a compression
loses. The training gets the same bits as without.
"""

from __future__ import annotations

import io
import math
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle

from fleet_train.cluster.installed import memory
from fleet_train.collectives.host_ops import once_until_grown
from fleet_train.collectives.job import Job
from fleet_train.collectives.transfer import gather_arrays
from fleet_train.convert import process
from fleet_train.convert.joint_feed import JointFeed, read_feed
from fleet_train.convert.passes.joint_program import DRAWN, Array, JointProgram, mark, marked_in, summed
from fleet_train.convert.rewrite import initialized_tensor
from fleet_train.errors import ConversionError
from fleet_train.log import log_once
from fleet_train.profile import Profile

_VERIFY_SECONDS = 1800.0
"""How long rank 0 may compute with the joint batch, for which the other ranks wait: a step of all of them, twice."""

Pairs = Sequence[tuple[Any, Any]]

CALL = "launch --verify_joint_batch"
_UNTRIED = "the joint batch was not verified: "
_MOST_BYTES = 1 << 30
_HEADER = 1 << 10
"""More bytes than numpy writes before an array."""
_SHOWN = 3
_SMALL = 1e-2
"""A gradient smaller than this part of all is measured by that part: of what cancels out, rounding alone is left."""
_EXACT, _LOW = (1e-5, 1e-3), (2e-2, 1e-1)
"""Up to the first difference a gradient counts as the same; up to the second, if another order of the samples makes a
tenth as much. In float32, and where something has 16 bits."""

current: Verification | None = None
"""The verification of this process's job; None if none was asked for."""


def begin(job: Job, steps: int) -> None:
    """Check converted programs in their first ``steps`` runs, from now on."""
    global current
    current = None
    if job.world_size == 1:
        log_once(["--verify_joint_batch: a job of one process has nothing to compare"], job.cluster.rank)
        return
    current = Verification(job, steps)
    process.on_each_run(current.note_scope)
    process.before_each_run(current.before, is_last=True)
    process.after_each_run(current.after)


@dataclass
class Check:
    """The check of one backward pass in a program; ``names``: of its parameters."""

    number: int
    main: Any
    program: JointProgram
    profile: Profile
    left: int
    names: set[str] = field(default_factory=set)
    problem: str = ""
    """Why one process cannot compute the same, in words."""
    scale_name: str | None = None
    worst: float = 0.0
    runs: int = 0


@dataclass
class VerifiedRun:
    """What is to be looked at behind a run that has begun."""

    check: Check
    problem: str = ""
    """Why this rank cannot take part, in words."""
    feed: dict[str, Array] = field(default_factory=dict)
    values: list[tuple[str, Any]] = field(default_factory=list)
    """What is fetched for it: by parameter, gradients; by input, random values."""
    scope: Any = None
    scale: float = 1.0

    def take(self, fetched: Sequence[Any]) -> dict[str, Array]:
        """Note the random values, and return the gradients, without the loss scale."""
        both = list(zip(self.values, fetched, strict=True))
        self.feed |= {name: np.asarray(got) for (name, _), got in both if name.startswith(DRAWN)}
        gradients = summed(each for each in both if not each[0][0].startswith(DRAWN))
        return {name: each / self.scale for name, each in gradients.items()}


class Verification:
    """All checks of this process."""

    def __init__(self, job: Job, steps: int) -> None:
        self._job, self._steps = job, steps
        self._checks: list[Check] = []
        self._scope: Any = None
        self._open: list[VerifiedRun] = []
        self._marked: Callable[[Any], dict[str, list[Any]]] = once_until_grown(marked_in)

    def begin_check(self, loss: Any, profile: Profile) -> Check:
        """Begin the check of a backward pass of ``loss``, which no pass has changed yet."""
        joint = JointProgram(loss, profile, self._job.place)
        steps = 1 if profile.use_local_sgd else self._steps  # later, ranks have parameters of their own
        self._checks.append(Check(len(self._checks), loss.block.program, joint, profile, steps))
        return self._checks[-1]

    def follow(self, check: Check, pairs: Pairs, trained: Any, untrained: Any, scale_name: str | None) -> None:
        """Mark the gradients ``pairs`` that the converted program makes, and have one process make the same; see
        `JointProgram.derive`. ``scale_name``: the variable with their scale."""
        check.scale_name = scale_name
        for parameter, gradient in pairs:
            if gradient is not None:
                check.names.add(parameter.name)
                mark(gradient, f"{check.number} {parameter.name}")
        try:
            shares = self._job.world_size * check.profile.accumulate_steps
            check.program.derive(trained, untrained, check.names, shares)
        except Exception as error:  # no reason not to train
            check.problem = _last_line(error)
            return
        for earlier in self._checks[: check.number]:
            if earlier.main is check.main and check.program.variables & earlier.names:
                check.problem = "it reads parameters that an earlier update of the same program changes"

    def note_update(self, main: Any) -> None:
        """Say so once if the script has made the gradients itself, with which ``main`` is to be updated."""
        if all(check.main is not main for check in self._checks):
            log_once([f"{_UNTRIED}the script makes its gradients itself"], self._job.cluster.rank)

    def note_scope(self, program: Any, scope: Any) -> None:
        """Keep the scope of a run; for `process.on_each_run`."""
        del program
        self._scope = scope

    def before(self, program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
        """Let a run fetch what its checks compare as well; for `process.before_each_run`."""
        running = paddle.static.default_main_program() if program is None else program
        self._open = []
        if any(check.left for check in self._checks) and isinstance(running, paddle.static.Program):
            marked = self._marked(running)
            begun = {int(name.split()[0]) for name in marked if not name.startswith(DRAWN)}
            self._open = [
                self._begun(each, marked, feed) for each in self._checks if each.left and each.number in begun
            ]
        if not self._open:
            return feed, fetch_list
        own = fetch_list if isinstance(fetch_list, (list, tuple)) else [] if fetch_list is None else [fetch_list]
        return feed, [*own, *(value for run in self._open for _, value in run.values)]

    def _begun(self, check: Check, marked: Mapping[str, list[Any]], feed: Any) -> VerifiedRun:
        if check.problem:
            return VerifiedRun(check, check.problem)
        inputs, own = check.program.inputs, f"{check.number} "
        values = [(name.removeprefix(own), each) for name in marked if name.startswith(own) for each in marked[name]]
        try:
            given = read_feed(feed, [name for name in inputs if not name.startswith(DRAWN)])
        except ConversionError as error:  # there are feeds which let no executor fetch arrays
            return VerifiedRun(check, str(error))
        drawn = [name for name in inputs if name.startswith(DRAWN)]
        if not all(name in marked for name in drawn):
            return VerifiedRun(check, "of some random operators it is not known what they have drawn")
        values += [(name, marked[name][0]) for name in drawn]
        scope = paddle.static.Scope()
        for name in check.program.variables if self._job.cluster.rank == 0 else ():
            tensor, copy = initialized_tensor(self._scope, name), scope.var(name).get_tensor()
            if tensor is not None and math.prod(tensor.shape()):
                copy._share_data_with(tensor._copy(self._job.place))
            elif tensor is not None:  # Paddle refuses to share no data
                copy.set(np.array(tensor), self._job.place)
        scale = initialized_tensor(self._scope, check.scale_name) if check.scale_name else None
        return VerifiedRun(check, "", given, values, scope, 1.0 if scale is None else float(np.asarray(scale).item()))

    def after(self, results: Any) -> Any:
        """Take what a run has fetched for its checks, and compare it; for `process.after_each_run`."""
        runs, self._open = self._open, []
        if not runs:
            return results
        own = len(results) - sum(len(run.values) for run in runs)
        extra = iter(results[own:])
        for run in runs:
            fetched = [next(extra) for _ in run.values]
            with self._job.inside(CALL):
                self._compare(run, run.take(fetched))
        return results[:own]

    def _compare(self, run: VerifiedRun, gradients: dict[str, Array]) -> None:
        """All ranks call it; rank 0 compares, and all hear the outcome."""
        job = self._job
        size = sum(array.nbytes + _HEADER for array in run.feed.values())
        every = job.all_gather(f"verify {job.count('verify')}", [size, run.problem, _room(job)])
        ranks = [every[rank] for rank in range(job.world_size)]
        problem = next((each for _, each, _ in ranks if each), ranks[0][2])
        most = max(each[0] for each in ranks)
        if not problem and most * len(ranks) > _MOST_BYTES:
            of_all, allowed = most * len(ranks) / 1e9, _MOST_BYTES / 1e9
            problem = f"the feeds of all ranks have {of_all:.1f} GB, and up to {allowed:.1f} GB are sent to rank 0"
        means = {} if problem else self._means(gradients)
        parts = [] if problem else self._feeds(run.feed, most)
        outcome: dict[str, Any] = {"untried": problem}
        if job.cluster.rank == 0 and not problem:
            try:
                outcome = Comparison(run, parts, means).outcome()
            except Exception as error:
                outcome = {"untried": _last_line(error)}
        name = f"verified {job.count('verified')}"
        self._say(run.check, job.broadcast(name, outcome, timeout_seconds=_VERIFY_SECONDS))

    def _means(self, gradients: dict[str, Array]) -> dict[str, Array]:
        """The means of a run's gradients over the ranks, on rank 0."""
        means = {}
        for name in sorted(gradients):
            if parts := gather_arrays(self._job, {name: gradients[name]}):
                means[name] = sum(part[name] for part in parts) / len(parts)
        return means  # type: ignore[return-value]

    def _feeds(self, feed: Mapping[str, Array], most: int) -> list[dict[str, Array]]:
        """Gather the feeds of all ranks on rank 0; the largest needs ``most`` bytes."""
        sent, parts = io.BytesIO(bytes(most)), []
        for array in feed.values():
            np.save(sent, array, allow_pickle=False)
        for got in gather_arrays(self._job, {"feeds": np.frombuffer(sent.getbuffer(), np.uint8)}):
            stream = io.BytesIO(got["feeds"].tobytes())
            parts.append({name: np.lib.format.read_array(stream, allow_pickle=False) for name in feed})
        return parts

    def _say(self, check: Check, outcome: Mapping[str, Any]) -> None:
        """The one line, if the check has ended with it."""
        rank, of = self._job.cluster.rank, f"the gradient of {self._job.world_size} ranks is"
        check.left, check.runs = check.left - 1, check.runs + 1
        if problem := outcome.get("untried"):
            check.left = 0
            log_once([f"{_UNTRIED}{problem}"], rank)
        elif outcome["wrong"]:
            check.left = 0
            self._job.advise(ConversionError(f"not verified: {of} not the joint batch's: {outcome['wrong']}"))
        else:
            check.worst = max(check.worst, outcome["worst"])
            if check.left == 0:
                steps = f" in {check.runs} steps" if check.runs > 1 else ""
                notes = "".join(f"; {note}" for note in outcome["notes"])
                log_once([f"verified: {of} the joint batch's to {check.worst:.1e}{steps}{notes}"], rank)


def _room(job: Job) -> str:
    """Why rank 0's machine has too little memory for all ranks' samples at once, in words; what this process has
    needed so far is taken for those of one rank."""
    needed = job.world_size * 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    free = memory().get("available_bytes", needed)
    if needed <= free or not isinstance(job.place, paddle.CPUPlace):
        return ""
    return f"one process may need {needed / 1e9:.1f} GB for it, and rank 0's machine has {free / 1e9:.1f} GB left"


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_paddle = [line for line in lines if "Error: " in line]
    return (of_paddle or lines or [type(error).__name__])[-1][:300]


class Comparison:
    """The comparison, on rank 0, of the ranks' ``means`` with the gradient of one process that is fed all ``parts``."""

    def __init__(self, run: VerifiedRun, parts: Sequence[Mapping[str, Array]], means: Mapping[str, Array]) -> None:
        self._program, self._profile, self._scope = run.check.program, run.check.profile, run.scope
        self._parts, self._ranks = parts, len(parts)
        self._feed = JointFeed(self._program.inputs, parts, DRAWN)
        is_sum = self._profile.average_over == "nothing"
        self._means = {name: each * self._ranks for name, each in means.items()} if is_sum else means
        self._exact, self._most = _LOW if self._program.has_low_precision else _EXACT

    def outcome(self) -> dict[str, Any]:
        """What all ranks are told."""
        joint = self._program.run(self._scope, self._feed.arrays)
        if not all(np.isfinite(each).all() for each in joint.values()):
            return {"untried": "the gradient of the joint batch has NaN or infinity in one process, too"}
        notes = [f"{name}, which is unlike on the ranks, is added up" for name in map(repr, self._feed.added)]
        if self._exact == _LOW[0]:
            notes.append(f"with 16 bits, where {self._exact:g} counts as the same")
        factor = _factor(self._means, joint)
        is_share = abs(factor * self._ranks - 1) < self._most
        is_corrected = is_share and self._program.has_correction
        if is_corrected:
            notes.append(f"but for the factor {factor:.3g}, by which the script itself corrects its loss")
            joint = {name: each * factor for name, each in joint.items()}
        differences = _differences(self._means, joint)
        worst, allowed = max(differences.values(), default=0.0), self._exact
        if self._exact < worst < self._most:
            backwards = JointFeed(self._program.inputs, self._parts[::-1], DRAWN)
            again = self._program.run(self._scope, backwards.arrays)
            noise = _differences({name: each * factor**is_corrected for name, each in again.items()}, joint)
            allowed = min(max(self._exact, 10 * max(noise.values())), self._most)
        wrong = {name: each for name, each in differences.items() if not each <= allowed}
        words = f"{_in_words(wrong)}. Likely because {'; and '.join(self._causes(is_share))}" if wrong else ""
        return {"worst": worst, "notes": notes, "wrong": words}

    def _causes(self, is_share: bool) -> list[str]:
        counts, causes = self._feed.counts, []
        is_plain = self._profile.average_over == "ranks"
        if not all(np.isfinite(each).all() for each in self._means.values()):
            causes.append("a rank's gradient has NaN or infinity (a share of the batch without a valid sample?)")
        elif is_share:
            causes.append(f"it is 1/{self._ranks} of it everywhere: the loss is a sum over the batch, not a mean")
        if (norm := self._program.own_statistics) and not self._profile.sync_batch_norm:
            causes.append(f"batch norm takes each rank's own batch ({norm}; sync_batch_norm: true synchronises it)")
        if len(set(counts)) > 1 and is_plain:
            causes.append(f"average_over: ranks counts unequal batches alike ({', '.join(map(str, counts))} samples)")
        if self._feed.odd:
            odd = ", ".join(map(repr, self._feed.odd))
            causes.append(f"{odd} has not one row per sample (does it hold places in a rank's own batch?)")
        if causes:
            return causes
        divides = "with average_over: ranks, it divides by a number of valid samples, or " if is_plain else ""
        return [f"each rank's loss takes its own batch as the whole: {divides}samples meet (fleet.all_gather_samples)"]


def _in_words(wrong: Mapping[str, float]) -> str:
    named = sorted(wrong, key=lambda name: -np.nan_to_num(wrong[name], nan=math.inf))
    words = ", ".join(f"'{name}' is off by {wrong[name]:.1e} of its size" for name in named[:_SHOWN])
    return f"{words}, and {len(named) - _SHOWN} more" if len(named) > _SHOWN else words


def _factor(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> float:
    """The factor by which all of ``wanted`` is nearest to ``found``."""
    both = sum(float(np.vdot(found[name], each)) for name, each in wanted.items())
    return both / (sum(float(np.vdot(each, each)) for each in wanted.values()) or 1.0)


def _differences(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> dict[str, float]:
    """The difference of each parameter's gradient, as a part of the wanted gradient's size."""
    sizes = {name: float(np.linalg.norm(each)) for name, each in wanted.items()}
    least = _SMALL * math.hypot(*sizes.values())
    return {
        name: float(np.linalg.norm(found[name] - each)) / (max(sizes[name], least) or 1.0)
        for name, each in wanted.items()
    }
