"""Optimizers that Paddle wraps around others: what is mapped to the profile, and what is refused with a hint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
import pytest
from paddle.incubate.optimizer import (
    GradientMergeOptimizer,
    LarsMomentumOptimizer,
    PipelineOptimizer,
    RecomputeOptimizer,
)

from fleet_train.convert.optimizer import DistributedOptimizer
from fleet_train.convert.paddle_optimizers import owner_of, unwrap
from fleet_train.convert.planning import resolve
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.profile import Profile, applied_mappings


@pytest.fixture(autouse=True)
def static_mode() -> Any:
    paddle.enable_static()
    yield
    paddle.disable_static()


def sgd() -> Any:
    return paddle.optimizer.SGD(0.1)


def with_checkpoints(*names: str, offload: bool = False) -> Any:
    wrapper = RecomputeOptimizer(sgd())
    if names:
        wrapper._set_checkpoints([*names])
    if offload:
        wrapper._enable_offload()
    return wrapper


decorate = paddle.static.amp.decorate
SCALE = {
    "init_loss_scaling": 128.0,
    "incr_every_n_steps": 7,
    "decr_every_n_nan_or_inf": 3,
    "incr_ratio": 4.0,
    "decr_ratio": 0.25,
}


@pytest.mark.parametrize(
    ("make", "asked"),
    [
        (sgd, {}),
        (lambda: LarsMomentumOptimizer(0.1, 0.9), {}),  # an optimizer, and no wrapper
        (lambda: decorate(sgd(), level="O0"), {"amp_level": "O0"}),
        (lambda: decorate(sgd(), level="O2", dtype="bfloat16"), {"amp_level": "O2", "amp_dtype": "bfloat16"}),
        (
            lambda: decorate(sgd(), level="O1", dtype="float16", use_dynamic_loss_scaling=True, **SCALE),
            {"amp_level": "O1", "amp_dtype": "float16", "amp_dynamic_loss_scaling": True}
            | {f"amp_{name}": value for name, value in SCALE.items()},
        ),
        (  # the older form is float16 with Fleet's numbers
            lambda: decorate(sgd(), use_pure_fp16=True, use_dynamic_loss_scaling=False),
            {
                "amp_level": "O2",
                "amp_dtype": "float16",
                "amp_init_loss_scaling": 2.0**15,
                "amp_dynamic_loss_scaling": False,
            },
        ),
        (lambda: with_checkpoints("linear_1.w_0"), {"recompute_checkpoints": ["linear_1.w_0"]}),
    ],
)
def test_what_a_wrapper_asks_for_becomes_knobs(make: Any, asked: dict[str, Any]) -> None:
    unwrapped = unwrap(make())
    assert {knob: value for knob, (value, _) in unwrapped.settings.items()} == asked
    profile = unwrapped.added_to(Profile())
    assert {knob: getattr(profile, knob) for knob in asked} == asked
    assert asked or (unwrapped.sentences == [] and profile == Profile())


def test_wrappers_are_taken_off_from_the_outermost_inwards() -> None:
    inner = sgd()
    outer = GradientMergeOptimizer(decorate(inner, level="O1", dtype="bfloat16"), k_steps=4)
    unwrapped = unwrap(outer)
    assert unwrapped.optimizer is inner
    profile = unwrapped.added_to(Profile())
    assert (profile.accumulate_steps, profile.amp_level) == (4, "O1")
    assert len(applied_mappings(profile)) == 2


def with_lists() -> Any:
    lists = paddle.static.amp.AutoMixedPrecisionLists(custom_black_list={"matmul"})
    return decorate(sgd(), amp_lists=lists, level="O1", dtype="bfloat16")


def dgc_momentum() -> Any:
    kind = type("DGCMomentumOptimizer", (SimpleNamespace,), {"__module__": "paddle.distributed.fleet.meta_optimizers"})
    return kind()


def unknown_wrapper() -> Any:
    return type("NewOptimizer", (SimpleNamespace,), {"__module__": "paddle.incubate.new"})(inner_opt=sgd())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_checkpoints, "set recompute_segments or recompute_every_blocks in the profile"),
        (lambda: with_checkpoints(offload=True), "offload is not supported"),
        (with_lists, "amp_lists with custom_black_list: .* follows from amp_level; leave amp_lists out"),
        (lambda: GradientMergeOptimizer(sgd(), 2, avg=False), "avg=False asks for the sum .* scale the learning rate"),
        (lambda: decorate(sgd(), level="O1", dtype="bfloat16", use_promote=True), "use_promote=True: .* leave it out"),
        (
            lambda: GradientMergeOptimizer(GradientMergeOptimizer(sgd(), 2), 3),
            "asks for accumulate_steps: 2, but GradientMergeOptimizer asks for 3; keep one of the two",
        ),
        (lambda: PipelineOptimizer(sgd(), num_microbatches=2), "set accumulate_steps in the profile"),
        (dgc_momentum, "wrap paddle.optimizer.Momentum, and set compression: int4 in the profile"),
        (lambda: paddle.incubate.ModelAverage(0.15), "it only averages what another optimizer updates"),
        (unknown_wrapper, r"NewOptimizer, which wraps another optimizer \(inner_opt\)"),
        (lambda: paddle.incubate.LookAhead(paddle.incubate.LookAhead(sgd())), "LookAhead around LookAhead"),
    ],
)
def test_what_a_profile_cannot_do_is_refused_with_what_to_use(make: Any, message: str) -> None:
    with (
        paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()),
        pytest.raises((ConversionError, ProfileError), match=message),
    ):
        unwrap(make())


def test_a_profile_that_says_otherwise_is_refused_with_both_sides() -> None:
    unwrapped = unwrap(GradientMergeOptimizer(sgd(), 4))
    with pytest.raises(
        ProfileError,
        match=r"^GradientMergeOptimizer: asks for accumulate_steps: 4, but the profile sets accumulate_steps: 2 \(",
    ):
        unwrapped.added_to(Profile(accumulate_steps=2))
    assert unwrapped.added_to(Profile(accumulate_steps=4)).accumulate_steps == 4


@pytest.mark.parametrize("asked", [{"use_local_sgd": True}, {"accumulate_steps": 2}])
def test_look_ahead_is_refused_beside_steps_without_an_update(asked: dict[str, Any]) -> None:
    with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
        unwrapped = unwrap(paddle.incubate.LookAhead(sgd()))
    with pytest.raises(ProfileError, match=r"^paddle.incubate.LookAhead: .* choose another profile"):
        unwrapped.added_to(Profile(**asked))


class Outer:
    """A user's own wrapper."""

    own = 1

    def __init__(self, inner: Any) -> None:
        self._inner_opt = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner_opt, name)


def test_an_attribute_belongs_to_the_optimizer_that_has_it() -> None:
    inner = paddle.optimizer.SGD(0.1)
    outer = Outer(Outer(inner))
    assert owner_of(outer, "_grad_clip") is inner
    assert owner_of(outer, "own") is outer
    assert owner_of(outer, "_inner_opt") is outer
    assert owner_of(outer, "no_such_name") is outer


def test_the_wrappers_own_names_are_none_of_paddles() -> None:
    """A name that both have would be set on the wrapper alone."""
    ours = {name for name in DistributedOptimizer.__init__.__code__.co_names if name.startswith("_")}
    assert {"_inner", "_passes", "_job"} <= ours
    for make in (paddle.optimizer.SGD, paddle.optimizer.Momentum, paddle.optimizer.AdamW, paddle.optimizer.Lamb):
        assert not ours & set(vars(make(0.1, parameters=[paddle.create_parameter([1], "float32")])))


def test_a_profile_of_a_flag_wins_over_a_wrapper() -> None:
    unwrapped = unwrap(decorate(sgd(), level="O1", dtype="float16"))
    used = unwrapped.under(Profile(name="flag", amp_dtype="bfloat16", amp_level="O2"))
    assert (used.name, used.amp_level, used.amp_dtype) == ("flag", "O2", "bfloat16")
    assert "amp_init_loss_scaling" not in used.explicit
    assert unwrapped.under(Profile(fetch_frequency=2)).amp_dtype == "float16"


def test_what_flags_overrule_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_TRAIN_SET", '["amp_level=O0", "environment.TOKEN=secret"]')
    unwrapped = unwrap(decorate(sgd(), level="O1", dtype="bfloat16"))
    profile, notices = resolve(Profile(environment={"TOKEN": "another"}), None, None, unwrapped, 1)
    assert (profile.amp_level, profile.environment) == ("O0", {"TOKEN": "secret"})
    (sentence,) = notices
    assert sentence.startswith("--set wins over the script: amp_level is 'O0', not 'O1'; environment is ")
    assert "secret" not in sentence


def test_a_launchers_strategy_wins_over_spawns_and_over_that_of_init(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = unwrap(sgd())
    first, second = Profile(name="first", fetch_frequency=3), Profile(name="second")
    offered = Profile(name="offered")
    assert resolve(first, second, offered, plain, 1)[1] == [
        "the strategy of fleet.distributed_optimizer is used, that of fleet.init is not",
        "the function gives its own strategy; that of spawn is not used (offered)",
    ]
    assert [resolve(None, None, None, plain, nodes)[0].name for nodes in (1, 2)] == ["single_node", "multi_node"]
    assert resolve(None, None, offered, plain, 1)[0].name == "offered"
    monkeypatch.setenv("FLEET_TRAIN_STRATEGY", "unfused")
    used, notices = resolve(None, first, offered, plain, 1)
    assert used.name == "unfused"
    assert notices[-1] == "--strategy unfused wins over the script: fetch_frequency is 1, not 3"
