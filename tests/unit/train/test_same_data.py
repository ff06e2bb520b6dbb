"""A resume continues the checkpoint's place on its data: other data is refused by name, lost machines may return."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fleet_train import __version__, fleet
from fleet_train.data import ArrayDataset, BatchLoader, DataIdentity, ImageFolder, OwnDataSampler, ShardedBatchSampler
from fleet_train.errors import CheckpointError, DataError, FleetTrainError
from fleet_train.profile import Profile
from fleet_train.train.checkpoint import position
from fleet_train.train.checkpoint.manager import StoredCheckpoint, TrainState
from fleet_train.train.checkpoint.position import Position, RunData, other_versions, resumed, versions
from tests.support.agreeing import ThreadRanks


def on_ranks(monkeypatch: pytest.MonkeyPatch, world_size: int, work: Callable[[int], Any]) -> list[Any]:
    """The result of each rank, or its error."""
    ranks = ThreadRanks(world_size)
    monkeypatch.setattr(position, "fleet", ranks)
    return ranks.run(work)


def images(*files: str, classes: tuple[str, ...] = ("cat", "dog")) -> ImageFolder:
    labels = np.array([classes.index(file.partition("/")[0]) for file in files], np.int64)
    return ImageFolder("images/train", Path("images"), files, labels, classes)


def shared(dataset: Any, rank: int, world_size: int) -> BatchLoader:
    return BatchLoader(dataset, ShardedBatchSampler(dataset.num_samples, 2, rank, world_size))


FOUR = images("cat/1", "cat/2", "dog/1", "dog/2")
OF_FOUR = {"classes": ["cat", "dog"], "lists": {FOUR.fingerprint(): {"samples": 4, "ranks": 2, "done": None}}}


def found(data: dict[str, Any] | None, world_size: int = 2, consumed: int = 0) -> StoredCheckpoint:
    return StoredCheckpoint(
        Path("run/step-1"), TrainState(0, 1, 2, world_size, {}, {}, {}, {}, consumed_samples=consumed, data=data)
    )


def resume(
    monkeypatch: pytest.MonkeyPatch, datasets: list[Any], saved: StoredCheckpoint, accepts: bool = False
) -> list[tuple[list[str], Position] | FleetTrainError]:
    def work(rank: int) -> tuple[list[str], Position]:
        at = Position(consumed_samples=saved.state.consumed_samples)
        return RunData(shared(datasets[rank], rank, len(datasets))).resume(saved, at, accepts), at

    return on_ranks(monkeypatch, len(datasets), work)


def test_what_is_recorded_of_a_list_that_all_share(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> Any:
        data = RunData(shared(FOUR, rank, 2))
        return data.record(Position(consumed_samples=2), [data.done(Position(consumed_samples=2))] * 2)

    assert on_ranks(monkeypatch, 2, work) == [OF_FOUR] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("consumed", [0, 2])
def test_the_same_data_is_continued_in_silence_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, world_size: int, consumed: int
) -> None:
    told = resume(monkeypatch, [FOUR] * world_size, found(OF_FOUR, consumed=consumed))
    assert told == [([], Position(consumed_samples=consumed))] * world_size


MORE = images("cat/1", "cat/2", "cat/3", "dog/1", "dog/2")
CHANGES = {
    "renamed": (
        images("cow/1", "cow/2", "dog/1", "dog/2", classes=("cow", "dog")),
        r"class 0 was 'cat', is 'cow'; 4 samples as before, with other names, labels or contents",
    ),
    "one more class": (
        images("cat/1", "cow/1", "dog/1", classes=("cat", "cow", "dog")),
        r"2 classes then, 3 now; class 1 was 'dog', is 'cow'; 4 samples then, 3 now",
    ),
    "more images": (MORE, "4 samples then, 5 now"),
    "labels of a list": (replace(FOUR, labels=np.array([0, 1, 1, 1], np.int64)), "4 samples as before, with other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_is_refused_by_name_on_every_rank(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    data, said = CHANGES[change]
    for error in resume(monkeypatch, [data] * 2, found(OF_FOUR)):
        assert isinstance(error, DataError)
        assert f"the training data is not that of the checkpoint: {said}" in str(error)
        assert "--accept_changed_data" in str(error)


def test_accepted_data_is_said_with_what_happens_in_the_middle_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = images("cat/1", "dog/1")
    for result in resume(monkeypatch, [fewer] * 2, found(OF_FOUR, consumed=3), accepts=True):
        assert not isinstance(result, FleetTrainError)
        (note,), at = result
        assert "2 now; accepted: the rest of epoch 1 then follows the new order after its first 3" in note
        assert at.consumed_samples == 2  # the epoch is over
    told = resume(monkeypatch, [MORE] * 2, found(OF_FOUR), accepts=True)
    assert all("accepted: training goes on with the new data" in result[0][0] for result in told)  # type: ignore[index]


def test_what_is_not_known_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    ((notes, _),) = resume(monkeypatch, [FOUR], found(None))  # type: ignore[misc]
    assert "does not say what it was trained on" in notes[0]

    def without(_: int) -> list[str]:
        data = RunData(object())
        assert data.record(Position(), [None]) is None
        return data.resume(found(OF_FOUR), Position(), False)

    assert "no data_identity()" in on_ranks(monkeypatch, 1, without)[0][0]


def test_a_loader_of_ones_own_may_describe_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def data(digest: str) -> RunData:
        return RunData(SimpleNamespace(data_identity=lambda: DataIdentity(7, digest, ("a",))))

    def work(_: int) -> Any:
        saved = data("x").record(Position(), [None])
        assert data("x").resume(found(saved), Position(), False) == []
        return data("y").resume(found(saved), Position(), False)

    assert "7 samples as before" in str(on_ranks(monkeypatch, 1, work)[0])


@pytest.mark.parametrize("seed", range(4))
def test_last_bits_of_arrays_do_not_accuse_another_processor(seed: int) -> None:
    values = np.random.default_rng(seed)
    features = values.normal(0.0, 10.0 ** values.integers(-4, 5), (300, 50)).astype(np.float32)
    features[values.random(features.shape) < 0.3] = 0.0
    jitter = features.std() * values.uniform(-1e-7, 1e-7, features.shape)
    here = ArrayDataset("here", features, np.zeros(300, np.int64), 2)
    there = replace(here, features=(features + jitter).astype(np.float32))
    assert (there.features != here.features).mean() > 0.2
    assert there.fingerprint() == here.fingerprint()


class Machines:
    """Jobs whose machines have lists of their own, of which some take part, each with a number of ranks."""

    BATCH = 2

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], policy: str = "truncate") -> None:
        self._monkeypatch, self._policy = monkeypatch, policy
        self._data = {}
        for name, size in sizes.items():
            features = np.random.default_rng(ord(name)).random((size, 1), np.float32)
            self._data[name] = ArrayDataset(name, features, np.zeros(size, np.int64), 2)
        self.taken: dict[str, list[int]] = {name: [] for name in sizes}
        self.notes: list[str] = []
        self.saved: StoredCheckpoint | None = None
        self._next: StoredCheckpoint | None = None

    def job(self, ranks: str, steps: int) -> list[Any]:
        """``ranks``: the machine of each; trains that many steps of the epoch and saves. Steps that were left."""

        def work(rank: int) -> int:
            name, world = ranks[rank], len(ranks)
            data, here = self._data[name], [i for i, other in enumerate(ranks) if other == name]
            sampler = OwnDataSampler(
                data.num_samples, self.BATCH, here.index(rank), len(here), total_ranks=world, policy=self._policy
            )
            agreed = sampler.agree(position.fleet.gather(sampler.proposed_steps))
            run_data, at = RunData(BatchLoader(data, sampler)), Position()
            if self.saved is not None:
                at.consumed_samples = self.saved.state.consumed_samples
                self.notes = run_data.resume(self.saved, at, False)
            sampler.set_epoch(0, at.consumed_samples)
            left = len(sampler)
            for step in range(min(steps, left)):
                self.taken[name] += sampler.batch(step).tolist()
            at.consumed_samples = sampler.consumed_after(min(steps, left))
            record = run_data.record(at, position.fleet.gather(run_data.done(at)))
            sampler.set_epoch(1)
            assert len(sampler) == agreed, "the next epoch is a whole one"
            if rank == 0:
                self._next = found(record, world, at.consumed_samples)
            return left

        told = on_ranks(self._monkeypatch, len(ranks), work)
        self.saved = self._next
        return told


def test_a_lost_machine_leaves_the_others_their_samples_and_none_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, {"a": 60, "b": 60, "c": 60})
    assert machines.job("abc", 14) == [30, 30, 30]
    assert machines.job("bc", 99) == [16, 16]
    assert [Counter(machines.taken[name]) for name in "bc"] == [Counter(range(60))] * 2


def test_a_returned_machine_continues_where_it_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, {"a": 60, "b": 60, "c": 60}, policy="pad")
    machines.job("abc", 14)
    machines.job("bc", 5)
    machines.job("bc", 1)  # the lost machine's place outlives a further restart
    assert machines.job("bca", 99) == [16] * 3
    assert Counter(machines.taken["a"]) == Counter(range(60))
    assert set(machines.taken["b"]) == set(range(60))
    assert len(machines.taken["b"]) == 72  # "pad": it starts its samples again


@pytest.mark.parametrize("then", ["abbc", "cab", "ab", "bb"])
def test_each_machine_continues_its_list_with_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    machines = Machines(monkeypatch, {"a": 40, "b": 80, "c": 60})
    machines.job("abbc", 7)
    machines.job(then, 99)
    assert all(count == 1 for name in "abc" for count in Counter(machines.taken[name]).values())
    smallest = {"abbc": ("a", 40), "cab": ("a", 40), "ab": ("a", 40), "bb": ("b", 80)}[then]
    assert len(machines.taken[smallest[0]]) == smallest[1]


def test_other_lists_on_as_many_ranks_are_refused_and_other_machines_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, {"a": 40, "b": 40, "c": 48})
    machines.job("ab", 3)
    first = machines.saved
    errors = machines.job("ac", 3)
    said = "on rank 1 (127.0.0.3:6170) is not that of the checkpoint: 40 samples then, 48"
    assert all(said in str(error) for error in errors)
    machines.saved = first
    assert machines.job("abc", 99) == [17] * 3  # a machine that joins begins its list
    assert machines.notes == ["note: lists of 48 samples are read that the checkpoint's data did not have"]
    assert Counter(machines.taken["a"]) == Counter(range(40))


def test_a_place_in_an_epoch_that_cannot_be_continued_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(monkeypatch, {"a": 40, "b": 40, "c": 40})
    machines.saved = found(None, world_size=3, consumed=12)
    said = "is in the middle of an epoch of 3 ranks with data of their own"
    assert all(said in str(error) for error in machines.job("ab", 1))
    machines.saved = None
    machines.job("a", 3)
    data, saved = machines._data["a"], machines.saved
    (error,) = resume(monkeypatch, [data], saved)
    assert "in the middle of an epoch with --shard_by folder, now --shard_by sample is given" in str(error)


def test_arrays_are_known_by_their_shape_labels_and_contents() -> None:
    def arrays(count: int = 300, value: float = 0.0, label: int = 0) -> ArrayDataset:
        features, labels = np.zeros((count, 4), np.float32), np.zeros(count, np.int64)
        features[0], labels[-1:] = value, label
        return ArrayDataset("zeros", features, labels, 2)

    assert arrays().fingerprint() == arrays().fingerprint()
    assert len({one.fingerprint() for one in (arrays(), arrays(301), arrays(value=1.0), arrays(label=1))}) == 4
    ArrayDataset("none", np.zeros((0, 4), np.float32), np.zeros(0, np.int64), 2).fingerprint()


def test_other_versions_are_one_line() -> None:
    assert other_versions({}) == other_versions(versions()) == []
    assert other_versions(versions() | {"fleet_train": "0.1\x1b", "python": "3.0"}) == [
        f"note: saved with other versions: fleet_train 0.1\\x1b, now {__version__}"
    ]


MERGE_3 = Profile(accumulate_steps=3)
COUNTED = {"batches": 15, "pending_batches": 0, "accumulate_steps": 3}


def counted(step: int, **more: Any) -> TrainState:
    return TrainState(1, step, 10, 2, {}, {}, {}, {}, consumed_samples=8, **more)


@pytest.fixture
def merging_three(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("profile", MERGE_3), ("worker_num", 2), ("worker_index", 0)):
        monkeypatch.setattr(fleet, name, lambda value=value: value)


@pytest.mark.usefixtures("merging_three")
@pytest.mark.parametrize(
    ("state", "per_epoch", "place"),
    [
        (counted(4, batches=13, pending_batches=1, accumulate_steps=3), 10, (4, 13, 1, 4)),
        (counted(4, pending_batches=1, accumulate_steps=3), 10, (4, 13, 1, 4)),  # of a loop that counts steps only
        (counted(5, **COUNTED), 20, (10, 30, 0, 5)),  # other batches per epoch keep the share of the epoch
        (counted(5, **COUNTED, updates=70), 20, (10, 30, 0, 70)),
    ],
)
def test_a_checkpoints_counts_lead_to_its_place(state: TrainState, per_epoch: int, place: tuple[int, ...]) -> None:
    step, batches, pending, updates = place
    found = resumed(state, per_epoch)[0]
    assert found == Position(1, step, 8, batches=batches, pending=pending, updates=updates)


@pytest.mark.usefixtures("merging_three")
def test_parts_of_an_update_that_is_another_now_are_refused() -> None:
    said = r"1 of the 4 micro-batches of an update, and accumulate_steps is now 3"
    with pytest.raises(CheckpointError, match=said):
        resumed(counted(3, batches=13, pending_batches=1, accumulate_steps=4), 10)
