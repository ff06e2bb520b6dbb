"""The three calls around an optimizer, in a job of one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster, Rank
from fleet_train.collectives.job import Job
from fleet_train.convert import fleet, session
from fleet_train.convert.passes import pipeline
from fleet_train.convert.passes.pipeline import ProgramPasses
from fleet_train.profile import Profile
from tests.unit.passes.test_sync_norm import normalised
from tests.unit.passes.training import Trained, batches, loss_scaling, relative_difference


def alone() -> Job:
    return Job(Cluster((Rank(0, "127.0.0.1", 6170, 0, 0),), 0), paddle.CPUPlace())


def minimize_with(profile: Profile) -> Any:
    def minimize(optimizer: Any, loss: Any) -> None:
        passes = ProgramPasses(profile, alone())
        merged = passes.merge(passes.backward(loss, optimizer.backward))
        passes.update(merged, merged.pairs, optimizer.apply_gradients)

    return minimize


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.05, 0.9)


def test_default_settings_leave_the_program_as_it_is() -> None:
    plain, passed = Trained(momentum), Trained(momentum, minimize_with(Profile()))
    assert passed.operators() == plain.operators()


def test_merge_and_recompute_train_like_plain_training() -> None:
    paddle.seed(0)
    plain = Trained(momentum, network=normalised)
    settings = Profile(accumulate_steps=2, recompute_segments=4, sync_batch_norm=True)
    passed = Trained(momentum, minimize_with(settings), normalised)
    passed.start_from(plain.state())
    for batch in batches(1, 8, seed=0):
        plain.step(batch)
        passed.step(batch)
        passed.step(batch)
    names = [name for name in plain.parameters() if not name.endswith(("w_1", "w_2"))]
    ours, expected = passed.parameters(), plain.parameters()
    difference = relative_difference({n: ours[n] for n in names}, {n: expected[n] for n in names}, floor=0.1)
    assert difference < 1e-5


def test_facade_tells_the_loss_scale_of_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    # No CPU computes in float16: the scale is real here, the precision stays.
    monkeypatch.setattr(pipeline, "lower_precision", lambda *_, **__: None)
    profile = loss_scaling(init_loss_scaling=256.0, decr_every_n_nan_or_inf=1)
    passes = ProgramPasses(profile, alone())
    folder_lock = SimpleNamespace(optimizers=[SimpleNamespace(loss_scale_name=passes.loss_scale_name)])
    monkeypatch.setattr(session, "_session", folder_lock)
    assert fleet.loss_scale() is None

    def minimize(optimizer: Any, loss: Any) -> None:
        merged = passes.merge(passes.backward(loss, optimizer.backward))
        passes.update(merged, merged.pairs, optimizer.apply_gradients)

    trained = Trained(momentum, minimize)
    folder_lock.optimizers[0].loss_scale_name = passes.loss_scale_name
    with paddle.static.scope_guard(trained.scope):
        assert fleet.loss_scale() == 256.0
        (features, labels) = batches(1, 8, seed=0)[0]
        trained.step((np.full_like(features, np.inf), labels))
        assert fleet.loss_scale() == pytest.approx(0.8 * 256.0)
