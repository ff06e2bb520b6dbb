"""Do the ranks draw the same random numbers for their samples (dropout, noise), and one process others for each?

Compared once, before a converted program runs for the first time: the state of Paddle's generator, and the seeds that
its operators have of their own. What has no samples (a mask of weights) is one draw for all of them, and is left alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import paddle
from paddle.base.core import DataType

from fleet_train.collectives.job import Job
from fleet_train.convert.passes.program import inputs_of, is_random, nested_operators, operators_behind
from fleet_train.errors import ConversionError

_WHAT = "draw the same random numbers for their samples (dropout masks, noise), where one process draws others for each"
_SEED = (
    "call paddle.seed(SEED + fleet.worker_index()) below fleet.init; all ranks start with rank 0's parameters anyway"
)


def advice_about_draws(job: Job, program: Any) -> ConversionError | None:
    """What to say of ranks whose draws are the same; None if none are. All ranks call it."""
    operators = list(_draws_for_samples(program))
    if not operators:
        return None
    seeds = sorted({seed for each in operators if (seed := _own_seed(each))})
    state = _state() if any(not _own_seed(each) for each in operators) else ""
    with job.inside("comparing the ranks' random generators"):
        found = job.all_gather("random generators", [state, seeds]).values()
    if state and (same := _most_alike([each for each, _ in found])) > 1:
        return ConversionError(f"{_ranks(same, job)} {_WHAT}; {_SEED} (docs/data.md#random-numbers-on-several-ranks)")
    if seeds and (same := _most_alike([each for _, each in found])) > 1:
        return ConversionError(
            f"{_ranks(same, job)} {_WHAT}, and in every step: the program's random_seed, or seed= of a layer, is "
            f"{seeds[0]}; leave it out and {_SEED} (docs/data.md#random-numbers-on-several-ranks)"
        )
    return None


def _ranks(same: int, job: Job) -> str:
    return "all ranks" if same == job.world_size else f"{same} of {job.world_size} ranks"


def _most_alike(values: Sequence[Any]) -> int:
    return max(values.count(each) for each in values)


def _draws_for_samples(program: Any) -> Iterator[Any]:
    """The operators that draw in training, with a number of draws, or on values, that follow from what is fed."""
    for operator in program.global_block().ops:
        inner = [each for each in nested_operators(operator) if is_random(each)]
        if (inner or is_random(operator)) and _has_samples(operator):
            yield from inner or [operator]


def _has_samples(operator: Any) -> bool:
    sizes = [part for value in inputs_of(operator) for part in _sizes(value)]
    if sizes:
        return not all(map(_is_of_one_sample, sizes))
    if any(-1 in result.shape for result in operator.results()):
        return True
    given = inputs_of(operator)
    return bool(given) and any(each.name() == "pd_op.data" for each in operators_behind(*given))


def _sizes(value: Any) -> Sequence[Any]:
    """The numbers of which Paddle stacks the shape of a draw; empty for other values."""
    maker = value.get_defining_op()
    is_shape = maker is not None and maker.name() == "pd_op.stack" and value.dtype in (DataType.INT32, DataType.INT64)
    return inputs_of(maker.operand_source(0).get_defining_op()) if is_shape else ()


def _is_of_one_sample(size: Any) -> bool:
    """Whether a size is a number of the script, or one of a tensor's later dimensions: of features, not samples."""
    maker = size.get_defining_op()
    if maker.name() != "pd_op.slice":
        return bool(maker.name() == "pd_op.full")
    of, start = (maker.operand_source(place).get_defining_op() for place in (0, 1))
    return of.name() in ("pd_op.shape", "pd_op.shape64") and start.attrs().get("value", [0])[0] != 0


def _own_seed(operator: Any) -> int:
    """The seed with which an operator draws the same numbers in every step; 0: it draws from the generator."""
    attributes = operator.attrs()
    return int(attributes.get("seed", 0)) if attributes.get("fix_seed", True) else 0


def _state() -> str:
    """What the next draws follow from. Its text begins with device, seed, offset, and an address of this process."""
    states = paddle.get_cuda_rng_state() if paddle.is_compiled_with_cuda() else paddle.get_rng_state()
    words = [" ".join(word for word in str(state).split()[1:] if not word.startswith("0x")) for state in states[:1]]
    return hashlib.blake2b(words[0].encode(), digest_size=16).hexdigest()
