"""The programs, as users write them, one module per subject; the strategies with which two ranks train them.

To add a program, add one function with ``@program`` or ``@network``. Imports neither Paddle nor fleet_train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tests.programs.script import Script

SUBJECTS = ("sharing", "optimizers", "settings", "layers", "loops", "values")
BATCH = 8
STEPS = 4

LATE = 1000
AMP = {"amp_level": "O2"}
NEXT = {"overlap_next_step": True, "fuse_parameter_groups_size": 2}
SPLIT = {"nccl_comm_num": 3, "fuse_parameter_groups_size": 2}
LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0}


@dataclass(frozen=True)
class Strategy:
    """A profile of the catalogue by name, or settings; and to which programs it is exact."""

    profile: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    linear: bool = False
    """Exact only where the mean of updates is the update of the mean: SGD and Momentum without a clip."""
    own_state: bool = False
    """The optimizer's state is another one, on purpose."""
    for_one_optimizer: bool = False
    """Refused for a program with two optimizers."""
    asked_for: bool = False
    """Run only with programs that name it."""
    rounded: bool = False
    """Computes in bfloat16: what is fetched is compared, to 2e-2, and the ranks with each other."""


def _settings(**settings: Any) -> Strategy:
    return Strategy(settings=settings)


def _for_one(settings: Mapping[str, Any], **options: bool) -> Strategy:
    return Strategy(settings=settings, for_one_optimizer=True, **options)


EXACT: dict[str, Strategy] = {
    "multi_node": Strategy("multi_node"),
    "single_node": Strategy("single_node"),
    "unfused": _settings(fuse_all_reduce_ops=False),
    "three communicators": _settings(sparse_embeddings=True, **SPLIT),
    "waiting": _settings(sync_nccl_allreduce=True, fuse_parameter_groups_size=3),
    "hierarchical": _settings(use_hierarchical_allreduce=True, nccl_comm_num=2),
    "merge": _for_one(
        {"accumulate_steps": 2, "nccl_comm_num": 2, "fuse_parameter_groups_size": 3, "sparse_embeddings": True}
    ),
    "recompute": _for_one({"recompute_segments": 3}),
    "checked every step": _settings(divergence_check_steps=1),
    "executor's threads": _settings(num_threads=4, **SPLIT),
    "next step": _settings(**NEXT),
    "next step, merge": _for_one({**NEXT, "accumulate_steps": 2}),
    "next step, amp": _for_one({**NEXT, **AMP}, rounded=True),
    "next step, threads": _settings(**NEXT, num_threads=4, nccl_comm_num=2),
    "next step, sharding": _for_one({**NEXT, "sharding": True}, own_state=True),
    "local_sgd, warm-up": _for_one({"use_local_sgd": True, "local_sgd_is_warm_steps": LATE}),
    "local_sgd, every step": _for_one({**LOCAL, "local_sgd_steps": 1}, linear=True, own_state=True),
    "powersgd, late": _for_one({"compression": "powersgd", "powersgd_start_step": LATE}),
    "sync batch norm": _for_one({"sync_batch_norm": True}, asked_for=True),
    "sync batch norm, recompute": _for_one({"sync_batch_norm": True, "recompute_segments": 2}, asked_for=True),
    "sync batch norm, amp": _for_one({"sync_batch_norm": True, **AMP}, asked_for=True, rounded=True),
    "merge, recompute": _for_one({"accumulate_steps": 2, "recompute_segments": 4}),
    "amp, recompute": _for_one({"recompute_segments": 4, **AMP}, rounded=True),
    "amp, merge": _for_one({"accumulate_steps": 2, **AMP}, rounded=True),
}
# Every program meets these; the others are dealt out, so that each meets many programs.
ALWAYS = ("multi_node", "three communicators", "merge", "recompute", "local_sgd, every step", "next step")

_DILOCO = {**LOCAL, "outer_optimizer": "diloco", "outer_lr": 0.7}
LOSSY: dict[str, Strategy] = {
    "bf16": _settings(compression="bf16"),
    "int8": _settings(compression="int8"),
    "diloco, int8": _settings(**_DILOCO, local_sgd_steps=2, local_sgd_dtype="int8", outer_momentum=0.5),
    "powersgd": _settings(compression="powersgd", powersgd_rank=2, powersgd_min_compression=0),
    "local_sgd": _settings(use_local_sgd=True, local_sgd_is_warm_steps=1, local_sgd_steps=2, **SPLIT),
    "local_sgd, overlap": _settings(**LOCAL, local_sgd_steps=2, local_sgd_overlap_steps=1),
    "diloco": _settings(**_DILOCO, local_sgd_steps=3, outer_momentum=0.9),
    "merge, local_sgd": _settings(**LOCAL, accumulate_steps=2, local_sgd_steps=3),
}


@dataclass(frozen=True)
class Input:
    """One input: its shape behind the batch, its dtype, and how its numbers are drawn."""

    shape: tuple[int, ...]
    dtype: str
    draw: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def floats(*shape: int, dtype: str = "float32") -> Input:
    return Input(shape, dtype, lambda random, full: random.standard_normal(full))


def tokens(vocabulary: int, length: int) -> Input:
    return Input((length,), "int64", lambda random, full: random.integers(0, vocabulary, full))


def classes(number: int) -> Input:
    return tokens(number, 1)


@dataclass(frozen=True)
class Program:
    """``run(script)`` builds a network, wraps an optimizer and trains: a user's script from top to bottom."""

    name: str
    subject: str
    sentence: str
    run: Callable[[Script], None]
    without: Mapping[str, str] = field(default_factory=dict)
    """Strategy -> why this program is not run with it."""
    only: tuple[str, ...] = ()
    """The strategies that it is run with; empty = all exact ones."""
    reason: str = ""
    """Why ``only`` or ``tolerance`` is given."""
    several_optimizers: bool = False
    """One program has two optimizers, which strategies that keep state per program refuse."""
    simulated: bool = False
    """Whether the lossy strategies are compared with the simulation."""
    random: bool = False
    """Draws random numbers in each step, other ones on each rank: compared with the simulation alone."""
    tolerance: float = 1e-5
    sums: bool = False
    """Parameters are used by name in several places, by an optimizer that remembers. Paddle alone then makes an update
    per use; it is given the sum of their gradients by hand."""
    said: str = ""
    """Part of what may be said of its loss."""
    noise: str = ""
    """Names (a regular expression) of parameters whose gradient is zero but for rounding, such as the bias of keys,
    which a softmax takes out again: they are compared absolutely."""

    def refusal(self, name: str) -> str:
        """Part of the error with which this exact strategy refuses it; empty where it is to be trained."""
        if self.several_optimizers and EXACT[name].for_one_optimizer:
            return "this is the second optimizer in one program"
        return ""


_REGISTERED: dict[str, Program] = {}


def programs() -> dict[str, Program]:
    """Every program by its name, in the order of ``SUBJECTS``. Imports Paddle."""
    for subject in SUBJECTS:
        import_module(f"tests.programs.catalogue.{subject}")
    return dict(_REGISTERED)


def program(sentence: str, name: str = "", **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as a program; ``sentence`` says what is special about it."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        own, subject = name or run.__name__, run.__module__.rpartition(".")[2]
        assert own not in _REGISTERED, f"two programs are called {own}"
        _REGISTERED[own] = Program(own, subject, sentence, run, **options)
        return run

    return register


def network(sentence: str, steps: int = STEPS, **given: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function from its inputs (``x`` and the class ``y`` if none are given) to a loss and the optimizer
    that minimizes it, which is all that this program has beside its training."""
    inputs = {name: one for name, one in given.items() if isinstance(one, Input)}
    options = {name: one for name, one in given.items() if name not in inputs}

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(build)
        def run(script: Script) -> None:
            loss, optimizer = build(*script.inputs(**(inputs or {"x": floats(8), "y": classes(5)})))
            script.minimize(optimizer, loss)
            schedule = optimizer._learning_rate
            script.train(loss, steps, schedule if hasattr(schedule, "step") else None)

        return program(sentence, **options)(run)

    return register
