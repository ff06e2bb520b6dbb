"""Ranks that take unlike parts of the joint batch, beside one process that trains the joint batches, in float64.

The ranks run this file, too; the first argument says which of the runs. A rank is slow here by sleeping.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train import fleet, role_maker
from fleet_train.data import BatchLoader, OwnDataSampler, ShardedBatchSampler, synthetic
from fleet_train.data.loader import keep
from fleet_train.errors import DataError, ProfileError
from fleet_train.profile import Profile
from fleet_train.train import Checkpoints, Trainer, TrainerSettings
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import digest, report

SHARES = {2: [3.0, 1.0], 3: [2.0, 5.0, 1.0]}
SEEDS = (0, 1)
SAMPLES, BATCH = 53, 8
"""Of an epoch, and on average of each rank: the last batch has other sizes."""
CLASSES, WORDS = 3, 11


def arrays_of(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, (SAMPLES, 1))
    labels[rng.random(SAMPLES) < 0.2] = -100
    return {"x": rng.standard_normal((SAMPLES, 4)), "word": rng.integers(0, WORDS, (SAMPLES, 1)), "label": labels}


def plain(x: Any, word: Any, label: Any) -> Any:
    del word
    return nn.functional.cross_entropy(nn.Linear(4, CLASSES)(x), label.clip(0, CLASSES - 1))


def weighted(x: Any, word: Any, label: Any) -> Any:
    """With class weights and labels that do not count, whose number differs from batch to batch."""
    del word
    weights = paddle.assign(np.array([1.0, 3.0, 0.5]))
    return nn.functional.cross_entropy(nn.Linear(4, CLASSES)(x), label, weight=weights, ignore_index=-100)


def normalised(x: Any, word: Any, label: Any) -> Any:
    del word
    hidden = paddle.tanh(nn.BatchNorm1D(5)(nn.Linear(4, 5)(x)))
    return nn.functional.cross_entropy(nn.Linear(5, CLASSES)(hidden), label, ignore_index=-100)


def embedded(x: Any, word: Any, label: Any) -> Any:
    rows = nn.Embedding(WORDS, 4, sparse=True)(word).reshape([-1, 4])
    return nn.functional.cross_entropy(nn.Linear(4, CLASSES)(rows * x), label, ignore_index=-100)


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "a mean": (plain, {}),
    "weights and ignored labels": (weighted, {}),
    "statistics of all ranks": (normalised, {"sync_batch_norm": True}),
    "rows of a table": (embedded, {"sparse_embeddings": True}),
    "micro-batches": (plain, {"accumulate_steps": 2}),
    "sharded": (weighted, {"sharding": True}),
    "the next step": (weighted, {"overlap_next_step": True}),
}


class Model:
    """A program of its own in a scope of its own."""

    def __init__(self, network: Any, seed: int, profile: Profile | None) -> None:
        self.main, startup, self.scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        paddle.set_default_dtype("float64")
        with paddle.static.program_guard(self.main, startup), paddle.utils.unique_name.guard():
            paddle.seed(seed)
            x = paddle.static.data("x", [None, 4], "float64")
            word, label = (paddle.static.data(name, [None, 1], "int64") for name in ("word", "label"))
            self.loss = network(x, word, label)
            optimizer: Any = paddle.optimizer.Momentum(0.1, 0.9)
            if profile is not None:
                optimizer = fleet.distributed_optimizer(optimizer, profile)
            optimizer.minimize(self.loss)
        paddle.set_default_dtype("float32")
        self._exe = paddle.static.Executor(paddle.CPUPlace())
        self._exe.run(startup, scope=self.scope)

    def step(self, feed: dict[str, Any]) -> float:
        (value,) = self._exe.run(self.main, feed=feed, fetch_list=[self.loss], scope=self.scope)
        return float(value.item())

    def values(self) -> Any:
        with paddle.static.scope_guard(self.scope):
            fleet.flush()
        names = sorted(each.name for each in self.main.global_block().all_parameters())
        return np.concatenate([np.array(self.scope.find_var(name).get_tensor()).reshape(-1) for name in names])


def batches(samplers: list[ShardedBatchSampler], epochs: int) -> Iterator[Any]:
    """The joint batches of these ranks: indices in rank order."""
    for epoch in range(epochs):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        for step in range(len(samplers[0])):
            yield np.concatenate([sampler.batch(step) for sampler in samplers])


def sampler_of(ranks: int, rank: int, seed: int, last_batch: str) -> ShardedBatchSampler:
    how: Any = {"drop_last": True} if last_batch == "drop" else {"last_batch": last_batch}
    return ShardedBatchSampler(SAMPLES, BATCH, rank, ranks, seed=seed, shares=SHARES[ranks], **how)


def of_one_process(name: str, ranks: int, seed: int, last_batch: str) -> Any:
    """What one process has after the joint batches of two epochs; of micro-batches after those of two together."""
    network, knobs = CASES[name]
    model, arrays, waiting = Model(network, seed, None), arrays_of(seed), list[Any]()
    for indices in batches([sampler_of(ranks, rank, seed, last_batch) for rank in range(ranks)], 2):
        waiting.append(indices)
        if len(waiting) == knobs.get("accumulate_steps", 1):
            joint = np.concatenate(waiting)
            model.step({key: value[joint] for key, value in arrays.items()})
            waiting.clear()
    return model.values()


def dealt_runs() -> None:
    rank, ranks, found = fleet.worker_index(), fleet.worker_num(), dict[str, Any]()
    for name, (network, knobs) in CASES.items():
        for seed in SEEDS:
            for last_batch in last_batches(name):
                model = Model(network, seed, Profile(batch_shares=SHARES[ranks], **knobs))
                sampler, arrays, losses = sampler_of(ranks, rank, seed, last_batch), arrays_of(seed), []
                for epoch in range(2):
                    sampler.set_epoch(epoch)
                    feeds = ({key: value[indices] for key, value in arrays.items()} for indices in sampler)
                    losses += [model.step(feed) for feed in feeds]
                found[f"{name}, {seed}, {last_batch}"] = model.values()
    report(rank, **found)


def last_batches(name: str) -> tuple[str, ...]:
    return ("drop",) if name == "micro-batches" else ("keep", "exact")


# A loop of one's own that asks for its part before each step; the last rank sleeps for each of its samples.

JOINT, STEPS, EVERY, SLEEP = 24, 41, 10, 0.002
SLOW = {2: 0.25, 3: 0.14}
"""What is at most left to the slow rank."""


def joint_batch(step: int) -> dict[str, Any]:
    rng = np.random.default_rng([7, step])
    size = JOINT - step % 5
    labels = rng.integers(0, CLASSES, (size, 1))
    return {"x": rng.standard_normal((size, 4)), "word": rng.integers(0, WORDS, (size, 1)), "label": labels}


def own_loop() -> None:
    rank, ranks = fleet.worker_index(), fleet.worker_num()
    profile = Profile(batch_shares="auto", batch_shares_steps=EVERY, divergence_check_steps=10)
    model, shares, parts = Model(plain, 1, profile), [], []
    for step in range(STEPS):
        joint = joint_batch(step)
        mine = fleet.batch_slice(len(joint["x"]))
        shares.append(fleet.batch_shares())
        parts.append([mine.start, mine.stop])
        time.sleep(SLEEP * (mine.stop - mine.start) if rank == ranks - 1 else 0)
        model.step({name: value[mine] for name, value in joint.items()})
    report(rank, values=model.values(), shares=shares, parts=parts)


def sizes_of_own_loop() -> None:
    """``fleet.batch_size`` of shares that are given, and what is refused."""
    ranks = fleet.worker_num()
    Model(plain, 1, Profile(batch_shares=SHARES[ranks]))
    sizes, said = [fleet.batch_size(number) for number in (64, 10, ranks)], []
    for ask, error in ((lambda: fleet.batch_size(ranks - 1), DataError), (too_many_shares, ProfileError)):
        with pytest.raises(error) as refused:
            ask()
        said.append(str(refused.value))
    report(fleet.worker_index(), sizes=sizes, said=said)


def refused_runs() -> None:
    """A script in which nobody deals, data of a rank's own, and a call on another thread."""
    rank, ranks, said = fleet.worker_index(), fleet.worker_num(), list[str]()
    model = Model(plain, 1, Profile(batch_shares="auto"))
    model.step(joint_batch(rank))
    with ThreadPoolExecutor(1) as thread:
        said.append(str(thread.submit(fleet.batch_size, 64).exception()))
    own = BatchLoader(synthetic(40, (6,), 3).train, OwnDataSampler(40, 4, total_ranks=ranks))
    with pytest.raises(DataError) as refused:
        Trainer(None, model.loss, own, TrainerSettings(1))
    report(rank, said=[*said, str(refused.value)])


def too_many_shares() -> None:
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), Profile(batch_shares=[1.0] * 7))


# The trainer, a rank of which reads slowly.

MOVES, SLEEP_READING = 3, 0.012


def slow_reading(dataset: Any, draws: Any) -> Any:
    """Slow is the last rank, from the epoch `MOVES` on the first one."""
    slow = fleet.worker_num() - 1 if draws.epoch < MOVES else 0
    time.sleep(SLEEP_READING * len(draws.indices) if fleet.worker_index() == slow else 0)
    return keep(dataset, draws)


class Sink:
    """Keeps the shares of all ranks that a record has."""

    def __init__(self) -> None:
        self.shares: list[list[float]] = []

    def write(self, step: int, scalars: Any) -> None:
        del step
        shares = [scalars[f"ranks/share/{rank}"] for rank in range(fleet.worker_num()) if "train/loss" in scalars]
        self.shares += [shares] if shares else []

    def close(self) -> None: ...


def train(folder: Path, shares: Any, epochs: int = 3, seed: int = 0, **settings: Any) -> dict[str, Any]:
    main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
    with paddle.static.scope_guard(scope), paddle.utils.unique_name.guard():
        with paddle.static.program_guard(main, startup):
            paddle.seed(seed)
            hidden = paddle.tanh(nn.Linear(6, 5)(paddle.static.data("features", [-1, 6], "float32")))
            logits = nn.Linear(5, 3)(nn.functional.dropout(hidden, 0.3))
            loss = nn.functional.cross_entropy(logits, paddle.static.data("labels", [-1], "int64"))
            optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(0.01), Profile(batch_shares=shares))
            optimizer.minimize(loss, startup)
        exe = paddle.static.Executor(fleet.place())
        exe.run(startup)
        sampler = ShardedBatchSampler(260, 16, fleet.worker_index(), fleet.worker_num(), last_batch="merge")
        loader = BatchLoader(synthetic(260, (6,), 3).train, sampler, slow_reading)
        checkpoints = Checkpoints(folder, keep=99)
        sink, how = Sink(), TrainerSettings(epochs, **settings)
        trainer = Trainer(exe, loss, loader, how, checkpoints=checkpoints, sinks=[sink])
        if (found := checkpoints.newest()) is not None:
            trainer.resume(found)
        outcome = trainer.fit()
        values = {name: np.array(value) for name, value in main.state_dict("all", scope).items()}
    newest = checkpoints.newest()
    assert newest is not None
    found = {"state": digest(values), "samples": outcome.samples, "shares": newest.state.shares, "steps": outcome.steps}
    return found | {"by epoch": sink.shares}


def trainer_runs(folder: str) -> None:
    """With given shares, straight and begun anew twice in each epoch; with those that are measured, two that go on from
    the same checkpoint."""
    where, given = Path(folder), SHARES[fleet.worker_num()]
    found = {"straight": train(where / "straight", given)}
    for epoch in range(3):
        found["anew"] = train(where / "anew", given, stop_after_epochs=1)
        assert epoch < 2 or found["anew"]["steps"] == found["straight"]["steps"]
    found["measured"] = train(where / "measured", "auto", epochs=3, stop_after_epochs=2)
    for name in ("once", "again"):
        if fleet.is_first_worker():
            copy_of(where / "measured", where / name)
        fleet.barrier_worker()
        found[name] = train(where / name, "auto", epochs=3)
    found["moved"] = train(where / "moved", "auto", epochs=MOVES + 3)
    report(fleet.worker_index(), **found)


def copy_of(run: Path, other: Path) -> None:
    import shutil

    shutil.copytree(run, other)


RUNS = {
    "dealt": dealt_runs,
    "own": own_loop,
    "sizes": sizes_of_own_loop,
    "refused": refused_runs,
    "trainer": trainer_runs,
}


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    RUNS[sys.argv[1]](*sys.argv[2:])


def run(folder: Path, ranks: int, *args: Any) -> RanksResult:
    return run_ranks(Path(__file__), ranks, folder=folder, nodes=ranks, args=list(map(str, args)))


@cache
def started(folder: Path, ranks: int) -> RanksResult:
    return run(folder, ranks, "dealt")


RANKS = [2, pytest.param(3, marks=pytest.mark.long)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dealt")


@pytest.fixture
def _static() -> Iterator[None]:
    paddle.enable_static()
    yield
    paddle.disable_static()


@pytest.mark.usefixtures("_static")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", CASES)
def test_unlike_parts_train_as_one_process_with_the_joint_batches(folder: Path, ranks: int, name: str) -> None:
    result = started(folder / str(ranks), ranks)
    for seed in SEEDS:
        for last_batch in last_batches(name):
            expected = of_one_process(name, ranks, seed, last_batch)
            for found in result.of_all(f"{name}, {seed}, {last_batch}"):
                np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12, err_msg=f"{seed}, {last_batch}")


@pytest.mark.usefixtures("_static")
@pytest.mark.parametrize("ranks", RANKS)
def test_a_loop_of_ones_own_gives_a_slow_rank_less_and_trains_the_same_joint_batches(
    tmp_path: Path, ranks: int
) -> None:
    result = run(tmp_path, ranks, "own")
    shares = result.of_all("shares")
    assert all(each == shares[0] for each in shares)
    first = [1 / ranks] * ranks
    changed = [step for step in range(1, STEPS) if shares[0][step] != shares[0][step - 1]]
    assert shares[0][0] == first
    assert changed[0] == 10, changed
    assert {step % EVERY for step in changed} == {0}, changed
    assert shares[0][-1][-1] < SLOW[ranks], shares[0]
    parts = np.array(result.of_all("parts"))
    assert (parts[1:, :, 0] == parts[:-1, :, 1]).all()
    assert not parts[0, :, 0].any()
    assert parts[-1, :, 1].tolist() == [JOINT - step % 5 for step in range(STEPS)]
    model = Model(plain, 1, None)
    for step in range(STEPS):
        model.step(joint_batch(step))
    for found in result.of_all("values"):
        np.testing.assert_allclose(found, model.values(), rtol=1e-9, atol=1e-12)


def test_given_shares_are_whole_numbers_of_samples_and_those_that_fit_no_job_are_refused(tmp_path: Path) -> None:
    result = run(tmp_path, 2, "sizes")
    assert result.of_all("sizes") == [[48, 8, 1], [16, 2, 1]]
    assert result.of_all("said")[0] == [
        "1 samples cannot be dealt over 2 ranks: each needs one",
        "batch_shares: [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0] has 7 numbers, and the job 2 ranks; give one for each, or "
        "auto",
    ]


def test_shares_that_nobody_deals_by_are_named_and_what_cannot_deal_is_refused(tmp_path: Path) -> None:
    result = run(tmp_path, 2, "refused")
    ignored = "fleet_train: batch_shares: auto, and nobody deals by it: each rank is fed what the script reads; feed "
    assert [rank.output.count(ignored) for rank in result.ranks] == [1, 0], result.report()
    for thread, own in result.of_all("said"):
        assert thread.startswith("fleet.batch_size with batch_shares: auto is called on another thread")
        assert own.startswith("batch_shares: auto needs a ShardedBatchSampler (--shard_by sample)")
        assert "OwnDataSampler does not" in own


@pytest.mark.parametrize("ranks", RANKS)
def test_the_trainer_deals_follows_a_slow_rank_and_goes_on_with_the_same_bits(tmp_path: Path, ranks: int) -> None:
    result = run(tmp_path, ranks, "trainer", tmp_path / "saved")
    names = ("straight", "anew", "measured", "once", "again", "moved")
    straight, anew, measured, once, again, moved = ([rank[name] for rank in _by_name(result, names)] for name in names)
    total = sum(SHARES[ranks])
    for one, other in zip(straight, anew, strict=True):
        assert one["state"] == other["state"]
        assert one["samples"] == 3 * 260
        assert one["shares"] == pytest.approx([share / total for share in SHARES[ranks]])
    assert measured[0]["shares"][-1] < 1 / ranks - 0.1, measured
    assert [each["state"] for each in once] == [each["state"] for each in again]
    assert once[0]["shares"] == measured[0]["shares"] == again[0]["shares"]
    by_epoch = moved[0]["by epoch"]
    assert len(by_epoch) == MOVES + 3
    assert by_epoch[0] == pytest.approx([1 / ranks] * ranks)
    assert min(by_epoch[MOVES]) == by_epoch[MOVES][-1] < 1 / ranks - 0.1, "the last rank was slow until then"
    assert by_epoch[MOVES + 1][0] < by_epoch[MOVES][0] - 0.1, "the first one in the epoch before"
    assert by_epoch[-1][0] < min(1 / ranks, by_epoch[MOVES][0] - 0.2)


def _by_name(result: RanksResult, names: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        dict(zip(names, values, strict=True)) for values in zip(*(result.of_all(name) for name in names), strict=True)
    ]


if __name__ == "__main__":
    main()
