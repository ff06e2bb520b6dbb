"""No setting is lost: every knob is changed mechanically (of a stock strategy: test_stock_strategy.py).

That a knob then does what it says is for tests/parallel/test_knob_effects.py; this here looks at many values of each:
the other choices, the neighbours of the default, the lowest. A flip counts when it shows in `evidence`; when the code
that runs beside training reads the knob itself and the plan's notes say so; when it is said on rank 0; or when it is
refused with a reason. That a setting is kept somewhere is no effect.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train.cluster import Cluster
from fleet_train.collectives.finite import FiniteCheck
from fleet_train.collectives.paddle_compat import dynamic_mode
from fleet_train.convert.passes import pipeline, precision
from fleet_train.convert.passes.precision import lower_precision, refuse_unusable
from fleet_train.convert.planning import fitted_to
from fleet_train.errors import ConversionError, NotFinite, ProfileError
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.plan import Note
from fleet_train.plan.price import PAPER, Compute, predict
from fleet_train.plan.simulate import Local, Momentum, SimulatedJob
from fleet_train.profile import KNOBS, Knob, Profile, applied_mappings
from fleet_train.profile.methods.outer import outer_optimizer_of
from fleet_train.profile.schema import DESCRIPTIVE, FLAG_KNOBS
from tests.support.processes import ROOT

OWN = [name for name in KNOBS if name not in DESCRIPTIVE and name not in FLAG_KNOBS]
# 2.4 MB in all: past the bounds of the first and the last bucket, many and few gradients.
GRADIENTS = [TensorSpec(f"w{i}", (400, 300), "float32") for i in range(5)] + [
    TensorSpec(f"b{i}", (7,), "float32") for i in range(60)
]
# Embeddings: one whose rows pay on a link that nothing else is said about, and one whose rows do not.
GRADIENTS += [
    TensorSpec("large", (100_000, 8), "float32", rows=500),
    TensorSpec("small", (300, 4), "float32", rows=300),
]
RUNNING = ("collectives", "convert", "train")
CLUSTER = Cluster.imagined(2, 4)


def other_values(knob: Knob) -> list[Any]:
    """Values that the schema allows, without the default."""
    if knob.choices:
        values: list[Any] = list(knob.choices)
    elif knob.kind is bool:
        values = [True, False]
    elif knob.kind is list:
        values = [["w0"]] if knob.entries is str else [[0.5, 0.25], *knob.words]
    elif knob.kind is dict:
        values = [{"NCCL_DEBUG": "INFO"}]
    else:
        lowest = knob.minimum if knob.minimum is not None else (knob.above or 0) + 0.25
        step = 1 if knob.kind is int else 0.25
        start = lowest if knob.auto else knob.default
        values = [knob.kind(value) for value in (lowest, start + step, lowest + step, 2 * lowest, 2, 4)]
        values = [value for value in values if lowest <= value <= (knob.maximum or value)]
    return [value for index, value in enumerate(values) if value != knob.default and value not in values[:index]]


def what_it_stands_beside(knob: Knob) -> dict[str, Any]:
    """Settings without which a knob has no effect: the schema says so, or a rule on a number."""
    settings: dict[str, Any] = {"local_sgd_fragments": 2} if knob.name == "local_sgd_fragment_pattern" else {}
    if knob.needs:
        settings |= what_it_stands_beside(KNOBS[knob.needs]) | {knob.needs: True}
    if knob.only_with:
        chosen = knob.only_with.values[0]
        settings |= what_it_stands_beside(KNOBS[knob.only_with.knob]) | {knob.only_with.knob: chosen}
    return settings


@cache
def read_in(layers: tuple[str, ...]) -> frozenset[str]:
    """Every ``something.name`` that the code of these packages reads, by name."""
    trees = [ast.parse(path.read_text()) for layer in layers for path in (ROOT / "fleet_train" / layer).rglob("*.py")]
    return frozenset(node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))


@cache
def rewritten(profile: Profile) -> tuple[str, str]:
    """What the passes make of a small program: its forward pass in lower precision, for a device that has every kernel,
    and, in float32, all that the other passes and loss scaling add. Not run: what they do is for
    tests/parallel/test_knob_effects.py.
    """
    job = mock.MagicMock(place="a GPU", world_size=2, cluster=CLUSTER)
    job.engine.side_by_side = False
    with on_small_program() as loss, mock.patch.object(precision, "has_kernels", return_value=True):
        lower_precision(loss, profile, on_gpu=True)
        lowered = in_words(loss)
    with on_small_program() as loss, mock.patch.object(pipeline, "lower_precision"):
        passes, optimizer = pipeline.ProgramPasses(profile, job), paddle.optimizer.SGD(0.1)
        merged = passes.merge(passes.backward(loss, paddle.static.append_backward))
        passes.update(merged, merged.pairs, optimizer.apply_gradients)
        return lowered, in_words(loss)


# Equal profiles have the same program, which is made once.
READ_BY_NO_PASS = {name: getattr(Profile(), name) for name in OWN if name not in read_in(("convert/passes",))}


@pytest.fixture(autouse=True)
def static_mode() -> Iterator[None]:
    paddle.enable_static()
    yield
    paddle.disable_static()


@contextmanager
def on_small_program() -> Iterator[Any]:
    """Three blocks, of which the second has the parameter that `other_values` names."""
    programs = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(*programs), paddle.utils.unique_name.guard():
        value = paddle.static.data("x", [None, 6], "float32")
        for number in range(3):
            weight = paddle.ParamAttr(name=f"w{(number + 2) % 3}")
            value = nn.functional.relu(nn.BatchNorm1D(6)(nn.Linear(6, 6, weight_attr=weight)(value)))
        yield value.mean()


def in_words(loss: Any) -> str:
    """Operators, types and attributes, without the names of Python's objects."""
    text = f"{loss.get_defining_op().get_parent_block().program}{paddle.static.default_startup_program()}"
    return re.sub(r'struct_name:"[^"]*"|_\d+_-?\d{6,}|0x\w+', "", text)


def evidence(profile: Profile) -> dict[str, Any]:
    """What the rest of the package does for a profile; nothing that is merely kept is in it."""
    plan = build_plan(GRADIENTS, CLUSTER, profile)
    computing = Compute(0.5, 1.0)
    refuse_unusable(profile, on_gpu=True)
    return {
        "buckets": [([one.name for one in bucket.gradients], bucket.communicator) for bucket in plan.buckets],
        "collectives": [plan.phases(warm_up) for warm_up in (True, False)],
        "prediction": [predict(plan, CLUSTER, PAPER, computing, warm_up=warm_up) for warm_up in (True, False)],
        "trained": trained(profile),
        "outer step": outer_steps(profile),
        "program": rewritten(profile.model_copy(update=READ_BY_NO_PASS)),
        "environment": profile.worker_environment(),
        "on NaN": on_nan(profile),
        "on each engine": [on_engine(profile, side_by_side) for side_by_side in (True, False)],
    }


def on_nan(profile: Profile) -> str:
    """What a rank says of a gradient that is NaN."""
    job: Any = SimpleNamespace(engine=SimpleNamespace(reads_values=True), cluster=CLUSTER)
    check = FiniteCheck(job, profile.nonfinite, lambda: "step 1")
    with dynamic_mode():
        try:
            check.see(["w"], [paddle.full([2], np.nan)])
        except NotFinite as error:
            return str(error)
        return check.found


def on_engine(profile: Profile, side_by_side: bool) -> Any:
    """What only an engine tells apart, and what is said there."""
    engine: Any = SimpleNamespace(side_by_side=side_by_side)
    fitted, notices = fitted_to(engine, profile)
    return fitted.collective_stream, fitted.use_hierarchical_allreduce, notices


def trained(profile: Profile) -> list[Any]:
    """The bytes of each step of a simulated job whose ranks bring different gradients, and the values at its end."""
    shape, steps = ((200, 100), 8) if profile.compression != "none" else ((6, 4), 150)
    if profile.use_local_sgd:
        steps = profile.local_sgd_is_warm_steps + 150
    gradients = [TensorSpec("w", shape, "float32"), TensorSpec("v", (6, 8), "float32")]
    start = {gradient.name: np.ones(gradient.shape, "float32") for gradient in gradients}
    cluster = Cluster.imagined(2, 2)
    plan = build_plan(gradients, cluster, profile, state_values_per_parameter=1)
    job = SimulatedJob(plan, profile, start, Momentum)
    brought = [[np.random.default_rng(rank).normal(size=one.shape) for one in gradients] for rank in range(4)]
    seen: list[Any] = []
    for step in range(steps):
        job.rate = 0.1 / (1 + step) ** 2

        def backward(rank: int, _: Any, step: int = step) -> Local:
            arrays = zip(("w", "v"), brought[rank], strict=True)
            return Local({name: (array * (1 + step % 3)).astype("float32") for name, array in arrays}, 1.0 + step)

        seen.append(job.step(backward).sent)
    return [*seen, *(values[name].tobytes() for values in job.ranks for name in ("w", "v"))]


def outer_steps(profile: Profile) -> list[list[float]]:
    """Two steps of a constant difference, whose effect on the values is what an averaging of real ranks brings."""
    outer, anchor, velocity, found = outer_optimizer_of(profile.outer_optimizer), np.ones(2), None, []
    for _ in range(2):
        settings = profile.outer_lr, profile.outer_momentum
        change, velocity = outer.step(np.full(2, 0.5), velocity, 0.25, *settings)
        anchor = anchor - change
        found.append(anchor.tolist())
    return found


def notes(profile: Profile) -> tuple[Note, ...]:
    return build_plan(GRADIENTS, CLUSTER, profile).notes


def fate_of_flip(name: str, value: Any) -> str:
    """``changes``, ``said`` or ``refused``; fails the test for a flip that does nothing."""
    beside = what_it_stands_beside(KNOBS[name])
    before = Profile(**beside)
    refusal = ""
    try:
        after = Profile(**beside | {name: value})
        changes = evidence(after) != evidence(before) or (name in read_in(RUNNING) and notes(after) != notes(before))
    except ProfileError as refused:
        refusal = str(refused)
    if refusal:
        assert len(refusal) > len(name) + 30, f"{name}: {value!r} is refused without a reason: {refusal}"
        return "refused"
    assert after.digest() != before.digest(), f"{name}: {value!r} does not reach the digest that the ranks compare"
    if changes:
        return "changes"
    said = set(applied_mappings(after)) - set(applied_mappings(before))
    return "said" if any(name in sentence for sentence in said) else "nothing"


@pytest.mark.parametrize("name", OWN)
def test_a_flipped_knob_is_never_ignored(name: str) -> None:
    values = other_values(KNOBS[name])
    assert values, f"the schema gives no other value for {name}"
    fates = {repr(value): fate_of_flip(name, value) for value in values}
    assert set(fates.values()) & {"changes", "said"}, f"no value of {name} has an effect: {fates}"
    if KNOBS[name].kind is bool or KNOBS[name].choices:
        assert "nothing" not in fates.values(), f"{name}: a value without effect: {fates}"


@pytest.mark.parametrize("name", [name for name in OWN if KNOBS[name].choices])
def test_a_choice_that_only_the_schema_knows_does_not_pass_for_another(name: str) -> None:
    profile = Profile(**what_it_stands_beside(KNOBS[name])).model_copy(update={name: "new"})
    with pytest.raises(ConversionError, match=r"new.*; use "):
        evidence(profile)


@pytest.mark.parametrize("name", [name for name in OWN if KNOBS[name].choices])
def test_no_two_choices_do_the_same(name: str) -> None:
    # Without momentum the outer steps are the plain one.
    pushed = {"outer_momentum": 0.5} if name == "outer_optimizer" else {}
    profiles = {
        choice: Profile(**what_it_stands_beside(KNOBS[name]) | {name: choice} | (pushed if choice != "none" else {}))
        for choice in KNOBS[name].choices
    }
    seen = {choice: evidence(profile) for choice, profile in profiles.items()}
    same = [(one, other) for one, other in combinations(seen, 2) if seen[one] == seen[other]]
    assert same == []


@pytest.mark.parametrize("name", FLAG_KNOBS)
def test_an_old_flag_is_its_knob(name: str) -> None:
    knob = KNOBS[FLAG_KNOBS[name].becomes]
    value = other_values(knob)[0]
    text = str(int(value)) if isinstance(value, bool) else str(value)
    assert Profile(environment={name: text}) == Profile(**{knob.name: value}, environment={})
    assert Profile().overridden_by({name: text})[0] == Profile(**{knob.name: value})


def test_what_others_allow_is_refused_and_what_is_carried_out_is_read_by_the_code_that_does_it() -> None:
    for name in OWN:
        for value, _ in KNOBS[name].refused:
            with pytest.raises(ProfileError, match="; use "):
                Profile(**{name: value})
        if KNOBS[name].fate == "carried out":
            assert name in read_in((*RUNNING, "compression", "plan", "profile/methods")) or name == "environment"
