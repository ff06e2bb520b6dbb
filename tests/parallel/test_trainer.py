"""The trainer on several ranks: gradient merge, also over the end of an epoch that ends a process.

The ranks run this file, too; the first argument says which of the runs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import fleet, role_maker
from fleet_train.data import BatchLoader, ShardedBatchSampler, synthetic
from fleet_train.profile import Profile
from fleet_train.train import Checkpoints, Trainer, TrainerSettings
from fleet_train.train.settings import Schedule
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import digest, report

BATCH = 4


class Sink:
    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []

    def write(self, step: int, scalars: Any) -> None:
        self.records.append((step, dict(scalars)))

    def close(self) -> None: ...


def train_merged(merged: int, samples: int, batch: int, seed: int, folder: Path, **settings: Any) -> dict[str, Any]:
    dropout, last_batch = settings.pop("dropout", 0.0), settings.pop("last_batch", "keep")
    overlaps, log_every = settings.pop("overlaps", False), settings.pop("log_every", 1)
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    schedule = Schedule("cosine", 3 * samples // (batch * fleet.worker_num()), 2 * merged).of_updates(merged)
    scheduler = paddle.optimizer.lr.LambdaDecay(0.1, schedule)
    with paddle.static.scope_guard(scope), paddle.utils.unique_name.guard():
        with paddle.static.program_guard(main, startup):
            paddle.seed(seed)
            hidden = paddle.tanh(paddle.nn.Linear(6, 5)(paddle.static.data("features", [-1, 6], "float32")))
            logits = paddle.nn.Linear(5, 3)(paddle.nn.functional.dropout(hidden, dropout))
            loss = paddle.nn.functional.cross_entropy(logits, paddle.static.data("labels", [-1], "int64"))
            optimizer = paddle.optimizer.Momentum(scheduler, 0.9)
            over = "samples" if last_batch == "exact" else "ranks"
            profile = Profile(accumulate_steps=merged, average_over=over, overlap_next_step=overlaps)
            optimizer = fleet.distributed_optimizer(optimizer, profile)
            optimizer.minimize(loss, startup)
        exe = paddle.static.Executor(fleet.place())
        exe.run(startup)
        sampler = ShardedBatchSampler(
            samples, batch, fleet.worker_index(), fleet.worker_num(), seed=seed, last_batch=last_batch
        )
        loader = BatchLoader(synthetic(samples, (6,), 3).train, sampler)
        sink, checkpoints = Sink(), Checkpoints(folder, keep=99)
        how = TrainerSettings(3, seed=seed, log_every=log_every, **settings)
        parts = {"scheduler": scheduler, "checkpoints": checkpoints, "gradient_norm": optimizer.gradient_norm()}
        trainer = Trainer(exe, loss, loader, how, sinks=[sink], **parts)
        if (found := checkpoints.newest()) is not None:
            trainer.resume(found)
        outcome = trainer.fit()
        values = {name: np.array(value) for name, value in main.state_dict("all", scope).items()}
    parameters = [value.tolist() for name, value in sorted(values.items()) if name.endswith((".w_0", ".b_0"))]
    assert len(parameters) == 4, sorted(values)
    state = checkpoints.newest()
    assert state is not None
    return {
        "steps": outcome.steps,
        "samples": outcome.samples,
        "place": [state.state.step, state.state.batches, state.state.pending_batches],
        "rates": [(step, one["train/learning_rate"]) for step, one in sink.records if "train/learning_rate" in one],
        "losses": [(step, one["train/loss"]) for step, one in sink.records if "train/loss" in one],
        "norms": [(step, one.get("train/gradient_norm")) for step, one in sink.records if "train/loss" in one],
        "parameters": parameters,
        "state": digest(values),
    }


def joint_runs(merged: str, samples: str, batch: str, folder: str) -> None:
    sizes = int(merged), int(samples), int(batch)
    report(fleet.worker_index(), runs=[train_merged(*sizes, seed, Path(folder) / f"{seed}") for seed in (1, 2)])


def parted_runs(merged: str, samples: str, batch: str, folder: str) -> None:
    """With dropout: straight through, then three that are begun anew after each epoch."""
    sizes = int(merged), int(samples), int(batch)
    straight = train_merged(*sizes, 1, Path(folder) / "straight", dropout=0.5)
    parts = [train_merged(*sizes, 1, Path(folder) / "parts", dropout=0.5, stop_after_epochs=1) for _ in range(3)]
    report(fleet.worker_index(), runs=[straight, *parts])


UNEVEN = (51, 49)
"""Samples of an epoch on two ranks: the last batches are of 2 and 1, or of 5 and 4 samples."""


def uneven_runs(batch: str, folder: str) -> None:
    runs = [
        train_merged(merged, samples, int(batch), 1, Path(folder) / f"{merged} {samples}", last_batch="exact")
        for merged in (1, 2)
        for samples in UNEVEN
    ]
    report(fleet.worker_index(), runs=runs)


def overlapped_runs(merged: str, folder: str) -> None:
    """Without ``overlap_next_step`` and with it, in one go and begun anew after each epoch."""
    settings = {"dropout": 0.5, "log_every": 3}
    runs = [train_merged(int(merged), 48, 4, 1, Path(folder) / "own", **settings)]
    settings["overlaps"] = True
    runs.append(train_merged(int(merged), 48, 4, 1, Path(folder) / "next", **settings))
    runs += [
        train_merged(int(merged), 48, 4, 1, Path(folder) / "parts", stop_after_epochs=1, **settings) for _ in range(3)
    ]
    report(fleet.worker_index(), runs=runs)


RUNS = {"joint": joint_runs, "parted": parted_runs, "uneven": uneven_runs, "overlapped": overlapped_runs}


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    RUNS[sys.argv[1]](*sys.argv[2:])


def run(folder: Path, world_size: int, *args: Any) -> RanksResult:
    nodes = 0 if world_size == 1 else world_size
    return run_ranks(Path(__file__), world_size, folder=folder, nodes=nodes, args=list(map(str, args)))


def merged(folder: Path, what: str, steps: int, samples: int, batch: int, world_size: int) -> Any:
    """The runs of each rank."""
    return run(folder, world_size, what, steps, samples, batch, folder / "saved").of_all("runs")


def test_merged_micro_batches_on_two_ranks_are_one_process_with_the_joint_batch(tmp_path: Path) -> None:
    steps, samples = 3, 2 * 3 * BATCH * 6
    ranks = merged(tmp_path / "ranks", "joint", steps, samples, BATCH, 2)
    (alone,) = merged(tmp_path / "alone", "joint", 1, samples, 2 * steps * BATCH, 1)
    for found, expected in zip(ranks[0], alone, strict=True):
        assert found["steps"] == expected["steps"] == 18
        assert found["samples"] == expected["samples"] == 3 * samples
        assert found["place"] == [18, 18 * steps, 0]
        assert [step for step, _ in found["rates"]] == list(range(1, 19))
        assert found["rates"] == expected["rates"]
        assert [step for step, _ in found["norms"]] == list(range(1, 19))
        np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-4)
        np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
        for one, other in zip(found["parameters"], expected["parameters"], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_epochs_whose_last_batches_are_unlike_are_those_of_one_process(tmp_path: Path) -> None:
    ranks = run(tmp_path / "ranks", 2, "uneven", BATCH, tmp_path / "ranks" / "saved").of_all("runs")
    (alone,) = run(tmp_path / "alone", 1, "uneven", 2 * BATCH, tmp_path / "alone" / "saved").of_all("runs")
    assert len(alone) == 2 * len(UNEVEN)
    for first, second, expected in zip(*ranks, alone, strict=True):
        assert first["parameters"] == second["parameters"]
        assert first["steps"] == expected["steps"] >= 9
        np.testing.assert_allclose(first["losses"], expected["losses"], rtol=1e-5)
        for one, other in zip(first["parameters"], expected["parameters"], strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("merged_steps", [1, pytest.param(2, marks=pytest.mark.long)])
def test_updates_in_the_next_step_give_the_same_bits_in_one_go_and_begun_anew(
    merged_steps: int, tmp_path: Path
) -> None:
    found = run(tmp_path / "ranks", 2, "overlapped", merged_steps, tmp_path / "saved")
    assert "overlap_next_step: nothing" not in found.report()
    for own, straight, *parts in found.of_all("runs"):
        assert straight == own
        assert parts[-1]["state"] == own["state"]
        for what in ("losses", "norms", "rates"):
            assert [one for part in parts for one in part[what]] == own[what]


@pytest.mark.long
def test_a_resume_gives_the_same_bits_also_where_an_update_goes_over_the_end_of_an_epoch(tmp_path: Path) -> None:
    steps, batches = 3, 7  # of each rank in an epoch
    for straight, *parts in merged(tmp_path / "ranks", "parted", steps, 2 * BATCH * batches, BATCH, 2):
        assert straight["steps"] == 3 * batches // steps
        assert [part["place"] for part in parts] == [
            [n * batches // steps, n * batches, n * batches % steps] for n in (1, 2, 3)
        ]
        assert parts[-1]["state"] == straight["state"]
        assert [one for part in parts for one in part["losses"]] == straight["losses"]
        assert [one for part in parts for one in part["norms"]] == straight["norms"]
        assert [one for part in parts for one in part["rates"]] == straight["rates"]


if __name__ == "__main__":
    main()
