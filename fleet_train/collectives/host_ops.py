"""Host operators: Python that runs inside a static program. The only place that emits operators.

``paddle.static.register_op`` (public since Paddle 3.3) binds by parameter names and cannot bind ``*args``, so the
functions have as many named parameters as the operator has inputs. Its infer_meta must return a tuple.
Paddle passes an exception of a host operator to ``sys.excepthook`` at once, on any thread, and then raises a
SystemError without a cause from the executor: marking such exceptions lets our hook distinguish the two.

Paddle hands a host operator what oneDNN computed in oneDNN's own memory layout, without a conversion: blocks of
channels, which read as wrong numbers. It converts for its own operators only (``pd_op_to_kernel_pass.cc``), so
an ``assign`` stands before each operand that oneDNN may have computed.
"""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import paddle
from paddle.static import MetaTensor, register_op

from fleet_train.cluster.flight.ring import recorder
from fleet_train.collectives import replay
from fleet_train.collectives.averaging import HeldValues
from fleet_train.collectives.engine import HAND_OVER, CallContext, Collective, Stage, Stages
from fleet_train.collectives.exchange import GradientExchange
from fleet_train.collectives.job import Job
from fleet_train.collectives.paddle_compat import operators_in_dynamic_mode
from fleet_train.errors import ConversionError
from fleet_train.plan import Bucket

# Names are global in a process and bound to one function: two programs must not share a name.
_serial = itertools.count()

Shape = Sequence[int]


def _host_operator(
    name: str,
    inputs: int,
    outputs: Sequence[tuple[Shape, Any]],
    run: Callable[..., Any],
    *,
    in_place: bool = False,
) -> Any:
    """An operator of ``inputs`` tensors whose outputs have the given shapes and dtypes.

    ``in_place``: its operands are passed as they are, because ``run`` may change variables of the scope.
    """
    names = [f"x{i}" for i in range(inputs)]
    shapes = [(list(shape), dtype) for shape, dtype in outputs]

    def infer(*_: Any) -> Any:
        metas = tuple(MetaTensor(dtype=dtype, shape=shape) for shape, dtype in shapes)
        return metas if len(metas) > 1 else metas[0]

    def run_and_mark(*values: Any) -> Any:
        try:
            if not in_place and any(value.layout == "ONEDNN" for value in values):
                raise ConversionError(
                    f"{' or '.join(_ONEDNN_FLAGS)} was set after minimize(): values would be read in oneDNN's memory "
                    "layout; leave it unset"
                )
            return run(*values)
        except BaseException as error:
            error.inside_host_operator = True  # type: ignore[attr-defined]
            raise

    text = ", ".join(names)
    function = eval(f"lambda {text}: run({text})", {"run": run_and_mark})
    meta = eval(f"lambda {text}: infer({text})", {"infer": infer})
    operator = register_op(
        function,
        name=f"fleet_train_{name}_{next(_serial)}",
        infer_meta=meta,
        input_names=names,
        output_names=[f"y{i}" for i in range(len(outputs))],
    )

    def emit(*values: Any) -> Any:
        # Paddle ends the process if an operand is a vector of tensors or a tensor array.
        assert all(value.is_dense_tensor_type() for value in values), (
            f"{name}: {[str(value.type()) for value in values]}"
        )
        operands = values if in_place else map(_in_paddles_layout, values)
        with operators_in_dynamic_mode():
            return operator(*operands)

    return emit


_ONEDNN_FLAGS = ("FLAGS_use_onednn", "FLAGS_use_mkldnn")
# What oneDNN never computes: results of host operators, variables, what is fed, and what was assigned.
_PADDLES_OWN = ("py_op.", "builtin.parameter", "pd_op.data", "pd_op.feed", "pd_op.assign")


def onednn_flags() -> list[str]:
    """The flags that are set and make oneDNN compute float32 on CPUs. They must be off where ranks communicate.

    They hold for dynamic mode, too, where views and collectives read oneDNN's memory layout as it is.
    ``paddle.get_flags`` raises for a flag that this build of Paddle lacks.
    """
    known = paddle.base.core.globals().keys()
    flags = paddle.get_flags([name for name in _ONEDNN_FLAGS if name in known])
    return [name for name, is_set in flags.items() if is_set]


def _in_paddles_layout(value: Any) -> Any:
    """``value``, or a copy of it where oneDNN may compute it: on a CPU where one of its flags is set, and anything in
    bfloat16."""
    if not isinstance(paddle.framework._current_expected_place_(), paddle.CPUPlace):
        return value
    if value.dtype != paddle.bfloat16 and not onednn_flags():
        return value
    made_by = value.get_defining_op()
    return value if made_by and made_by.name().startswith(_PADDLES_OWN) else paddle.assign(value)


def token() -> Any:
    """The start of a chain: operators that pass a token on run in that order on every rank."""
    return _in_paddles_layout(paddle.full([1], 0.0, "float32"))


_LINKS = ("arrive", "begin", "launch", "spoilt", "wait", "share", "fill", "finish")
_OTHER_LINKS = ("barrier", "gather", "total", "owners", "broadcast", "loss", "counts", "joint")
_TOKEN: tuple[Shape, Any] = ([1], paddle.float32)


def is_link(operator: Any) -> bool:
    """Whether an operator of a program belongs to the chain of an exchange; its first result is the token."""
    return kind_of(operator) in _LINKS


def is_launch(operator: Any) -> bool:
    """Whether an operator of a program starts a bucket."""
    return kind_of(operator) == "launch"


def is_wait(operator: Any) -> bool:
    """Whether an operator of a program waits for a bucket."""
    return kind_of(operator) == "wait"


_STARTS_A_STEP = re.compile(r"fleet_train_launch_(\d+)_\d+_")


_Found = TypeVar("_Found")


def once_until_grown(look: Callable[[Any], _Found]) -> Callable[[Any], _Found]:
    """``look(program)``, which is called again only when the program has got operators since; else what it found."""
    known: weakref.WeakKeyDictionary[Any, tuple[int, _Found]] = weakref.WeakKeyDictionary()

    @functools.wraps(look)
    def found(program: Any) -> _Found:
        operators = program.num_ops()
        if program not in known or known[program][0] != operators:
            known[program] = operators, look(program)
        return known[program][1]

    return found


def exchanges_in(program: Any) -> frozenset[int]:
    """The numbers of the exchanges that a program, or a copy of it, carries out."""
    return _exchanges_in(program) if isinstance(program, paddle.static.Program) else frozenset()


@once_until_grown
def _exchanges_in(program: Any) -> frozenset[int]:
    found = (_STARTS_A_STEP.search(operator.name()) for operator in program.global_block().ops)
    return frozenset(int(match[1]) for match in found if match)


def passes_a_token(operator: Any) -> bool:
    """Whether an operator communicates with other ranks; its first operand and its first result are tokens."""
    return kind_of(operator) in (*_LINKS, *_OTHER_LINKS)


def kind_of(operator: Any) -> str:
    """What a host operator of ours does, by the name that `emit_link` was given; empty for another operator."""
    return str(operator.name().rpartition("fleet_train_")[2].partition("_")[0])


def emit_link(
    name: str,
    action: Callable[..., Any],
    chain: Any,
    inputs: Sequence[Any] = (),
    outputs: Sequence[tuple[Shape, Any]] = (),
    *,
    in_place: bool = False,
) -> list[Any]:
    """Insert an operator of a chain, which calls ``action`` with ``inputs``: the next token, and what it returns.

    ``outputs``: the shapes and dtypes of that, if it is anything; ``in_place``: as of `_host_operator`.
    """

    def run(link: Any, *tensors: Any) -> Any:
        checked = replay.current
        results = action(*tensors) if checked is None else checked.carry_out(name, run, action, tensors)
        # The chain's next token: its value is never read, so it may share the memory of the one before.
        return (link.detach(), *results) if outputs else link.detach()

    operator = _host_operator(name, 1 + len(inputs), [_TOKEN, *outputs], run, in_place=in_place)
    results = operator(chain, *inputs)
    results = list(results) if outputs else [results]
    results[0].stop_gradient = True  # beside an assignment Paddle looks for gradients of all operators
    return results


def emit_arrive(exchange: GradientExchange, chain: Any) -> Any:
    """Insert the operator that reports the start of this rank's step; returns the chain's next token."""
    return emit_link("arrive", exchange.arrive, chain)[0]


def emit_launch(
    exchange: GradientExchange, bucket: Bucket, gradients: Sequence[Any], chain: Any, boundary: Any = None
) -> Any:
    """Insert the operator that starts a bucket; returns the chain's next token.

    ``boundary`` (bool [1], or None for always): whether this run ends with an update.
    """

    def launch(*values: Any) -> None:
        exchange.launch(bucket.index, values[: len(gradients)], None if boundary is None else values[-1])

    inputs = [*gradients, *([] if boundary is None else [boundary])]
    return emit_link(f"launch_{exchange.number}_{bucket.index}", launch, chain, inputs)[0]


def emit_wait(
    exchange: GradientExchange, bucket: Bucket, outputs: Sequence[tuple[Shape, Any]], chain: Any
) -> tuple[Any, list[Any]]:
    """Insert the operator that waits for a bucket; returns the next token and the averaged gradients, of the shapes and
    dtypes ``outputs``."""
    name = f"wait_{exchange.number}_{bucket.index}"
    link, *averages = emit_link(name, lambda: exchange.wait(bucket.index), chain, outputs=outputs)
    return link, averages


def emit_is_spoilt(exchange: GradientExchange, chain: Any) -> tuple[Any, Any]:
    """Insert the operator by which all ranks learn whether one has NaN or infinity; returns the next token and that,
    float32 [1], above 0 if so."""
    link, spoilt = emit_link("spoilt", lambda: [exchange.is_spoilt()], chain, outputs=[_TOKEN])
    return link, spoilt


def emit_share(
    exchange: GradientExchange, bucket: Bucket, parameters: Sequence[Any], own: Sequence[Any], chain: Any
) -> Any:
    """Insert the operator that starts sending a bucket's new parameters; returns the chain's next token. ``own``: what
    this rank has updated of them."""

    def share(*tensors: Any) -> None:
        exchange.share(bucket.index, tensors[: len(parameters)], tensors[len(parameters) :])

    name = f"share_{exchange.number}_{bucket.index}"
    return emit_link(name, share, chain, [*parameters, *own], in_place=True)[0]


def emit_fill(exchange: GradientExchange, indices: Sequence[int], parameters: Sequence[Any], chain: Any) -> Any:
    """Insert the operator that waits for the new parameters of buckets; returns the chain's next token."""
    return emit_link(f"fill_{exchange.number}", lambda *_: exchange.fill(indices), chain, parameters, in_place=True)[0]


def emit_over_owners(exchange: GradientExchange, values: Any, chain: Any) -> tuple[Any, Any]:
    """Insert the operator that sums ``values`` over the owners; returns the sums and the next token."""
    shape = (values.shape, values.dtype)
    link, total = emit_link("owners", lambda tensor: [exchange.over_owners(tensor)], chain, [values], [shape])
    return total, link


def emit_loss(loss: Any) -> None:
    """Insert the operator that notes, for a trace, that the forward pass has computed ``loss``."""
    emit_link("loss", lambda _: recorder.end(recorder.begin("backward")), token(), [loss])


def emit_begin(exchange: GradientExchange, parameters: Sequence[Any], chain: Any) -> Any:
    """Insert the operator that reads the parameters at the start of a step; returns the chain's next token."""
    return emit_link("begin", lambda *tensors: exchange.begin(tensors), chain, parameters, in_place=True)[0]


def emit_finish(exchange: GradientExchange, values: HeldValues, names: Sequence[str], loss: Any, chain: Any) -> Any:
    """Insert the operator that ends a step, after the update. It changes parameters in place, so it comes last."""

    def finish(*tensors: Any) -> None:
        exchange.finish(values.with_tensors(tensors), names, None if loss is None else tensors[-1])

    inputs = [*values.all, *([] if loss is None else [_in_paddles_layout(loss)])]
    return emit_link("finish", finish, chain, inputs, in_place=True)[0]


def emit_barrier(job: Job, moment: str, chain: Any, *, in_steps: bool = False) -> Any:
    """Insert a barrier of all ranks, with the job's timeout; ``in_steps``: with that of steps, which the profile gives.
    It follows what is under way: an averaging that overlaps has a barrier of its own, and two at a time would be met in
    another order on each rank."""

    def wait() -> None:
        name, seconds = f"{moment} {job.count(moment)}", job.step_timeout_seconds if in_steps else job.timeout_seconds
        barrier = job.engine.run_in_background(lambda: job.step_barrier(name, seconds))
        job.engine.start(_nothing(), CallContext(name, name, seconds), barrier=barrier).result()

    return emit_link("barrier", wait, chain)[0]


def _nothing() -> Stages[None]:
    yield HAND_OVER


def is_barrier(operator: Any) -> bool:
    """Whether an operator of a program was inserted by ``emit_barrier``."""
    return "fleet_train_barrier_" in operator.name()


def emit_broadcast(job: Job, name: str, value: Any, chain: Any) -> tuple[Any, Any]:
    """Insert an operator that replaces ``value`` by rank 0's; returns the new value and the next token."""

    def replace(tensor: Any) -> list[Any]:
        job.refuse_other_place(tensor)
        return [broadcast(job, tensor, f"start value of '{name}'")]

    link, result = emit_link("broadcast", replace, chain, [value], [(value.shape, value.dtype)])
    return result, link


def broadcast(job: Job, tensor: Any, what: str) -> Any:
    """Rank 0's values in a tensor of the same shape and dtype (eager). Sent as bytes, so any dtype works."""
    flat = tensor.reshape([-1]).clone()
    if flat.shape[0] == 0:
        return tensor
    context = CallContext("start state", what, job.timeout_seconds, "start state")
    return job.engine.start(_broadcast(job, flat), context).result().reshape(tensor.shape)


def _broadcast(job: Job, flat: Any) -> Stages[Any]:
    wire = flat.cast("uint8") if flat.dtype == paddle.bool else paddle.view(flat, "uint8")
    yield Stage((Collective("broadcast", job.communicators(1)[0], wire, 0),))
    return wire.cast("bool") if flat.dtype == paddle.bool else paddle.view(wire, flat.dtype)


def emit_hold(values: Sequence[Any], trigger: Any) -> list[Any]:
    """Insert an operator that passes ``values`` on once ``trigger`` has been computed. It sends nothing.

    It copies them: an operator that Paddle runs in place on the output would overwrite the input.
    """

    def run(*tensors: Any) -> Any:
        copies = tuple(tensor.clone() for tensor in tensors[:-1])
        return copies if len(copies) > 1 else copies[0]

    outputs = [(value.shape, value.dtype) for value in values]
    results = _host_operator("hold", len(values) + 1, outputs, run)(*values, trigger)
    return list(results) if len(values) > 1 else [results]
