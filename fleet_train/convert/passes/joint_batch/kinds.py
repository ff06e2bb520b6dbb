"""What is known of a value of a program, and what is found about a loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fleet_train.convert.passes.joint_batch.axes import Axes, SampleCount

Divisors = tuple["Operand | tuple[SampleCount, ...]", ...]
"""The operands of ``divide``, and the numbers of elements of means."""


@dataclass(frozen=True)
class BatchKind:
    """What is known of a value. ``axes``: as of `Axes`; empty for a number of the batch, or what does not depend on it.

    ``degree``: what has been taken over the batch is the joint batch's after that many multiplications by the number of
    ranks: 1 for a sum, 0 for a mean; None if that is not known.
    ``own``: the number is of this rank's batch alone, and the joint batch's is the mean of the ranks'.
    ``learned``: it depends on a parameter. ``shared``: so, and it is a number of the joint batch already.
    ``sizes``: of sizes of dimensions, and what is computed of them, where they come from. ``fed``: numbers that the
    script feeds and that are its factors or divisors: of a sum, one that counts samples; else a weight of a rank's own.
    ``spread``: the operator that has multiplied a sum by the number of shares, if one has.
    ``divisors``: the counts by whose product it has been divided; None if it depends on them otherwise.
    ``gathered``: a number of the samples that all ranks have gathered.
    """

    axes: Axes = field(default_factory=dict)
    degree: int | None = 0
    own: bool = False
    learned: bool = False
    shared: bool = False
    sizes: tuple[tuple[SampleCount, ...], ...] | None = None
    fed: tuple[Any, ...] = ()
    spread: Any = None
    divisors: Divisors | None = ()
    gathered: bool = False

    @property
    def is_of_feed(self) -> bool:
        """Whether the value depends on what is fed."""
        return bool(self.axes or self.own or self.fed or self.degree != 0 or self.shared or self.sizes is not None)


CONSTANT = BatchKind()


class Operand(NamedTuple):
    """Operand number ``place`` of ``operator``."""

    operator: Any
    place: int
    value: Any


@dataclass(frozen=True)
class Operation:
    """An operator that is looked at: its short name, its operands, also through ``combine``, their kinds, and whether
    one of them depends on a parameter."""

    operator: Any
    name: str
    operands: Sequence[Operand]
    kinds: Sequence[BatchKind]
    learned: bool

    @property
    def sources(self) -> list[Any]:
        return [operand.value for operand in self.operands]

    @property
    def sizes(self) -> tuple[tuple[SampleCount, ...], ...] | None:
        """The sources of the sizes among an operator's operands; None for none."""
        return tuple(size for kind in self.kinds for size in kind.sizes or ()) or None

    @property
    def spread(self) -> Any:
        """What has multiplied one of its operands by the number of shares."""
        return next((kind.spread for kind in self.kinds if kind.spread is not None), None)

    @property
    def is_shared(self) -> bool:
        return any(kind.shared for kind in self.kinds)

    @property
    def fed(self) -> tuple[Any, ...]:
        """The fed numbers among its operands' factors, as real numbers where it makes them so."""
        if self.name == "cast" and self.kinds[0].fed and not is_float(self.sources[0]):
            return (self.operator.result(0),)
        return tuple({value.id: value for kind in self.kinds for value in kind.fed}.values())

    @property
    def values(self) -> Operation:
        """The operator without the operands that only say how large its result is."""
        sized_by = SIZED_BY.get(self.name, ())
        left = [place for place in range(len(self.operands)) if place not in sized_by]
        operands, kinds = [self.operands[place] for place in left], [self.kinds[place] for place in left]
        return Operation(self.operator, self.name, operands, kinds, self.learned)


@dataclass(frozen=True)
class Use:
    """What an operator is to read instead of an operand.

    ``is_joined``: the mean over ranks; of an integer the sum. ``back``: its gradient the mean of the ranks', too.
    ``power``: then times the number of ranks to this power.
    """

    operand: Operand
    is_joined: bool = False
    back: bool = False
    learned: bool = False
    power: int = 0


@dataclass
class Findings:
    """What is to be done with the program of one loss."""

    uses: list[Use] = field(default_factory=list)
    means: dict[int, tuple[SampleCount, ...]] = field(default_factory=dict)
    """Means over samples, by their id: the numbers of elements that they divide by."""
    biases: dict[int, int] = field(default_factory=dict)
    """Operators, by their id, that add a constant to a number: its degree."""
    counts: list[Any] = field(default_factory=list)
    """Fed numbers that count samples."""
    undecided: list[tuple[Any, str]] = field(default_factory=list)
    """Operators that nothing can be done about, and why."""
    assumed: list[tuple[Any, str]] = field(default_factory=list)
    """Operators whose meaning was taken from a constant, and which it is."""
    several: list[Any] = field(default_factory=list)
    """Operators for which micro-batches have no common weight."""
    divisors: Divisors = ()
    """The counts by whose product the loss is divided."""
    power: int = 0
    """The power of the number of shares that the loss is to be multiplied by."""


# Linear in a number, or only moving its elements.
MOVES = (
    "cast", "reshape", "transpose", "squeeze", "unsqueeze", "flatten", "assign", "share_data", "slice", "split",
    "split_with_num", "expand", "expand_as", "tile", "sum", "mean", "mean_all", "strided_slice", "memcpy",
)  # fmt: skip
SCALES = ("multiply", "divide", "scale")
ADDS = ("add", "subtract", "add_n")
COLLECTS = ("concat", "stack", "builtin.combine")
# Of numbers with one degree their result has it, too.
CHOOSES = ("maximum", "minimum", "clip", "where", "fmax", "fmin", "relu", "abs", "max", "min")
COMPARES = (
    "greater_than", "greater_equal", "less_than", "less_equal", "equal", "not_equal", "logical_and", "logical_or",
    "logical_not",
)  # fmt: skip
CONSTANTS_LIKE = ("full_like", "zeros_like", "ones_like")
# The operands that say how large a result is.
SIZED_BY: Mapping[str, tuple[int, ...]] = {
    "full_with_tensor": (1,), "arange": (0, 1, 2), "expand": (1,), "reshape": (1,), "slice": (1, 2), "tile": (1,),
    "sequence_mask": (1,), "one_hot": (1,), "uniform": (0,), "gaussian": (0,), "linspace": (2,), "randint": (0,),
    "strided_slice": (1, 2, 3), "topk": (1,), "split": (1, 2),
}  # fmt: skip
# Samples meet in what computes along their dimension, and in what takes more from it than a sum.
ALONG = (
    "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "argsort", "topk", "kthvalue",
    "roll", "flip", "mode", "unique", "unique_consecutive", "renorm",
)  # fmt: skip
EXTREMES = (
    "max", "min", "amax", "amin", "argmax", "argmin", "prod", "any", "all", "logsumexp", "p_norm", "frobenius_norm",
    "median", "nanmedian",
)  # fmt: skip
# Their results are of no sample, though their number may be unknown as well.
COUNTS = ("bincount", "unique")
SUMS = ("sum", "squared_l2_norm")
MEANS = ("mean", "mean_all")


def short(operator: Any) -> str:
    """``mean`` for ``pd_op.mean``; names of Paddle's builtin operators stay whole."""
    name = str(operator.name())
    return name if name.startswith("builtin.") else name.rpartition(".")[2].rstrip("_")


def is_float(value: Any) -> bool:
    """Whether a value holds real numbers; a list of values does not."""
    return value.is_dense_tensor_type() and "float" in str(value.dtype)


def total(degrees: Iterable[int | None]) -> int | None:
    """The sum of degrees; None if one is not known."""
    found = 0
    for degree in degrees:
        if degree is None:
            return None
        found += degree
    return found


def difference(first: BatchKind, second: BatchKind) -> int | None:
    """The difference of two kinds' degrees; None if one is not known."""
    return total((first.degree, None if second.degree is None else -second.degree))
