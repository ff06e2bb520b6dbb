"""Rows of embeddings on ranks played in turn, against the reference in numpy, which adds whole gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives.methods.dense import FlatAllreduce
from fleet_train.collectives.methods.registry import Parts, read_state, write_state
from fleet_train.collectives.methods.rows import (
    HostRows,
    Lookups,
    RowChoice,
    StreamRows,
    TableRows,
    added,
    filled_up,
    touched,
)
from fleet_train.errors import ConversionError
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.simulate_methods import RowsSimulation as Reference
from fleet_train.plan.simulate_methods import SimulatedParts, SimulatedWire
from fleet_train.profile import Profile
from fleet_train.profile.methods.base import Bucket
from fleet_train.profile.methods.rows import most_rows
from tests.unit.collectives.played import in_turn, ranks_of

SHAPES = {"a": (300, 6), "b": (41, 1), "c": (8, 3)}
TABLES = [TensorSpec(name, shape, "float32", rows=shape[0]) for name, shape in SHAPES.items()]
LOOKUPS = {"a": Lookups((-1, 7)), "b": Lookups((0,)), "c": Lookups((-1,))}
Brought = list[list[np.ndarray]]


def brought(rank: int, seed: int, positions: int = 30) -> tuple[list[Any], list[np.ndarray]]:
    """The operands of a rank's launch operator, and the whole gradients: what each lookup gives, in float64."""
    random = np.random.default_rng([seed, rank])
    operands, dense = [], []
    for name, (height, width) in SHAPES.items():
        total = np.zeros((height, width))
        operands.append(paddle.zeros([height, width]))
        for padding in LOOKUPS[name].paddings:
            ids = np.minimum(random.zipf(1.5, (positions, 2)) + padding, height - 1)
            if rank == 1 and name == "a":
                ids[:] = 7  # nothing but padding in one lookup
            gradient = random.standard_normal((positions, 2, width)).astype("float32")
            kept = ids != padding
            np.add.at(total, ids[kept], gradient[kept])
            operands += [paddle.to_tensor(ids), paddle.to_tensor(gradient)]
        dense.append(total)
    return operands, dense


def parts_of(size: int, on_host: bool, rows_only: bool = False, **knobs: Any) -> tuple[list[Parts], Bucket]:
    profile = Profile(**{"sparse_embeddings": True, "fuse_grad_size_in_MB": 64.0, **knobs})
    plan = build_plan(TABLES, Cluster.imagined(size, 1), profile)
    (bucket,) = plan.buckets
    assert (bucket.algorithm, [one.name for one in bucket.gradients]) == ("rows", list(SHAPES))
    jobs = ranks_of(size, on_host)
    lookups = {name: Lookups(one.paddings, rows_only) for name, one in LOOKUPS.items()}
    allreduces = [FlatAllreduce(job.communicators(1)[0]) for job in jobs]
    made = [
        Parts(bucket, job, plan, profile, allreduce, lookups=lookups)  # type: ignore[arg-type]
        for job, allreduce in zip(jobs, allreduces, strict=True)
    ]
    return made, bucket


def step(methods: list[Any], operands: list[list[Any]]) -> tuple[list[list[np.ndarray]], Any]:
    found, sent = in_turn([one.average(own) for one, own in zip(methods, operands, strict=True)])
    return [[value.numpy() for value in rank] for rank in found], sent


@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_rank_gets_the_bits_of_the_reference_and_sends_its_bytes(size: int, compression: str, seed: int) -> None:
    parts, bucket = parts_of(size, True, compression=compression)
    methods = [one.make() for one in parts]
    assert all(isinstance(one, HostRows) for one in methods)
    own = [brought(rank, seed) for rank in range(size)]
    found, sent = step(methods, [operands for operands, _ in own])
    local = [[one.astype("float32") for one in (add_alone(operands))] for operands, _ in own]
    for mine, (_, exact) in zip(local, own, strict=True):
        for one, other in zip(mine, exact, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
    plan = parts[0].plan
    wire = SimulatedWire(plan)
    reference = Reference(SimulatedParts(bucket, plan, parts[0].profile, wire))
    expected = reference.step(local)
    # The allreduce of a whole table is played in another precision than the reference's.
    whole = [one.kind for one in sent].count("all_reduce")
    for rank in found:
        for table, one, other in zip(bucket.gradients, rank, expected, strict=True):
            if whole and table.name != "a":
                np.testing.assert_allclose(one, other, atol=0.1 if compression == "bf16" else 1e-6)
            else:
                np.testing.assert_array_equal(one, other)
    for spec in reference.sent(local):
        wire.count(spec)
    assert [method.sent_bytes for method in methods] == list(wire.sent)
    assert [one.kind for one in sent][:2] == ["all_gather", "all_gather"]
    assert sent[0].dtype == "int64"


def add_alone(operands: list[Any]) -> list[np.ndarray]:
    """One rank's gradients by Paddle's operator, as a program makes them where there is one lookup."""
    found, start = [], 0
    for name, lookups in LOOKUPS.items():
        every = operands[start + 1 : start + lookups.operands]
        width = SHAPES[name][1]
        ids = np.concatenate([one.numpy().ravel() for one in every[::2]])
        rows = np.concatenate([one.numpy().reshape(-1, width) for one in every[1::2]])
        sizes = [one.size for one in every[::2]]
        padding = np.repeat(lookups.paddings, sizes)
        kept = ids != padding
        made: Any = paddle._C_ops.embedding_grad
        gradient = made(paddle.to_tensor(ids[kept]), operands[start], paddle.to_tensor(rows[kept]), -1, False)
        found.append(gradient.numpy())
        start += lookups.operands
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_streams_get_the_sum_of_all_positions_without_reading_one(size: int) -> None:
    parts, bucket = parts_of(size, False)
    methods = [one.make() for one in parts]
    assert all(isinstance(one, StreamRows) for one in methods)
    for one in parts:
        one.job.all_gather = lambda *_: {key: [84, 44, 44] for key in range(size)}  # type: ignore
    for seed in range(2):
        own = [brought(rank, seed, positions=20 - 2 * seed) for rank in range(size)]
        found, sent = step(methods, [operands for operands, _ in own])
        for position in range(len(bucket.gradients)):
            mean = np.mean([exact[position] for _, exact in own], axis=0)
            for rank in found:
                np.testing.assert_allclose(rank[position], mean, atol=2e-6)
                np.testing.assert_array_equal(rank[position], found[0][position])
    assert "all_reduce" in [one.kind for one in sent]  # c, whose positions are more than its rows
    with pytest.raises(ConversionError, match="this batch looks up 120 rows, the largest first batch of a rank 84"):
        next(methods[0].average(brought(0, 0)[0]))


def test_streams_count_the_positions_of_a_whole_update_behind_a_sum_that_was_loaded() -> None:
    """A save in the middle of the first update holds a sum of rows; later updates have all their positions."""
    parts, bucket = parts_of(2, False, accumulate_steps=4)
    own, told = [brought(rank, 0) for rank in range(2)], []
    for one in parts:
        one.job.all_gather = lambda _, found: told.append(found) or {0: found, 1: found}  # type: ignore
    methods = []
    for one, (operands, _) in zip(parts, own, strict=True):
        saving = one.make()
        for _ in range(3):
            saving.idle(operands)  # type: ignore[attr-defined]
        methods.append(one.make())
        methods[-1].load_state(saving.state())
    for _ in range(2):
        found, _ = step(methods, [operands for operands, _ in own])
        for position in range(len(bucket.gradients)):
            mean = np.mean([exact[position] for _, exact in own], axis=0)
            np.testing.assert_allclose(found[0][position], mean, atol=4e-6)
        for method, (operands, _) in zip(methods, own, strict=True):
            for _ in range(3):
                method.idle(operands)  # type: ignore[attr-defined]
    assert told == [[480, 240, 240]] * 2


def test_rows_only_are_as_many_as_the_table_modulo_8_and_the_rest_is_zero() -> None:
    random = np.random.default_rng(1)
    for height in (*range(1, 20), 301):
        for number in range(min(height, 12) + 1):
            ids = np.sort(random.choice(height, number, replace=False))
            rows = filled_up(TableRows(ids, np.ones((number, 2), np.float32)), height)
            assert len(rows.ids) % 8 == height % 8
            assert 0 < len(rows.ids) <= height
            assert set(rows.ids[:number]) == set(ids)
            assert not set(rows.ids[number:]) & set(ids)
            np.testing.assert_array_equal(rows.values[number:], 0)


@pytest.mark.parametrize("height", [5000, 5003, 17, 8, 4])
@pytest.mark.parametrize("width", [1, 3, 8, 17])
def test_an_update_of_rows_has_the_bits_of_the_update_of_the_table(height: int, width: int) -> None:
    ops: Any = paddle._C_ops
    random = np.random.default_rng([height, width])
    rate = paddle.to_tensor([0.0371])
    for number in (0, 1, 3, min(height, 900), height):
        start = random.standard_normal((height, width)).astype("float32")
        ids = np.sort(random.choice(height, number, replace=False))
        values = random.standard_normal((number, width)).astype("float32")
        gradient = np.zeros_like(start)
        gradient[ids] = values
        whole, part = paddle.to_tensor(start), paddle.to_tensor(start)
        ops.sgd_(whole, rate, paddle.to_tensor(gradient), None, False)
        rows = filled_up(TableRows(ids, values), height)
        moved = ops.gather(part, paddle.to_tensor(rows.ids), 0)
        ops.sgd_(moved, rate, paddle.to_tensor(rows.values), None, False)
        ops.scatter_(part, paddle.to_tensor(rows.ids), moved, True)
        np.testing.assert_array_equal(part.numpy(), whole.numpy())


def test_touched_rows_are_each_there_once_with_padding_left_out() -> None:
    ids, other = np.array([4, 2, 4, 0]), np.array([[9, 2]], "int32")
    values = np.arange(12, dtype="float32").reshape(4, 3)
    lookups = [
        (paddle.to_tensor(ids), paddle.to_tensor(values), 0),
        (paddle.to_tensor(other.ravel()), paddle.to_tensor(values[:2]), -1),
    ]
    found = touched(lookups, 3)
    assert found.ids.tolist() == [2, 4, 9]
    np.testing.assert_array_equal(found.values, [values[1] + values[1], values[0] + values[2], values[0]])
    assert touched([(paddle.to_tensor(ids[3:]), paddle.to_tensor(values[3:]), 0)], 3).values.shape == (0, 3)


def test_sums_are_taken_in_the_order_of_the_parts() -> None:
    large, one = np.float32(2**24), np.float32(1)
    parts = [TableRows(np.array([3]), np.array([[value]])) for value in (one, one, large)]
    assert added(parts).values.item() == 2**24 + 2
    assert added(parts[::-1]).values.item() == 2**24
    assert added(parts[:1]) is parts[0]


def test_micro_batches_are_kept_saved_and_averaged() -> None:
    parts, bucket = parts_of(2, True, accumulate_steps=3)
    methods: list[Any] = [one.make() for one in parts]
    own = [[brought(rank, seed) for seed in range(3)] for rank in range(2)]
    for rank, method in enumerate(methods):
        for operands, _ in own[rank][:2]:
            assert [tuple(one.shape) for one in method.idle(operands)] == list(SHAPES.values())
    loaded: list[Any] = [one.make() for one in parts]
    for method, other in zip(methods, loaded, strict=True):
        alike, kept = read_state([(bucket, method)])
        assert (alike, sorted(kept)) == ({}, ["rows/a.merged", "rows/b.merged", "rows/c.merged"])
        assert write_state([(bucket, other)], kept, paddle.CPUPlace()) == []
    last = [own[rank][2][0] for rank in range(2)]
    found, again = step(methods, last)[0], step(loaded, last)[0]
    for position in range(len(SHAPES)):
        mean = np.mean([exact[position] for rank in own for _, exact in rank], axis=0)
        for rank, other in zip(found, again, strict=True):
            np.testing.assert_allclose(rank[position], mean, atol=2e-6)
            np.testing.assert_array_equal(rank[position], other[position])
    assert all(not value.numpy().any() for value in methods[0].state().values()), "an update empties what was kept"


def test_what_is_not_sent_is_a_ranks_own_gradient() -> None:
    for on_host in (True, False):
        parts, _ = parts_of(2, on_host)
        operands, exact = brought(0, 3)
        for one, other in zip(parts[0].make().local(operands), exact, strict=True):  # type: ignore[attr-defined]
            np.testing.assert_allclose(one.numpy(), other, atol=1e-5)


class Told:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        monkeypatch.setattr("fleet_train.collectives.methods.rows.log_once", lambda lines, _: self.lines.extend(lines))


def test_auto_sends_the_table_after_several_steps_and_rows_again_when_there_are_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, choice = Told(monkeypatch), RowChoice(TABLES[0], 100, True, 0)
    for rows, sends in ((100, True), (101, False), (101, False), (101, False), (99, True), *[(101, False)] * 4):
        assert choice.begin_step()
        assert choice.sends_rows(rows) == sends
    assert len(told.lines) == 1
    counted = [step for step in range(10, 200) if choice.begin_step() and not choice.sends_rows(51)]
    assert counted == [64, 128, 192]
    steps = 200
    while not choice.begin_step():
        steps += 1
    assert (steps, choice.sends_rows(50)) == (256, True)
    assert choice.begin_step()
    assert choice.sends_rows(99)
    assert len(told.lines) == 2


def test_asked_for_every_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    told, choice = Told(monkeypatch), RowChoice(TABLES[0], 100, False, 0)
    for rows in [101] * 50 + [100]:
        assert choice.begin_step()
        assert choice.sends_rows(rows) == (rows == 100)
    assert told.lines == []


@pytest.mark.parametrize("size", [2, 3, 8])
def test_no_more_rows_are_sent_than_pay(size: int) -> None:
    _, bucket = parts_of(size, True)
    table = bucket.gradients[0]
    most = most_rows(table, bucket, size)
    gathered = (size - 1) * (4 + 4 * 6)
    whole = 2 * (size - 1) / size * 4 * table.elements
    assert most * gathered <= whole
    assert most == table.shape[0] or (most + 1) * gathered > whole
