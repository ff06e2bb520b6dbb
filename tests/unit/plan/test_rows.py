"""Tables whose rows are sent, in plans: their buckets, bytes, prices, explanations and simulations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_train.cluster import Cluster
from fleet_train.plan import CommPlan, TensorSpec, build_plan, explain
from fleet_train.plan.build import tables_by_rows, with_rows
from fleet_train.plan.choose import ChoiceConditions, choose
from fleet_train.plan.price import PAPER, Compute, predict
from fleet_train.plan.simulate import Local, SimulatedJob
from fleet_train.plan.trial import try_out
from fleet_train.profile import Profile

PAIR = Cluster.imagined(2, 1)
LARGE = TensorSpec("large", (100_000, 8), "float32", rows=500)
SMALL = TensorSpec("small", (300, 4), "float32", rows=20)
DENSE = [TensorSpec(f"w{i}", (64, 32), "float32") for i in range(3)]


def plan_of(*tables: TensorSpec, cluster: Cluster = PAIR, **knobs: Any) -> CommPlan:
    return build_plan([DENSE[0], *tables, *DENSE[1:]], cluster, Profile(**knobs))


def members(plan: CommPlan) -> list[tuple[str, list[str]]]:
    return [(bucket.algorithm, [one.name for one in bucket.gradients]) for bucket in plan.buckets]


def test_tables_have_a_bucket_of_their_own_where_they_are_ready() -> None:
    whole = [("allreduce", ["w0", "large", "small", "w1", "w2"])]
    plan = plan_of(LARGE, SMALL, sparse_embeddings=True, fuse_grad_size_in_MB=16.0, last_comm_group_size_MB=16.0)
    assert members(plan) == [("rows", ["large", "small"]), ("allreduce", ["w0", "w1", "w2"])]
    off = plan_of(LARGE, SMALL, sparse_embeddings=False, fuse_grad_size_in_MB=16.0, last_comm_group_size_MB=16.0)
    assert members(off) == whole
    assert all(one.rows == 0 for bucket in off.buckets for one in bucket.gradients)
    assert off.digest != plan.digest
    alone = plan_of(LARGE, SMALL, sparse_embeddings=True, fuse_all_reduce_ops=False)
    assert members(alone)[1:3] == [("rows", ["large"]), ("rows", ["small"])]
    assert members(build_plan([LARGE], PAIR, Profile())) == [("rows", ["large"])]


def test_the_bytes_are_those_of_counts_indices_and_values() -> None:
    plan = build_plan([LARGE, SMALL], PAIR, Profile(sparse_embeddings=True))
    nbytes = 2 * 8 + 500 * (4 + 32) + 20 * (4 + 16)
    assert plan.sent_by_rank() == (nbytes, nbytes)
    four = build_plan([LARGE, SMALL], Cluster.imagined(2, 2), Profile(sparse_embeddings=True, compression="bf16"))
    assert four.sent_by_rank() == (3 * (2 * 8 + 500 * (4 + 16) + 20 * (4 + 8)),) * 4
    groups = Profile(sparse_embeddings=True, use_hierarchical_allreduce=True)
    assert build_plan([LARGE, SMALL], Cluster.imagined(2, 2), groups).sent_by_rank() == (3 * nbytes,) * 4
    assert with_rows(plan, Profile(sparse_embeddings=True), 100).sent_by_rank()[0] == 16 + 100 * 36 + 100 * 20
    more = with_rows(plan, Profile(), 10**6)
    assert [one.rows for one in more.buckets[0].gradients] == [100_000, 300]
    dense = plan_of(SMALL, sparse_embeddings=False)
    assert with_rows(dense, Profile(sparse_embeddings=False), 3) == dense


def test_a_table_that_would_not_pay_alone_goes_along_unless_a_step_touches_all_of_it() -> None:
    touched = replace(SMALL, name="touched", rows=300)
    assert tables_by_rows([SMALL, touched], PAIR, Profile()) == set()
    assert tables_by_rows([SMALL, LARGE, touched], PAIR, Profile()) == {"small", "large"}
    assert tables_by_rows([SMALL, LARGE], PAIR, Profile(fuse_all_reduce_ops=False)) == {"large"}
    plan = build_plan([LARGE, SMALL, DENSE[0]], PAIR, Profile(fuse_grad_size_in_MB=16.0))
    assert members(plan) == [("rows", ["large", "small"]), ("allreduce", ["w0"])]


@pytest.mark.parametrize(
    ("table", "cluster", "knobs", "sent"),
    [
        (LARGE, PAIR, {}, True),
        (SMALL, PAIR, {}, False),
        (SMALL, PAIR, {"sparse_embeddings": True}, True),
        (LARGE, PAIR, {"sparse_embeddings": False}, False),
        (SMALL, PAIR, {"link_gigabits": 0.001, "link_latency_ms": 0.1}, True),
        (LARGE, PAIR, {"link_gigabits": 100.0, "link_latency_ms": 0.1}, False),
        (LARGE, PAIR, {"compression": "bf16"}, True),
        *((LARGE, PAIR, {"compression": name}, False) for name in ("int8", "int4", "powersgd")),
        (LARGE, PAIR, {"sharding": True}, True),
        (replace(LARGE, is_whole=True), PAIR, {"sharding": True}, False),
        (TensorSpec("w", (100_000, 8), "float32"), PAIR, {"sparse_embeddings": True}, False),
    ],
)
def test_rows_are_sent_where_they_can_pay(
    table: TensorSpec, cluster: Cluster, knobs: dict[str, Any], sent: bool
) -> None:
    assert tables_by_rows([table], cluster, Profile(**knobs)) == ({table.name} if sent else set())
    assert ("rows" in [kind for kind, _ in members(plan_of(table, cluster=cluster, **knobs))]) == sent


def test_a_price_counts_rows_and_not_the_table() -> None:
    computing = Compute(0.001, 0.002)
    rows, whole = (
        predict(plan_of(LARGE, sparse_embeddings=choice), PAIR, PAPER, computing).step for choice in (True, False)
    )
    # 3.2 MB at 1 Gb/s.
    assert whole > rows + 0.02
    assert rows < 0.008
    # A table that is not sent is no reason to cut.
    chosen = choose(Profile(), [*DENSE, LARGE], PAIR, ChoiceConditions()).profile
    assert chosen.origin("fuse_grad_size_in_MB").endswith("too small to cut")


def test_a_plan_says_what_it_counts_with_and_between_what_bytes_a_step_can_be() -> None:
    text = explain(plan_of(LARGE, SMALL, sparse_embeddings=True, compression="bf16"))
    assert "rows, bf16" in text
    assert "rows of 'large' [100000, 8]: planned with 500 of a rank" in text
    assert "a step with more than 80,000 sends the table" in text
    assert "of these for embeddings: 0.010 MB as planned, from 0 to 1.528 MB by what is touched" in text
    assert "sparse_embeddings: the touched rows of 2 embeddings; of others, whole tables" in text
    assert "embeddings" not in explain(plan_of(LARGE, sparse_embeddings=False))


@pytest.mark.parametrize("knobs", [{}, {"accumulate_steps": 2}, {"compression": "bf16"}], ids=str)
def test_a_simulation_touches_as_many_rows_as_planned(knobs: dict[str, Any]) -> None:
    plan = plan_of(LARGE, SMALL, cluster=Cluster.imagined(3, 1), sparse_embeddings=True, **knobs)
    trial = try_out(plan, Profile(sparse_embeddings=True, **knobs), updates=2)
    assert trial.holds
    assert trial.gradient_deviation is not None
    assert trial.gradient_deviation < (1e-2 if "compression" in knobs else 1e-6)
    # Micro-batches touch other rows, but for a few.
    planned = max(plan.sent_by_rank())
    assert 0.97 * planned < max(trial.sent_bytes_per_step) <= planned


def test_a_simulated_step_with_many_rows_sends_the_table() -> None:
    profile = Profile(sparse_embeddings=True)
    job = SimulatedJob(build_plan([SMALL], PAIR, profile), profile, {"small": np.zeros((300, 4), np.float32)})
    sent = []
    for rows in (10, 240, 241, 300):
        gradient = np.zeros((300, 4), np.float32)
        gradient[:rows] = 1
        step = job.step(lambda rank, _, given=gradient: Local({"small": given * (1 + rank)}))
        np.testing.assert_allclose(step.gradients["small"], 1.5 * gradient)
        sent.append(step.sent)
    assert sent == [(8.0 + 10 * 20,) * 2, (8.0 + 240 * 20,) * 2, (8.0 + 4800,) * 2, (8.0 + 4800,) * 2]
