"""Values that a program exchanges in the forward pass, with gradients that it exchanges in the backward pass.

Paddle derives no gradient of host operators. So a value to exchange is passed through a ``slice`` of all of it, which
is marked: before the conversion that is the program of one card, and Paddle derives the gradient, a ``slice_grad``
with the same bounds. Afterwards the ``slice`` reads the result of the exchange instead of the value, and the
``slice_grad`` the exchanged gradient instead of its own. Both operators stay, so that a script keeps what it holds;
while another loss's gradients are derived, the value is read again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import paddle
from paddle import _C_ops

from fleet_train.collectives.host_ops import passes_a_token
from fleet_train.collectives.joint_values import JointValues
from fleet_train.convert.passes.program import line_of
from fleet_train.errors import ConversionError

MARK = "fleet_train_exchanged"
"""The attribute of a marked operator: ``SAMPLES``, ``FIRST``, ``MEAN`` or ``NUMBER``."""
SAMPLES, FIRST, MEAN, NUMBER = "samples", "first", "mean", "number"
TO_THE_END = 2**31 - 1
"""The end of a ``slice`` that takes all that follows."""
_INFERRED, _UNKNOWN = [1], [-1]
_FORWARD, _GRADIENT = "pd_op.slice", "pd_op.slice_grad"
_BOUND = 1
"""The operand of a ``slice`` that its gradient alone reads, too."""
_INCOMING = 1
"""The operand of a ``slice_grad`` that is the gradient of the slice."""


def mean_with_gradient(value: Any) -> Any:
    """``value`` (without a batch dimension, floating point), once converted its mean over ranks; its gradient is the
    mean over ranks of the incoming one. At the current insertion point."""
    return _number(value, MEAN)


def mean_over_ranks(value: Any) -> Any:
    """``value``, which all ranks compute with alike, once converted its mean; its gradient is the incoming one."""
    return _number(value, NUMBER)


def all_samples(value: Any) -> Any:
    """``value`` [n, ...], once converted that of all ranks in rank order; its gradient is summed over ranks. The first
    dimension is unknown."""
    return _marked(value, SAMPLES, TO_THE_END, _UNKNOWN)


def first_sample(value: Any) -> Any:
    """0, int64 [1]; once converted the index of the first own row of ``all_samples(value)``."""
    shape = _C_ops.shape64(value)
    first = _marked(paddle.zeros_like(shape), FIRST, 1, _INFERRED)
    first.stop_gradient = True
    return first


def refuse_no_samples(call: str, value: Any) -> None:
    """Raise ConversionError unless ``value`` is one whose samples ``call`` can gather here."""
    if not isinstance(value, paddle.pir.Value) or not value.is_dense_tensor_type():
        raise ConversionError(
            f"{call} was given {type(value).__name__}; it takes a value of a static program, called while the network "
            "is built (fleet.gather is for Python values)"
        )
    if not value.shape:
        raise ConversionError(f"{call} was given a value of shape []: it needs a first dimension, the samples")
    block = paddle.pir.get_current_insertion_point().block()
    if block != block.program.global_block():
        raise ConversionError(
            f"{call} is inside a control-flow block, where communication has no order that is the same on every rank; "
            "move it out"
        )


def is_gathered(operator: Any) -> bool:
    """Whether the first dimension of the operator's result has the samples of all ranks."""
    return bool(operator.has_attr(MARK) and operator.attrs()[MARK] == SAMPLES)


def forgotten(program: Any) -> str:
    """The script's line of a value that is marked and not exchanged, as words for a message; empty if there is none."""
    left = [operator for operator in _marks(program) if not _is_exchanged(operator.operand_source(0))]
    return (line_of(left[0]) or "the script") if left else ""


@contextlib.contextmanager
def with_own_values(program: Any) -> Iterator[None]:
    """In the body Paddle can derive gradients: what is exchanged is read before its exchange."""
    exchanged = [
        (operator, operator.operand_source(0))
        for operator in _marks(program)
        if operator.attrs()[MARK] != FIRST and passes_a_token(operator.operand_source(0).get_defining_op())
    ]
    for operator, result in exchanged:
        operator.operand(0).set_source(result.get_defining_op().operands_source()[-1])
    try:
        yield
    finally:
        for operator, result in exchanged:
            operator.operand(0).set_source(result)


def exchange_marked(program: Any, joint: JointValues) -> None:
    """Insert the exchanges of what is marked in the current ``program``, and of its gradients, unless they are there.
    Call it after the backward pass and before anything that reads gradients."""
    marks = _marks(program)
    _exchange_samples([mark for mark in marks if mark.attrs()[MARK] in (SAMPLES, FIRST)], joint)
    for mark in marks:
        value, name = mark.operand_source(0), _name(mark)
        if mark.attrs()[MARK] in (MEAN, NUMBER) and not _is_exchanged(value):
            paddle.pir.set_insertion_point(mark)
            mark.operand(0).set_source(joint.mean(name, value))
    exchanged = [mark for mark in marks if mark.attrs()[MARK] != NUMBER]
    gradients = [(each, mark) for mark in exchanged for each in _gradients_of(mark)]
    for gradient, mark in gradients:
        incoming, name = gradient.operand_source(_INCOMING), f"gradient of {_name(mark)}"
        paddle.pir.set_insertion_point(gradient)
        if mark.attrs()[MARK] == MEAN:
            own = joint.mean(name, incoming, is_gradient=True)
        else:
            gather = mark.operand_source(0).get_defining_op()
            own = joint.sum_of_own(name, incoming, gather, gradient.result(0).shape)
        gradient.operand(_INCOMING).set_source(own)
    paddle.pir.reset_insertion_point_to_end()


def _exchange_samples(marks: Sequence[Any], joint: JointValues) -> None:
    """A value's samples and the index of the first one come from one exchange."""
    results: dict[int, tuple[Any, Any]] = {}
    for mark in marks:
        source, is_first = mark.operand_source(0), mark.attrs()[MARK] == FIRST
        if _is_exchanged(source):
            continue
        value = _value_of_zeros(source) if is_first else source
        if value.id not in results:
            paddle.pir.set_insertion_point(mark)
            zero = paddle.zeros([1], "int64")
            results[value.id] = joint.gather(_name(mark), value, zero)
        mark.operand(0).set_source(results[value.id][0 if is_first else 1])


def _value_of_zeros(zeros: Any) -> Any:
    return zeros.get_defining_op().operand_source(0).get_defining_op().operand_source(0)


def _number(value: Any, mark: str) -> Any:
    """Mark a value without a batch dimension, as one with a dimension: a ``slice`` has at least one."""
    marked = _marked(value if value.shape else value.reshape([1]), mark, TO_THE_END, _INFERRED)
    return marked if value.shape else marked.reshape([])


def _marked(value: Any, mark: str, end: int, infer: list[int]) -> Any:
    result = _C_ops.slice(value, [0], [0], [end], infer, [])
    result.get_defining_op().set_str_attr(MARK, mark)
    return result


def _marks(program: Any) -> list[Any]:
    return [operator for operator in program.global_block().ops if operator.has_attr(MARK)]


def _is_exchanged(value: Any) -> bool:
    """Whether a value is exchanged, or what recompute keeps of one."""
    maker = value.get_defining_op()
    return maker is not None and "fleet_train_" in maker.name()


def _gradients_of(mark: Any) -> list[Any]:
    """The operators that pass a gradient of the marked value on as it is."""
    found = []
    for user in mark.operand_source(_BOUND).all_used_ops():
        if user.name() == _FORWARD and not user.has_attr(MARK):
            raise ConversionError(
                f"{_name(mark)}: the gradient of its gradient is not exchanged; take second gradients of a part of the "
                "network without it"
            )
        made = user.operand_source(_INCOMING).get_defining_op() if user.name() == _GRADIENT else mark
        if made is not None and user.name() == _GRADIENT and not passes_a_token(made):
            found.append(user)
    return found


def _name(mark: Any) -> str:
    what = "mean over ranks" if mark.attrs()[MARK] in (MEAN, NUMBER) else "fleet.all_gather_samples"
    line = line_of(mark)
    return f"{what} ({line})" if line else what
