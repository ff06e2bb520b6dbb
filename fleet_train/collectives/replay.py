"""A step whose forward and backward pass a rank computes twice, to compare its own gradients before they are averaged.

The first pass runs before the step, and copies what the rank itself has computed: its gradients, and values that ranks
exchange inside the program. What the ranks answered there is remembered. The step's own pass gets the same answers
without a message, and is compared before anything is updated: so the gradients that are averaged are those that were
compared. A rank that finds a difference computes further passes alone, to tell a fault from operators that are not
deterministic; the others meanwhile wait for what it has to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

from paddle import _C_ops

from fleet_train.collectives.job import Job
from fleet_train.collectives.paddle_compat import ensured_dynamic_mode
from fleet_train.collectives.replica_check import bits_of
from fleet_train.errors import ComputeFault, ConversionError, FleetTrainError

current: Replay | None = None
"""The check of the run that is under way; None for most runs. Set before the run."""

_EXCHANGES = ("gather", "total", "joint", "counts")
"""The operators that exchange values inside the passes."""
_OF_STEPS = ("arrive", "begin", "loss")
"""The operators within the passes that belong to a step, not to what it computes."""
_EXCHANGED = "a value that ranks exchange inside the program"
_NAMED = 3
_FURTHER = 3
"""Passes after a difference: faults come once, and operators that are not deterministic differ in most of them."""


class Pass(Enum):
    FIRST = "before the step, on all ranks"
    STEP = "the step's own"
    AGAIN = "after a difference, on one rank"


class Replay:
    """The passes of one checked run on this rank. ``moment``: the step, in words that all ranks know."""

    def __init__(self, job: Job, moment: str) -> None:
        self._job, self._moment = job, moment
        self._pass = Pass.FIRST
        self._names: list[str] = []
        self._first: list[Any] = []
        self._again: list[Any] = []
        self._flags: list[Any] = []
        """Whether each value of the step's own pass differs from the first pass's, as bool [1]."""
        self._answers: dict[Any, Any] = {}
        self._error: FleetTrainError | None = None

    def begin(self, number: Pass) -> None:
        """Called before a pass."""
        self._pass, self._again = number, []

    def takes(self, names: Sequence[str], gradients: Sequence[Any]) -> bool:
        """Look at a bucket's own gradients; whether nothing further is to be done with them in this pass."""
        named = names if len(names) == len(gradients) else [", ".join(names)] * len(gradients)
        self._see([f"the gradient of '{name}'" for name in named], gradients)
        return self._pass is not Pass.STEP

    def carry_out(self, name: str, operator: Any, action: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """What a communicating ``operator`` returns in this pass; ``action`` carries it out."""
        kind = name.partition("_")[0]
        if kind in _OF_STEPS and self._pass is not Pass.STEP:
            return None
        if kind == "barrier" and self._pass is Pass.AGAIN:
            return None
        is_behind = self._pass is Pass.STEP and operator not in self._answers  # the gradients, and not computed twice
        if kind not in _EXCHANGES or is_behind:
            return action(*tensors)
        # A batch norm's operands are also its whole values, of which nothing is sent.
        sent = [tensor for tensor in tensors if kind != "gather" or tensor.ndim == 1]
        self._see([_EXCHANGED] * len(sent), sent)
        if operator not in self._answers:
            self._answers[operator] = action(*tensors)
        answer = self._answers[operator]
        return None if answer is None else [tensor.clone() for tensor in answer]

    def differing(self) -> list[str]:
        """The values of the step's own pass, as far as it came, that differ from the first pass's, in words. The host
        waits for the device."""
        if not self._flags:
            return []
        with ensured_dynamic_mode():
            flags = self._job.engine.device.to_host(_C_ops.concat(self._flags, 0)).read()
        found = [name for name, differs in zip(self._names, flags, strict=False) if differs]
        return list(dict.fromkeys(found))

    def compare(self) -> None:
        """Called before the step's first bucket is waited for: all ranks learn of any difference, and nothing is
        updated then. Raises ComputeFault, to end the run; `judge` has the error."""
        if found := self.differing():
            raise ComputeFault(f"{found[0]} differs between two passes")
        self._agree(None)
        if self._error is not None:
            raise ComputeFault(str(self._error))
        global current
        current = None

    def judge(self, run: Callable[[], None]) -> FleetTrainError | None:
        """The error of a run that this check has ended: if the difference is this rank's own, the other ranks wait for
        it. None if this check has not ended it. ``run``: computes one more pass."""
        if self._error is None and (found := self.differing()):
            further = []
            for _ in range(_FURTHER):
                self.begin(Pass.AGAIN)
                run()
                further.append(self._again)
            is_fault = all(_are_equal(further[0], other) for other in further[1:])
            self._agree([is_fault, self._described(found, is_fault)])
        return self._error

    def _described(self, found: Sequence[str], is_fault: bool) -> str:
        cluster, others = self._job.cluster, len(found) - _NAMED
        more = f" and {others} more" if others > 0 else ""
        what = f"{', '.join(found[:_NAMED])}{more} of {cluster.describe(cluster.rank)} in {self._moment}"
        text = (
            f"{what} differ{'s' * (len(found) == 1)} between two passes over the same samples, and {_FURTHER} further "
        )
        if is_fault:
            return text + (
                "ones are alike: a processor or memory of that machine is at fault. No parameter has been updated with "
                "it: take the machine out, and continue from the last checkpoint (replay_check_steps)"
            )
        return text + (
            "ones differ as well: operators of this program are not deterministic. Make them so (on a GPU set "
            "FLAGS_cudnn_deterministic: 1 and FLAGS_embedding_deterministic: 1 in the profile's environment), or set "
            "replay_check_steps: 0; if they are, that machine computes something else each time"
        )

    def _agree(self, finding: Any) -> None:
        """Learn of the difference of the lowest rank that has found one. All ranks call it."""
        variants = self._job.compare(f"passes of {self._moment}", finding, self._job.step_timeout_seconds)
        for ranks, found in variants:
            if found is not None and self._error is None:
                is_fault, text = found
                self._error = self._job.failure = ComputeFault(text) if is_fault else ConversionError(text)
                self._error.failed_rank = ranks[0][0]

    def _see(self, names: Sequence[str], tensors: Sequence[Any]) -> None:
        if self._pass is Pass.STEP:
            at = len(self._flags)
            pairs = zip(self._first[at : at + len(tensors)], tensors, strict=True)
            self._flags += [_differs(first, tensor) for first, tensor in pairs]
            return
        if self._pass is Pass.FIRST:
            self._names += names
        (self._first if self._pass is Pass.FIRST else self._again).extend(tensor.clone() for tensor in tensors)


def _are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    with ensured_dynamic_mode():
        return not any(_differs(a, b).item() for a, b in zip(one, other, strict=True))


def _differs(one: Any, other: Any) -> Any:
    """Whether two tensors of one shape differ in a bit: bool [1], which the host does not read."""
    return (bits_of(one) != bits_of(other)).any().reshape([1])
