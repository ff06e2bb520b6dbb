"""The proof that collectives on streams of their own read what has been computed.

If NCCL read a buffer before the calculation stream has written it, all ranks would get the same wrong sum, and the
comparison of replicas would pass. So for a program's start values and in its first steps each collective on a stream of
its own is repeated on the calculation stream, with a copy of what it was given; the copy's result is used, and both are
compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import paddle
from paddle import _C_ops

from fleet_train.collectives.engine import CallContext, Collective, HostCopy
from fleet_train.collectives.engines import CALC, OWN, StreamEngine
from fleet_train.collectives.job import Job
from fleet_train.log import log_once, logger

PROOF_STEPS = 3
_TOLERANCE = {paddle.float16: 1e-2, paddle.bfloat16: 1e-2}
_EXACT_TO = 1e-5
"""How much equal sums may differ, relative to the largest result: same inputs, communicator and order."""


@dataclass(frozen=True)
class _Compared:
    """A comparison under way. ``wrong``: int64 [], how many elements differ; on the device."""

    context: CallContext
    wrong: Any
    elements: int


class OwnStreamProof:
    """The comparisons of one program's start values and first ``PROOF_STEPS`` updates.

    All ranks make the calls in the same order. Where a result differs on any rank, all ranks go on with the calculation
    stream. Nothing wrong has been used: until then, a collective's result is that of the calculation stream.
    """

    def __init__(self, job: Job, engine: StreamEngine) -> None:
        self._job = job
        self._engine = engine
        self._updates = 0
        self._compared: list[_Compared] = []
        self._copies: list[tuple[list[_Compared], HostCopy]] = []
        self._number = 0
        engine.proof = self if PROOF_STEPS else None  # of the start values, too

    def begin_update(self) -> None:
        """Called at the start of each update, before its first collective."""
        if self._updates > PROOF_STEPS + 1:
            self._engine.proof = None
            return
        if self._updates and self._engine.stream == OWN:
            self._agree()
        self._engine.proof = self if self._updates < PROOF_STEPS and self._engine.stream == OWN else None
        self._updates += 1

    def compare(self, collective: Collective, copy: Collective, context: CallContext) -> None:
        """Compare two results on the device, and use the copy's."""
        for result, expected in zip(collective.results, copy.results, strict=True):
            self._compared.append(_Compared(context, wrong_elements(result, expected), result.size))
            _C_ops.assign_out_(expected, result)  # paddle.assign counts a name in the script's generator

    def end_update(self) -> None:
        """Called after the last bucket: the host reads the outcome in the next update."""
        compared, self._compared = self._compared, []
        if compared:
            wrong = paddle.stack([each.wrong for each in compared])
            self._copies.append((compared, self._engine.device.to_host(wrong)))

    def _agree(self) -> None:
        """Learn from all ranks whether any of their results differed."""
        copies, self._copies = self._copies, []
        mine = [_in_words(each, int(wrong)) for compared, copy in copies for each, wrong in _wrong(compared, copy)]
        self._number += sum(len(compared) for compared, _ in copies)
        everybody = self._job.all_gather(f"own streams {self._job.count('own streams')}", mine[:1])
        found = {rank: words[0] for rank, words in everybody.items() if words}
        rank = self._job.cluster.rank
        if found:
            first = min(found)
            self._engine.stream = CALC
            if rank == 0:
                logger.warning(
                    "collective_stream: own is given up, and all ranks go on with calc: on %s, %s. Streams of their "
                    "own do not read what has been computed here; nothing wrong was used. Set collective_stream: calc, "
                    "and please report it with the output of: fleet_train selftest --ladder",
                    self._job.cluster.describe(first),
                    found[first],
                )
        elif self._updates == PROOF_STEPS + 1:
            sentence = (
                f"collective_stream: own: in {PROOF_STEPS} steps {self._number} collectives on streams of their own "
                "gave on every rank what the calculation stream gives"
            )
            log_once([sentence], rank)


def _wrong(compared: list[_Compared], copy: HostCopy) -> list[tuple[_Compared, Any]]:
    numbers = copy.read()
    return [(each, wrong) for each, wrong in zip(compared, numbers, strict=True) if wrong]


def _in_words(compared: _Compared, wrong: int) -> str:
    return (
        f"{compared.context.what}: {wrong} of {compared.elements} elements differ from those of the calculation stream"
    )


def wrong_elements(result: Any, expected: Any) -> Any:
    """How many elements of two tensors differ, int64 []; made on the device. NaN is equal to NaN."""
    if not result.is_floating_point():
        return (result != expected).cast("int64").sum()
    wide = "float64" if result.dtype == paddle.float64 else "float32"
    ours, theirs = result.cast(wide), expected.cast(wide)
    size = theirs.abs()
    largest = paddle.where(paddle.isfinite(size), size, paddle.zeros_like(size)).max()
    near = (ours - theirs).abs() <= _TOLERANCE.get(result.dtype, _EXACT_TO) * largest
    same = near | (ours == theirs) | (paddle.isnan(ours) & paddle.isnan(theirs))
    return paddle.logical_not(same).cast("int64").sum()
