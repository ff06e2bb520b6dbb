"""NaN and infinity in this rank's own gradients: seen before they are sent, so that the rank and the step are known.

Where the host may read them, a bucket is looked at before it is launched: one product of each gradient with itself,
which is finite unless an element is not, or all are huge. On streams the device decides, and the host reads its answer
a step later, before anything is saved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import paddle
from paddle import _C_ops

from fleet_train.collectives.engine import HAND_OVER, CallContext, Collective, HostCopy, Stage, Stages
from fleet_train.collectives.job import Job
from fleet_train.collectives.methods.dense import Remembers
from fleet_train.collectives.paddle_compat import host_view
from fleet_train.errors import NotFinite
from fleet_train.log import logger
from fleet_train.profile.knobs import refuse_unknown

ERROR, SKIP, IGNORE = "error", "skip", "ignore"
_FLOATS = (paddle.float32, paddle.float64, paddle.bfloat16, paddle.float16)
_MOST_SAID = 8


class FiniteCheck:
    """What one program's exchange knows about its rank's gradients of the current step. ``reaction``: the knob
    ``nonfinite``; nothing is looked at with `IGNORE`."""

    def __init__(self, job: Job, reaction: str, moment: Callable[[], str]) -> None:
        refuse_unknown("nonfinite", reaction, (ERROR, SKIP, IGNORE), "reaction")
        self._job, self._reaction, self._moment = job, reaction, moment
        self._reads = job.engine.reads_values
        self.found = ""
        """The gradient of this step that is not finite, and how, in words; empty if all are."""
        self._flags: list[Any] = []
        self._copies: list[tuple[str, HostCopy]] = []
        self._said = 0

    @property
    def is_asked_for(self) -> bool:
        """Whether gradients are looked at."""
        return self._reaction != IGNORE

    def begin_step(self) -> None:
        """Called before the first bucket of a run of the program."""
        self.found, self._flags = "", []

    def see(self, names: Sequence[str], gradients: Sequence[Any]) -> None:
        """Look at a bucket's own gradients, before they are sent. Raises NotFinite where that is asked for."""
        if not self.is_asked_for:
            return
        floats = [value for value in gradients if value.dtype in _FLOATS and math.prod(value.shape)]
        if not self._reads:
            self._flags += [not_finite_on_device(floats)] if floats else []
        elif not self.found:
            with np.errstate(all="ignore"):
                is_broken = not all(map(is_finite, floats))
            if is_broken:
                self.found = described(names, floats)
                self._react()

    def end_step(self) -> None:
        """Called after the last bucket of a run: what the device found goes on its way to the host."""
        if self._flags:
            copy = self._job.engine.device.to_host(_C_ops.concat(self._flags, 0))
            self._copies.append((self._moment(), copy))

    def drain_copies(self) -> None:
        """Read what the device found in the last step. Raises NotFinite where that is asked for."""
        copies, self._copies = self._copies, []
        for moment, copy in copies:
            if np.asarray(copy.read()).any():
                self.found = "a gradient holds NaN or infinity"
                self._react(moment)

    def is_spoilt_somewhere(self) -> Any:
        """Whether any rank's gradients of this step hold NaN or infinity: float32 [1], 0 or more, the same on every
        rank. All ranks call it in the same order, after the last bucket was launched."""
        name = f"finite gradients in {self._moment()}"
        if self._reads:
            mine = bool(self.found)
            differ = self._job.compare(name, mine, self._job.step_timeout_seconds)
            return paddle.full([1], float(mine or bool(differ)), "float32")
        flags = _C_ops.concat(self._flags, 0).cast("float32").sum().reshape([1])
        context = CallContext(name, name, self._job.step_timeout_seconds, "finite gradients")
        return self._job.engine.start(_largest(self._job.communicators(1)[0], flags), context).result()

    def _react(self, moment: str = "") -> None:
        where = f"{self.found} on {self._job.cluster.describe(self._job.cluster.rank)} in {moment or self._moment()}"
        if self._reaction == ERROR:
            raise NotFinite(
                f"{where} (updates are counted from 1), before the ranks' gradients were averaged, so that it comes "
                "from this rank's batch or from weights that grow without bound. Look at the batch, try a lower "
                "learning rate, a warm-up or a clip of the gradients, or let no rank update in such steps: nonfinite: "
                "skip in the profile, --set nonfinite=skip"
            )
        self._said += 1
        if self._said <= _MOST_SAID:
            more = "; further ones are not reported" if self._said == _MOST_SAID else ""
            logger.warning("%s; no rank updates in this step (nonfinite: skip)%s", where, more)


def is_finite(tensor: Any) -> bool:
    """Whether all elements of a tensor of floats on the CPU are finite."""
    if tensor.dtype not in (paddle.float32, paddle.float64):
        return bool(paddle.isfinite(tensor).all().item())
    values = host_view(tensor.contiguous())
    # The product of huge elements is infinite, too.
    return math.isfinite(np.dot(values, values)) or bool(np.isfinite(values).all())


def not_finite_on_device(tensors: Sequence[Any]) -> Any:
    """Whether an element of ``tensors`` (of one dtype) is NaN or infinite: bool [1], without a read by the host."""
    dtype = tensors[0].dtype
    if dtype not in (paddle.float32, paddle.float64):  # the operator below has no 16-bit kernels on CPUs
        flags = [paddle.isfinite(tensor).all().reshape([1]) for tensor in tensors]
        return paddle.logical_not(_C_ops.concat(flags, 0).all()).reshape([1])
    one = paddle.full([1], 1.0, dtype)
    found: Any = _C_ops.check_finite_and_unscale_(list(tensors), one)[1]
    return found.reshape([1])


def described(names: Sequence[str], gradients: Sequence[Any]) -> str:
    """Name the gradient of a bucket that is not finite: ``the gradient of 'fc_0.w_0' holds NaN (12 of 128 values)``."""
    for index, gradient in enumerate(gradients):
        values = gradient.cast("float64").numpy()
        broken = ~np.isfinite(values)
        if broken.any():
            name = names[index] if len(names) == len(gradients) else names[0]
            what = "NaN" if np.isnan(values).any() else "infinity"
            return f"the gradient of '{name}' holds {what} ({int(broken.sum())} of {values.size} values)"
    return "a gradient holds NaN or infinity"


class Rollback:
    """What methods keep between steps (error feedback, momentum), as it was before a step that is to be skipped."""

    def __init__(self) -> None:
        self._before: list[tuple[Remembers, dict[str, Any]]] = []

    def remember(self, methods: Sequence[Remembers]) -> None:
        """Copy the methods' state: a step begins."""
        self._before = [(method, method.state()) for method in methods]

    def undo(self) -> None:
        """Give the methods the copied state back: the step is skipped."""
        for method, state in self._before:
            method.load_state(state)


def _largest(group: Any, value: Any) -> Stages[Any]:
    largest = value.clone()
    yield HAND_OVER
    yield Stage((Collective("all_reduce", group, largest, op="max"),))
    return largest
