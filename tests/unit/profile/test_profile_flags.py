"""Paddle 1.8's communication flags are knobs wherever they are written; other flags are checked with Paddle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet_train.errors import ProfileError
from fleet_train.profile import Profile, applied_mappings, check_flags, load_profile


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
    assert profile.origin("fuse_grad_size_in_MB") == f"{path}:2"


def test_a_flag_at_the_top_level_is_the_knob_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("FLAGS_fuse_parameter_memory_size: 8\nFLAGS_sync_nccl_allreduce: 0\n")
    with pytest.raises(ProfileError, match=r"a\.yaml:2: FLAGS_sync_nccl_allreduce: given 0 \(a number\)"):
        load_profile(str(path))
    path.write_text("FLAGS_fuse_parameter_memory_size: 8\nFLAGS_sync_nccl_allreduce: false\n")
    profile = load_profile(str(path))
    assert profile.fuse_grad_size_in_MB == 8.0
    assert profile.origin("fuse_grad_size_in_MB") == f"{path}:1"


def test_a_flag_that_contradicts_its_knob_is_refused() -> None:
    with pytest.raises(ProfileError) as caught:
        Profile(fuse_grad_size_in_MB=4, environment={"FLAGS_fuse_parameter_memory_size": "8"})
    assert str(caught.value) == (
        "environment.FLAGS_fuse_parameter_memory_size: means fuse_grad_size_in_MB: 8, but fuse_grad_size_in_MB is 4; "
        "keep one of the two"
    )


def test_a_flag_that_agrees_with_its_knob_is_fine() -> None:
    profile = Profile(fuse_grad_size_in_MB=8, environment={"FLAGS_fuse_parameter_memory_size": "8"})
    assert (profile.fuse_grad_size_in_MB, profile.environment) == (8.0, {})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("memory_size", "lots", "given an invalid text; allowed: a number, more than 0 and up to 4096"),
        ("memory_size", "-1", "given -1; allowed: a number, more than 0 and up to 4096"),
        ("groups_size", "2.5", "given an invalid text; allowed: a whole number, 1 to 100000"),
    ],
)
def test_a_flag_out_of_range_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        Profile(environment={f"FLAGS_fuse_parameter_{name}": text})
    assert str(caught.value) == f"environment.FLAGS_fuse_parameter_{name}: {message}"


def test_the_process_environment_fills_knobs_that_the_profile_leaves_open() -> None:
    profile, notices = Profile().overridden_by(
        {"FLAGS_fuse_parameter_memory_size": "32", "FLAGS_fuse_parameter_groups_size": "10", "HOME": "/root"}
    )
    assert (profile.fuse_grad_size_in_MB, profile.fuse_parameter_groups_size) == (32.0, 10)
    assert profile.origin("fuse_grad_size_in_MB") == "the environment"
    assert notices == [
        "FLAGS_fuse_parameter_memory_size=32 is used as fuse_grad_size_in_MB: 32",
        "FLAGS_fuse_parameter_groups_size=10 is used as fuse_parameter_groups_size: 10",
    ]


def test_the_profiles_own_knob_wins_over_the_process_environment() -> None:
    profile, notices = Profile(fuse_grad_size_in_MB=4).overridden_by({"FLAGS_fuse_parameter_memory_size": "32"})
    assert profile.fuse_grad_size_in_MB == 4.0
    assert notices == [
        "FLAGS_fuse_parameter_memory_size=32 is not used: the profile sets fuse_grad_size_in_MB: 4 (set by the caller)"
    ]


def test_a_fuse_flag_is_not_used_where_fusing_is_off() -> None:
    profile, notices = Profile(fuse_all_reduce_ops=False).overridden_by({"FLAGS_fuse_parameter_memory_size": "32"})
    assert profile == Profile(fuse_all_reduce_ops=False)
    assert notices == [
        "FLAGS_fuse_parameter_memory_size=32 is not used: fuse_all_reduce_ops is off (set by the caller)"
    ]


def test_waiting_for_each_allreduce_can_be_set_by_the_process_environment_too() -> None:
    assert Profile().overridden_by({"FLAGS_sync_nccl_allreduce": "0"})[0] == Profile()
    profile, notices = Profile().overridden_by({"FLAGS_sync_nccl_allreduce": "1"})
    assert profile.sync_nccl_allreduce is True
    assert notices == ["FLAGS_sync_nccl_allreduce=1 is used as sync_nccl_allreduce: true"]


def test_a_flag_of_a_refused_knob_is_refused_from_the_process_environment_too(refused_knob: str) -> None:
    assert Profile().overridden_by({f"FLAGS_{refused_knob}": "0"})[0] == Profile()
    with pytest.raises(ProfileError) as caught:
        Profile().overridden_by({f"FLAGS_{refused_knob}": "1"})
    assert str(caught.value) == (
        "FLAGS_sync_nccl_allreduce: given true: not available yet; leave it off: a reason. "
        "(from the environment; unset it there)"
    )


def test_without_flags_the_profile_stays_the_same_object() -> None:
    profile = Profile()
    assert profile.overridden_by({"PATH": "/bin"}) == (profile, [])


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


def test_known_flags_pass() -> None:
    check_flags(Profile(environment={"FLAGS_x": "1", "NCCL_DEBUG": "INFO"}), ["FLAGS_x"])


def test_mapped_settings_are_logged_only_if_they_were_set() -> None:
    assert applied_mappings(Profile(nccl_comm_num=2)) == []
    assert applied_mappings(Profile(num_iteration_per_drop_scope=30)) == [
        "num_iteration_per_drop_scope: 30 (set by the caller) is mapped: The current executor frees an intermediate "
        "variable after its last reader: no scope is left to drop."
    ]


def test_several_communicators_on_one_node_are_carried_out_unlike_in_fleet() -> None:
    assert applied_mappings(Profile(nccl_comm_num=2), node_num=1) == [
        "nccl_comm_num: 2 (set by the caller) is carried out on this one node; Fleet 1.8 silently used 1 there."
    ]
    assert applied_mappings(Profile(nccl_comm_num=2), node_num=2) == []


@pytest.mark.parametrize("schedule", ["constant", "doubling"])
def test_averaging_parameters_after_every_step_is_reported_to_save_nothing(schedule: str) -> None:
    profile = Profile(use_local_sgd=True, local_sgd_steps=1, local_sgd_schedule=schedule)
    assert applied_mappings(profile) == [
        "local_sgd_steps: 1 (set by the caller) averages the parameters after every step, which sends as much as "
        "averaging gradients in every step; 2 or more sends less."
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"local_sgd_steps": 2},
        {"local_sgd_steps": 1, "local_sgd_schedule": "adaptive"},
        {"local_sgd_steps": 1, "outer_optimizer": "slowmo"},
        {"outer_optimizer": "diloco", "outer_momentum": 0.0},
    ],
)
def test_local_sgd_that_differs_from_averaging_every_step_has_no_message(settings: dict[str, Any]) -> None:
    assert applied_mappings(Profile(use_local_sgd=True, **settings)) == []


def test_the_cost_of_fewer_barriers_is_reported() -> None:
    assert applied_mappings(Profile(barrier_every_steps=50)) == [
        "barrier_every_steps: 50 (set by the caller): between two barriers Gloo waits for a rank for 30 s, which "
        "cannot be set: one that pauses for longer fails the job. NCCL's ranks wait for 300 s "
        "(collective_timeout_seconds). A stop request is known up to 49 steps later."
    ]
    assert applied_mappings(Profile(barrier_every_steps=1)) == []


def test_num_threads_is_mapped_to_the_executors_serial_mode() -> None:
    executor = ("FLAGS_new_executor_serial_run", "FLAGS_new_executor_sequential_run")
    assert Profile().worker_environment() == dict.fromkeys(executor, "1")
    assert Profile(num_threads=3).worker_environment() == dict.fromkeys(executor, "0")
    own = {"FLAGS_new_executor_serial_run": "0", "NCCL_DEBUG": "INFO"}
    assert Profile(environment=own).worker_environment() == own | {"FLAGS_new_executor_sequential_run": "1"}
