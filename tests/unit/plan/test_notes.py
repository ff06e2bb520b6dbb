"""What a plan's notes say of a knob is what happens, and who does it."""

from __future__ import annotations

import pytest

from fleet_train.cluster import Cluster
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.profile import Profile


def note_of(knob: str, profile: Profile) -> str:
    plan = build_plan([TensorSpec("w", (8,), "float32")], Cluster.imagined(2, 1), profile)
    [effect] = [note.effect for note in plan.notes if note.knob == knob]
    return effect


def test_the_note_on_comparing_replicas_is_right() -> None:
    every = "a digest of the parameters is compared at the first step and every 100 steps"
    assert note_of("divergence_check_steps", Profile()) == f"{every}; and before every save"
    assert note_of("divergence_check_steps", Profile(use_local_sgd=True)) == (
        f"{every} of the warm-up, then at the first averaging after so many; and before every save"
    )
    assert note_of("divergence_check_steps", Profile(use_local_sgd=True, local_sgd_is_warm_steps=0)) == (
        "a digest of the parameters is compared before the first step, then at the first averaging after 100 steps, "
        "and so on; and before every save"
    )


def test_the_note_on_fetching_the_loss_is_right() -> None:
    assert note_of("fetch_frequency", Profile(fetch_frequency=2)) == (
        "the reference trainer fetches the loss every 2 steps, and so does a loop that asks fleet.should_fetch(step); "
        "one that fetches in every step waits in every step"
    )
    assert note_of("fetch_frequency", Profile()) == (
        "the reference trainer fetches the loss in every step, and fleet.should_fetch is true in every step"
    )


def test_fewer_barriers_are_explained() -> None:
    assert note_of("barrier_every_steps", Profile(barrier_every_steps=50)) == (
        "a barrier every 50 synchronous steps, and where one is needed; in between Gloo waits for a rank for 30 s, "
        "which cannot be set, and a stop request is not seen"
    )
    plan = build_plan([TensorSpec("w", (8,), "float32")], Cluster.imagined(2, 1), Profile())
    assert "barrier_every_steps" not in {note.knob for note in plan.notes}


LOCAL = {"use_local_sgd": True, "local_sgd_steps": 8}
LOCAL_NOTES = ("use_local_sgd", "local_sgd_momentum", "local_sgd_dtype")


@pytest.mark.parametrize(
    ("knobs", "notes"),
    [
        ({"sync_nccl_allreduce": True}, {"sync_nccl_allreduce": "waited for immediately"}),
        ({"accumulate_steps": 3}, {"accumulate_steps": "once per 3 micro-batches"}),
        ({"compression": "int8"}, {"compression": "float32 buckets go as int8"}),
        (
            {"compression": "int8", "compression_declines": True},
            {"compression": "go as int8", "compression_declines": "on: int8 is sent where it pays"},
        ),
        ({"compression": "dgc", "dgc_sparsity": 0.99}, {"compression": "sparsity 0.99"}),
        ({"amp_level": "O1", "amp_dtype": "float16"}, {"amp_level": "O1 in float16, with a loss scale;"}),
        ({"amp_level": "O1", "amp_dtype": "bfloat16"}, {"amp_level": "O1 in bfloat16; gradients"}),
        ({"recompute_segments": 4}, {"recompute": "cut in 4 pieces"}),
        ({"recompute_every_blocks": 2}, {"recompute": "cut every 2 blocks"}),
        ({"recompute_checkpoints": ["a", "b"]}, {"recompute": "cut at a, b"}),
        ({"sync_batch_norm": True}, {"sync_batch_norm": "nothing to send"}),
        ({"barrier_every_steps": 5}, {"barrier_every_steps": "every 5 synchronous steps"}),
        (LOCAL, {"use_local_sgd": "every 8 steps (constant)"} | dict.fromkeys(LOCAL_NOTES[1:], "")),
        (
            LOCAL | {"local_sgd_schedule": "adaptive", "local_sgd_max_steps": 20},
            {"use_local_sgd": "every 8 steps (adaptive, at most 20)"} | dict.fromkeys(LOCAL_NOTES[1:], ""),
        ),
        (
            LOCAL | {"local_sgd_overlap_steps": 2},
            {"local_sgd_overlap_steps": "added 2 steps later"} | dict.fromkeys(LOCAL_NOTES, ""),
        ),
        (
            LOCAL | {"outer_optimizer": "slowmo", "outer_lr": 0.5},
            {"outer_optimizer": "slowmo: lr 0.5, momentum"} | dict.fromkeys(LOCAL_NOTES, ""),
        ),
    ],
)
def test_what_is_asked_for_has_a_note_and_nothing_else_has(knobs: dict[str, object], notes: dict[str, str]) -> None:
    """Beside those that every plan has."""
    gradients, cluster = [TensorSpec("w", (8,), "float32")], Cluster.imagined(2, 1)
    usual = {note.knob for note in build_plan(gradients, cluster, Profile()).notes}
    plan = build_plan(gradients, cluster, Profile(**knobs))  # type: ignore[arg-type]
    found = {note.knob: note.effect for note in plan.notes if note.knob not in usual}
    assert found.keys() == notes.keys()
    for knob, words in notes.items():
        assert words in found[knob]


def test_bounds_of_buckets_are_explained_where_gradients_are_fused() -> None:
    fused = {"fuse_grad_size_in_MB", "fuse_parameter_groups_size", "last_comm_group_size_MB"}
    for is_fused in (True, False):
        profile = Profile(fuse_all_reduce_ops=is_fused, nccl_comm_num=1)
        plan = build_plan([TensorSpec("w", (8,), "float32")] * 3, Cluster.imagined(2, 1), profile)
        assert fused & {note.knob for note in plan.notes} == (fused if is_fused else set())
    assert note_of("fuse_all_reduce_ops", profile) == "off: one collective for each of 1 gradients"


def test_local_groups_are_explained_with_their_size() -> None:
    profile = Profile(use_hierarchical_allreduce=True)
    for ranks, words in ((4, "local groups of 4 ranks; 3 leaders"), (1, "every local group would have one rank")):
        plan = build_plan([TensorSpec("w", (8,), "float32")], Cluster.imagined(3, ranks), profile)
        (effect,) = [note.effect for note in plan.notes if note.knob == "use_hierarchical_allreduce"]
        assert words in effect


def test_a_compression_that_was_declined_is_explained_with_what_is_sent() -> None:
    asked = Profile(compression="int8")
    assert note_of("compression", asked.with_choices("declined for a fast link", compression="none")) == (
        "declined for a fast link: the requested compression does not pay there; float32 is sent"
    )
    assert "; bf16 is sent" in note_of("compression", asked.with_choices("declined for it", compression="bf16"))
