"""What a plan says of a knob is what happens, and who does it."""

from __future__ import annotations

from fleet_train.cluster import Cluster
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.profile import Profile


def note_of(knob: str, profile: Profile) -> str:
    plan = build_plan([TensorSpec("w", (8,), "float32")], Cluster.imagined(2, 1), profile)
    [effect] = [note.effect for note in plan.notes if note.knob == knob]
    return effect


def test_when_replicas_are_compared_is_said_as_it_is() -> None:
    every = "a digest of the parameters is compared at the first step and every 100 steps"
    assert note_of("divergence_check_steps", Profile()) == every
    assert note_of("divergence_check_steps", Profile(use_local_sgd=True)) == (
        f"{every} of the warm-up, then at the first averaging after so many"
    )
    assert note_of("divergence_check_steps", Profile(use_local_sgd=True, local_sgd_is_warm_steps=0)) == (
        "a digest of the parameters is compared before the first step, then at the first averaging after 100 steps, "
        "and so on"
    )


def test_who_fetches_the_loss_is_said_as_it_is() -> None:
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
