"""Which strategies can be combined, and Paddle 1.8's flags, which are knobs wherever they are written."""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from paddle.distributed import fleet as stock_fleet

from fleet_train.convert.strategy import DistributedStrategy
from fleet_train.errors import ProfileError
from fleet_train.profile import KNOBS, Profile, applied_mappings, check_flags, compatibility, load_profile, methods
from fleet_train.profile.compatibility import PAIRS, STRATEGIES, clashes, entries, verdict
from fleet_train.profile.knobs import Problem
from fleet_train.profile.methods.base import Combination, Family, goes
from fleet_train.profile.profile import BY_CALLER

# What switches each strategy on, with what it needs beside it, and what switches it off.
ON: dict[str, dict[str, Any]] = {
    "fused": {"fuse_all_reduce_ops": True},
    "communicators": {"nccl_comm_num": 2},
    "hierarchical": {"use_hierarchical_allreduce": True},
    "waiting": {"sync_nccl_allreduce": True},
    "local_sgd": {"use_local_sgd": True},
    "outer": {"use_local_sgd": True, "outer_optimizer": "slowmo"},
    "bf16": {"compression": "bf16"},
    "quantised": {"compression": "int8"},
    "powersgd": {"compression": "powersgd"},
    "merge": {"accumulate_steps": 2},
    "amp": {"amp_level": "O1"},
    "sync_bn": {"sync_batch_norm": True},
    "recompute": {"recompute_segments": 3},
    "sharding": {"sharding": True},
    "rows": {"sparse_embeddings": True},
    "next_step": {"overlap_next_step": True},
}


ONE_KNOB = set(combinations(("bf16", "quantised", "powersgd"), 2))
REFUSED = {
    *((local, other) for local in ("local_sgd", "outer") for other in ("powersgd", "sync_bn")),
    *ONE_KNOB,
    *((other, "sharding") for other in ("hierarchical", "local_sgd", "outer", "powersgd")),
    *((other, "rows") for other in ("quantised", "powersgd")),
    *((other, "next_step") for other in ("waiting", "local_sgd", "outer")),
}
ALL = set(combinations([one.name for one in STRATEGIES], 2))


@pytest.mark.parametrize("pair", sorted(ALL - ONE_KNOB), ids=" and ".join)
def test_a_profile_with_both_is_taken_or_refused_as_the_table_says(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {"fuse_all_reduce_ops": False} | ON[pair[0]]
    settings = first | ON[pair[1]]
    if pair not in REFUSED:
        assert Profile(**settings).settings() == settings
    else:
        with pytest.raises(ProfileError, match="does not go with"):
            Profile(**settings)
    monkeypatch.setitem(PAIRS, pair, Combination(False, "a reason; leave one of them out"))
    with pytest.raises(ProfileError, match=r": a reason; leave one of them out$"):
        Profile(**settings)
    Profile(**first)


def test_a_clash_names_the_knob_that_was_set() -> None:
    pairs = PAIRS | {("fused", "waiting"): Combination(False, "a reason; leave one of them out")}
    assert clashes({"sync_nccl_allreduce": True}, pairs=pairs) == [
        Problem(
            "sync_nccl_allreduce",
            "does not go with fused buckets (fuse_all_reduce_ops: true): a reason; leave one of them out",
        )
    ]
    assert clashes({"sync_nccl_allreduce": True, "fuse_all_reduce_ops": False}, pairs=pairs) == []
    assert clashes({"nccl_comm_num": 2}, pairs=pairs) == []
    refused = PAIRS | {("fused", "bf16"): Combination(False, "a reason")}
    for half in ("fp16", "bf16"):
        assert [one.key for one in clashes({"compression": half}, pairs=refused)] == ["compression"]


def test_two_strategies_that_are_on_by_themselves_clash_with_neither_knob_set() -> None:
    strategies = (STRATEGIES[0], STRATEGIES[0].__class__("timeout", "collective_timeout_seconds", "waiting at most"))
    pairs = {("fused", "timeout"): Combination(False, "a reason")}
    assert clashes({}, strategies, pairs)[0].key == "fuse_all_reduce_ops"


def test_what_is_switched_off_is_no_strategy() -> None:
    refuse_all = {pair: Combination(False, "a reason") for pair in PAIRS}
    off = {"nccl_comm_num": 1, "use_local_sgd": True, "outer_optimizer": "none", "fuse_all_reduce_ops": False}
    off |= {"compression": "none", "accumulate_steps": 1, "amp_level": "O0", "sync_batch_norm": False}
    assert clashes(off, pairs=refuse_all) == []


def test_the_table_refuses_these_pairs_and_no_others_in_either_order() -> None:
    assert PAIRS.keys() == ALL
    assert ON.keys() == {one.name for one in STRATEGIES}
    assert {pair for pair, entry in PAIRS.items() if not entry.allowed} == REFUSED
    assert {one.knob for one in STRATEGIES} <= KNOBS.keys()
    assert len(list(entries())) == len(ALL) == 120
    assert verdict("local_sgd", "waiting") is verdict("waiting", "local_sgd") is PAIRS["waiting", "local_sgd"]
    with pytest.raises(KeyError):
        verdict("local_sgd", "nothing")


def test_the_table_is_whole_with_another_family_of_compressions(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Family("new", "a new one", goes("a"), goes("b"), goes("c"))
    monkeypatch.setattr(methods, "FAMILIES", (*methods.FAMILIES, family))
    spec = find_spec(compatibility.__name__)
    assert spec is not None
    assert spec.loader is not None
    anew = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, anew)  # dataclasses look for their module
    spec.loader.exec_module(anew)
    assert len(list(anew.entries())) == len(ALL) + len(STRATEGIES)
    assert not anew.verdict("new", "sharding").allowed


def test_the_fuse_flags_become_knobs_and_leave_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "environment:\n  FLAGS_fuse_parameter_memory_size: 8\n"
        "  FLAGS_fuse_parameter_groups_size: 20\n  NCCL_DEBUG: INFO\n"
    )
    profile = load_profile(str(path))
    assert (profile.fuse_grad_size_in_MB, profile.fuse_parameter_groups_size) == (8.0, 20)
    assert profile.environment == {"NCCL_DEBUG": "INFO"}
    assert profile.explicit == {"fuse_grad_size_in_MB", "fuse_parameter_groups_size", "environment"}
    assert profile.origin("fuse_grad_size_in_MB") == f"{path}:2, FLAGS_fuse_parameter_memory_size"
    assert applied_mappings(profile) == [
        f"fuse_grad_size_in_MB: 8 ({path}:2, FLAGS_fuse_parameter_memory_size): without it the best size for the link "
        "is chosen; leave it out, unless you have measured",
        f"fuse_parameter_groups_size: 20 ({path}:3, FLAGS_fuse_parameter_groups_size): it counts gradients today, 1.8 "
        "counted layers; the size of a bucket is a limit, too",
    ]


def test_a_flag_at_the_top_level_is_the_knob_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("FLAGS_fuse_parameter_memory_size: 8\nFLAGS_sync_nccl_allreduce: 0\n")
    with pytest.raises(ProfileError, match=r"a\.yaml:2: FLAGS_sync_nccl_allreduce: given 0 \(a number\)"):
        load_profile(str(path))
    path.write_text("FLAGS_fuse_parameter_memory_size: 8\nFLAGS_sync_nccl_allreduce: false\n")
    profile = load_profile(str(path))
    assert profile.fuse_grad_size_in_MB == 8.0
    assert profile.origin("fuse_grad_size_in_MB") == f"{path}:1, FLAGS_fuse_parameter_memory_size"


def test_a_flag_of_a_refused_knob_is_refused_from_the_process_environment_too(refused_knob: str) -> None:
    assert Profile().overridden_by({f"FLAGS_{refused_knob}": "0"})[0] == Profile()
    with pytest.raises(ProfileError) as caught:
        Profile().overridden_by({f"FLAGS_{refused_knob}": "1"})
    assert str(caught.value) == (
        "FLAGS_sync_nccl_allreduce: given true: not available yet; leave it off: a reason. "
        "(from the environment; unset it there)"
    )


def test_an_unknown_flag_is_refused_with_the_closest_known_one(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("environment:\n  NCCL_DEBUG: INFO\n  FLAGS_fraction_of_gpu_memory: 0.5\n  FLAGS_qqq: 1\n")
    with pytest.raises(ProfileError) as caught:
        check_flags(load_profile(str(path)), {"FLAGS_fraction_of_gpu_memory_to_use", "FLAGS_use_mkldnn"})
    assert str(caught.value).split("\n") == [
        f"{path}:3: environment.FLAGS_fraction_of_gpu_memory: the installed Paddle has no such flag; "
        "did you mean 'FLAGS_fraction_of_gpu_memory_to_use'?",
        f"{path}:4: environment.FLAGS_qqq: the installed Paddle has no such flag; remove it",
    ]


def test_num_threads_is_mapped_to_the_executors_serial_mode() -> None:
    executor = ("FLAGS_new_executor_serial_run", "FLAGS_new_executor_sequential_run")
    assert Profile().worker_environment() == dict.fromkeys(executor, "1")
    assert Profile(num_threads=3).worker_environment() == dict.fromkeys(executor, "0")
    own = {"FLAGS_new_executor_serial_run": "0", "NCCL_DEBUG": "INFO"}
    assert Profile(environment=own).worker_environment() == own | {"FLAGS_new_executor_sequential_run": "1"}


MEMORY = {"FLAGS_fuse_parameter_memory_size": "32"}


@pytest.mark.parametrize(
    ("settings", "environment", "sets", "notices"),
    [
        ({}, {"PATH": "/bin"}, {}, []),
        (
            {"fuse_grad_size_in_MB": 4},
            MEMORY,
            {},
            [
                "FLAGS_fuse_parameter_memory_size=32 is not used: the profile sets fuse_grad_size_in_MB: 4 "
                "(set by the caller)"
            ],
        ),
        (
            {"fuse_all_reduce_ops": False},
            MEMORY,
            {},
            ["FLAGS_fuse_parameter_memory_size=32 is not used: fuse_all_reduce_ops is off (set by the caller)"],
        ),
    ],
)
def test_a_flag_of_the_process_environment_is_used_where_the_profile_leaves_its_knob_open(
    settings: dict[str, Any], environment: dict[str, str], sets: dict[str, Any], notices: list[str]
) -> None:
    profile = Profile(**settings)
    assert profile.overridden_by(environment) == (Profile(**settings, **sets), notices)
    assert profile.overridden_by({"FLAGS_sync_nccl_allreduce": "0"})[0] == profile
    agreeing = Profile(fuse_grad_size_in_MB=32, environment=MEMORY)
    assert (agreeing.fuse_grad_size_in_MB, agreeing.environment) == (32.0, {})


SLOWER = "each bucket is waited for, and nothing overlaps: slower today, though the advice in 1.8 was to set it; leave"


def test_waiting_for_each_allreduce_is_called_slower_in_one_line_wherever_it_is_set(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("FLAGS_sync_nccl_allreduce: true\n")
    of_environment, notices = Profile().overridden_by({"FLAGS_sync_nccl_allreduce": "1"})
    assert applied_mappings(of_environment) == []
    (said,) = notices
    assert said.startswith(f"FLAGS_sync_nccl_allreduce=1 is used as sync_nccl_allreduce: true: {SLOWER}")
    stock = stock_fleet.DistributedStrategy()
    stock.sync_nccl_allreduce = True
    places = {
        "set by the caller": Profile(sync_nccl_allreduce=True),
        "FLAGS_sync_nccl_allreduce": Profile(FLAGS_sync_nccl_allreduce=True),
        "environment.FLAGS_sync_nccl_allreduce": Profile(environment={"FLAGS_sync_nccl_allreduce": "1"}),
        f"{path}:1, FLAGS_sync_nccl_allreduce": load_profile(str(path)),
        "DistributedStrategy": DistributedStrategy.from_stock(stock).to_profile(),
    }
    for place, profile in places.items():
        (said,) = applied_mappings(profile)
        assert said.startswith(f"sync_nccl_allreduce: true ({place}): {SLOWER}")
    off = Profile().overridden_by({"FLAGS_sync_nccl_allreduce": "0"})[1]
    assert off == ["FLAGS_sync_nccl_allreduce=0 is used as sync_nccl_allreduce: false"]
    assert applied_mappings(Profile(sync_nccl_allreduce=False)) == []
    assert applied_mappings(DistributedStrategy.from_stock(stock_fleet.DistributedStrategy()).to_profile()) == []


FRACTION, GREEDY = "FLAGS_fraction_of_gpu_memory_to_use", {"FLAGS_allocator_strategy": "naive_best_fit"}


@pytest.mark.parametrize("text", ["0", "0.0", "1", "1.0", "0.95", ".5", "9.2e-1"])
def test_a_part_of_a_gpus_memory_is_said_to_have_no_effect_where_memory_grows(text: str) -> None:
    told = f"{FRACTION} ({{}}) has no effect: Paddle's allocator auto_growth"
    profile = Profile(environment={FRACTION: text})
    for environ, place in [({}, BY_CALLER), ({FRACTION: text}, BY_CALLER), ({FRACTION: "0.3"}, "the environment")]:
        (said,) = profile.overridden_by(environ)[1]
        assert said.startswith(told.format(place))
    (said,) = Profile().overridden_by({FRACTION: text})[1]
    assert said.startswith(told.format("the environment"))
    greedy = Profile(environment={FRACTION: text} | GREEDY).overridden_by({})[1]
    assert [FRACTION in each and "is 0: nothing is taken at the start" in each for each in greedy] == [True] * (
        float(text) == 0
    )
    assert Profile().overridden_by({FRACTION: text} | GREEDY)[1] == [
        each.replace(BY_CALLER, "the environment") for each in greedy
    ]


@pytest.mark.parametrize("text", ["1.5", "-0.1", "95", "95%", "", "nan", "inf", "yes"])
def test_what_is_no_part_of_a_gpus_memory_is_refused(text: str) -> None:
    allowed = "given a value that is not allowed; allowed: a number, 0 to 1, the part of a GPU's free memory"
    with pytest.raises(ProfileError, match=f"^environment.{FRACTION}: {allowed}$"):
        Profile(environment={FRACTION: text})
    with pytest.raises(ProfileError, match=rf"^{FRACTION}: {allowed} \(from the environment; unset it there\)$"):
        Profile().overridden_by({FRACTION: text})


LOCAL = {"use_local_sgd": True, "local_sgd_steps": 1}
NOTHING_SAVED = "local_sgd_steps: 1 (set by the caller) averages the parameters after every step, which sends as much"


@pytest.mark.parametrize(
    ("settings", "nodes", "message"),
    [
        ({"nccl_comm_num": 2}, None, None),
        (
            {"nccl_comm_num": 2},
            1,
            "nccl_comm_num: 2 (set by the caller) is carried out on this one node; Fleet 1.8 used 1 there.",
        ),
        (
            {"num_iteration_per_drop_scope": 30},
            None,
            "num_iteration_per_drop_scope: 30 (set by the caller) is mapped: The current executor frees an",
        ),
        (LOCAL, None, NOTHING_SAVED),
        (LOCAL | {"local_sgd_schedule": "doubling"}, None, NOTHING_SAVED),
        (LOCAL | {"local_sgd_schedule": "adaptive"}, None, None),
        (LOCAL | {"outer_optimizer": "slowmo"}, None, None),
    ],
)
def test_what_is_done_otherwise_than_a_setting_says_is_told(
    settings: dict[str, Any], nodes: int | None, message: str | None
) -> None:
    told = applied_mappings(Profile(**settings), **({} if nodes is None else {"node_num": nodes}))
    assert [each.startswith(message or "") for each in told] == [True] * (message is not None)
