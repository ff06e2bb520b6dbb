"""Which strategies can be combined: an entry for every pair, and each entry enforced."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from fleet_train.errors import ProfileError
from fleet_train.profile import KNOBS, Profile
from fleet_train.profile.compatibility import PAIRS, STRATEGIES, clashes, entries, verdict
from fleet_train.profile.knobs import Problem
from fleet_train.profile.methods.base import Verdict

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
    "dgc": {"compression": "dgc"},
    "merge": {"accumulate_steps": 2},
    "amp": {"amp_level": "O1"},
    "sync_bn": {"sync_batch_norm": True},
    "recompute": {"recompute_segments": 3},
}
KNOB_OF = {one.name: one.knob for one in STRATEGIES}
REFUSED = {
    ("hierarchical", "dgc"),
    ("local_sgd", "powersgd"),
    ("local_sgd", "dgc"),
    ("local_sgd", "sync_bn"),
    ("outer", "powersgd"),
    ("outer", "dgc"),
    ("outer", "sync_bn"),
    ("bf16", "powersgd"),
    ("bf16", "dgc"),
    ("bf16", "quantised"),
    ("quantised", "powersgd"),
    ("quantised", "dgc"),
    ("powersgd", "dgc"),
}
ALL = set(combinations([one.name for one in STRATEGIES], 2))
ONE_KNOB = {pair for pair in ALL if KNOB_OF[pair[0]] == KNOB_OF[pair[1]]}


def test_every_pair_of_strategies_has_one_entry_and_nothing_else_has() -> None:
    assert PAIRS.keys() == ALL
    assert ON.keys() == {one.name for one in STRATEGIES}


def test_only_the_compressions_share_a_knob_so_that_no_file_can_name_two_of_them() -> None:
    assert set(combinations(("bf16", "quantised", "powersgd", "dgc"), 2)) == ONE_KNOB
    assert not any(PAIRS[pair].allowed for pair in ONE_KNOB)


@pytest.mark.parametrize("pair", sorted(ALL - ONE_KNOB), ids=" and ".join)
def test_a_profile_with_both_is_taken_or_refused_as_the_table_says(pair: tuple[str, str]) -> None:
    settings = {"fuse_all_reduce_ops": False} | ON[pair[0]] | ON[pair[1]]
    if pair not in REFUSED:
        assert Profile(**settings).settings() == settings
    else:
        with pytest.raises(ProfileError, match="does not go with"):
            Profile(**settings)


def test_the_table_refuses_these_pairs_and_no_others() -> None:
    assert {pair for pair, entry in PAIRS.items() if not entry.allowed} == REFUSED


@pytest.mark.parametrize("pair", sorted(ALL - ONE_KNOB), ids=" and ".join)
def test_a_refused_entry_refuses_a_profile_with_both_and_no_other(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PAIRS, pair, Verdict(False, "a reason; leave one of them out"))
    first, second = pair
    with pytest.raises(ProfileError, match=r": a reason; leave one of them out$"):
        Profile(**{"fuse_all_reduce_ops": False} | ON[first] | ON[second])
    Profile(**{"fuse_all_reduce_ops": False} | ON[first])


def test_a_pair_is_found_in_either_order() -> None:
    assert verdict("local_sgd", "waiting") is verdict("waiting", "local_sgd") is PAIRS["waiting", "local_sgd"]
    with pytest.raises(KeyError):
        verdict("local_sgd", "nothing")


def test_a_clash_names_the_knob_that_was_set() -> None:
    pairs = PAIRS | {("fused", "waiting"): Verdict(False, "a reason; leave one of them out")}
    assert clashes({"sync_nccl_allreduce": True}, pairs=pairs) == [
        Problem(
            "sync_nccl_allreduce",
            "does not go with fused buckets (fuse_all_reduce_ops: true): a reason; leave one of them out",
        )
    ]
    assert clashes({"sync_nccl_allreduce": True, "fuse_all_reduce_ops": False}, pairs=pairs) == []
    assert clashes({"nccl_comm_num": 2}, pairs=pairs) == []


def test_two_strategies_that_are_on_by_themselves_clash_with_neither_knob_set() -> None:
    strategies = (STRATEGIES[0], STRATEGIES[0].__class__("timeout", "collective_timeout_seconds", "waiting at most"))
    pairs = {("fused", "timeout"): Verdict(False, "a reason")}
    assert clashes({}, strategies, pairs)[0].key == "fuse_all_reduce_ops"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"use_local_sgd": True, "compression": "powersgd"},
            "compression: does not go with LocalSGD (use_local_sgd: true): LocalSGD sends gradients in its warm-up "
            "only, and a compression's error feedback would be lost at its end; use local_sgd_dtype: bfloat16",
        ),
        (
            {"use_hierarchical_allreduce": True, "compression": "dgc"},
            "compression: does not go with hierarchical allreduce (use_hierarchical_allreduce: true): the ranks' "
            "largest elements are gathered, not summed; leave use_hierarchical_allreduce off",
        ),
        (
            {"use_local_sgd": True, "sync_batch_norm": True},
            "sync_batch_norm: does not go with LocalSGD (use_local_sgd: true): local steps send nothing, but "
            "synchronised statistics would have to; leave sync_batch_norm off",
        ),
    ],
)
def test_a_refused_pair_is_an_error_with_the_reason_and_the_fix(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        Profile(**settings)
    assert str(caught.value) == message


def test_half_the_bits_in_either_format_are_one_strategy() -> None:
    refused = PAIRS | {("fused", "bf16"): Verdict(False, "a reason")}
    assert [one.key for one in clashes({"compression": "fp16"}, pairs=refused)] == ["compression"]
    assert [one.key for one in clashes({"compression": "bf16"}, pairs=refused)] == ["compression"]


def test_what_is_switched_off_is_no_strategy() -> None:
    refuse_all = {pair: Verdict(False, "a reason") for pair in PAIRS}
    off = {"nccl_comm_num": 1, "use_local_sgd": True, "outer_optimizer": "none", "fuse_all_reduce_ops": False}
    off |= {"compression": "none", "accumulate_steps": 1, "amp_level": "O0", "sync_batch_norm": False}
    assert clashes(off, pairs=refuse_all) == []


def test_each_strategy_has_a_knob_of_the_table_and_each_entry_says_how() -> None:
    assert {one.knob for one in STRATEGIES} <= KNOBS.keys()
    assert all(entry.words and not entry.words.endswith(".") for _, _, entry in entries())
    assert len(list(entries())) == 91
