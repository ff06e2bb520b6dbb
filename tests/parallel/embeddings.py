"""Run as several ranks: networks with embeddings through the facade, beside one process with the joint batch.

The first argument names cases, as JSON.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import paddle
from paddle import nn
from paddle.nn import functional as F

from fleet_train import fleet, role_maker
from fleet_train.convert.passes.one_card import for_one_card
from fleet_train.convert.planning import summed_over_uses
from fleet_train.profile import Profile
from tests.support.worker import digest, report

ROWS, WIDTH, BATCH = 501, 6, 12
Feed = dict[str, Any]


def one_table(ids: Any, others: Any) -> Any:
    del others
    return nn.Embedding(ROWS, WIDTH, sparse=True)(ids).sum(1)


def padded(ids: Any, others: Any) -> Any:
    del others
    return nn.Embedding(ROWS, WIDTH, padding_idx=0)(ids).sum(1)


def several_uses(ids: Any, others: Any) -> Any:
    """One layer three times, and its name in a second layer, with and without a padding."""
    layer, name = nn.Embedding(ROWS, WIDTH, padding_idx=ROWS - 1), paddle.ParamAttr(name="shared")
    once, again = (nn.Embedding(ROWS, WIDTH, padding_idx=padding, weight_attr=name) for padding in (None, 0))
    own = layer(ids).sum(1) + layer(others).mean(1) * layer(ids[:, :2]).sum(1)
    return own + once(others).sum(1) * again(ids).sum(1)


def two_tables(ids: Any, others: Any) -> Any:
    """As of DeepFM: of a number, and of a vector for each feature; a slower rate for one of them."""
    wide = nn.Embedding(ROWS, 1, weight_attr=paddle.ParamAttr(learning_rate=0.5))(ids).sum(1)
    return nn.Embedding(ROWS, WIDTH)(ids).sum(1) * wide + nn.Embedding(97, WIDTH)(others % 97).sum(1)


def small(ids: Any, others: Any) -> Any:
    """A step touches more rows than pay."""
    return nn.Embedding(7, WIDTH, padding_idx=3)(ids % 7).sum(1) + nn.Embedding(16, WIDTH)(others % 16).sum(1)


def decayed(ids: Any, others: Any) -> Any:
    """A decay of its own, which moves all rows of the first table."""
    decay = paddle.ParamAttr(regularizer=paddle.regularizer.L2Decay(0.1))
    return nn.Embedding(ROWS, WIDTH, weight_attr=decay)(ids).sum(1) + nn.Embedding(ROWS, WIDTH)(others).sum(1)


def mixed(ids: Any, others: Any) -> Any:
    """The first table is also multiplied, which makes a gradient in all its rows."""
    tied = nn.Embedding(ROWS, WIDTH)
    return tied(ids).sum(1) + nn.Embedding(ROWS, WIDTH)(others).sum(1) + tied.weight.mean(0)


def sgd() -> Any:
    return paddle.optimizer.SGD(paddle.optimizer.lr.StepDecay(0.5, 2))


def momentum() -> Any:
    return paddle.optimizer.Momentum(0.2, 0.9, weight_decay=1e-3)


def adam() -> Any:
    return paddle.optimizer.Adam(0.02, epsilon=1e-3, lazy_mode=True)


def lamb() -> Any:
    return paddle.optimizer.Lamb(0.02, epsilon=1e-3)


def clipped() -> Any:
    return paddle.optimizer.SGD(0.5, grad_clip=nn.ClipGradByGlobalNorm(0.05))


def batch(rank: int, step: int) -> Feed:
    """Repeated indices, rows of padding, the ends of the table; each rank touches another number of rows."""
    random = np.random.default_rng([rank, step])
    ids = np.minimum(random.zipf(1.3, (BATCH, 5)), ROWS) - 1
    ids[: 2 * rank] = ids[0, 0]
    ids[-2:] = 0
    ids[random.integers(BATCH), 1] = ROWS - 1
    others = random.integers(0, 40 + 100 * rank, (BATCH, 3)) % ROWS
    label = random.standard_normal((BATCH, 1)).astype("float32")
    return {"ids": ids.astype("int64"), "others": others.astype("int32"), "label": label}


def first_many(rank: int, step: int) -> Feed:
    """In the first steps almost all rows, then few."""
    feed = batch(rank, step)
    if step < 6:
        feed["ids"] = np.random.default_rng([rank, step]).permutation(ROWS)[:500].reshape(100, 5)
        feed["others"], feed["label"] = np.zeros((100, 3), "int32"), np.ones((100, 1), "float32")
    return feed


def no_rows_on_some(rank: int, step: int) -> Feed:
    """On rank 0 in the first step, and on all ranks in the second one, nothing but the padding."""
    feed = batch(rank, step)
    if step == 1 or (step, rank) == (0, 0):
        feed["ids"][:] = 0
    return feed


@dataclass(frozen=True)
class Case:
    network: Callable[[Any, Any], Any] = one_table
    optimizer: Callable[[], Any] = sgd
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 4
    beside_dense: bool = False
    """Compared with the same ranks that send whole tables, not with one process."""
    batch: Callable[[int, int], Feed] = batch


ON = {"sparse_embeddings": True}
SLOW = {"sparse_embeddings": "auto", "link_gigabits": 0.01, "link_latency_ms": 0.1}
"""A link on which the rows of these small tables pay."""
LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 2, "local_sgd_steps": 2}
EXACT = {
    "sgd": Case(),
    "momentum": Case(optimizer=momentum),
    "adam": Case(optimizer=adam),
    "clipped": Case(optimizer=clipped),
    "padded": Case(padded),
    "padded, adam": Case(padded, adam),
    "nothing but padding": Case(padded, batch=no_rows_on_some),
    "nothing but padding, adam": Case(padded, adam, batch=no_rows_on_some),
    "several uses": Case(several_uses),
    "several uses, momentum": Case(several_uses, momentum),
    "two tables": Case(two_tables),
    "a table that is multiplied, too": Case(mixed),
    "a table with a decay": Case(decayed),
    "small tables, whole": Case(small, lambda: paddle.optimizer.SGD(0.05)),
    "small tables, whole, adam": Case(small, adam),
    "merge": Case(two_tables, momentum, {"accumulate_steps": 2}, steps=6),
    "merge, padded": Case(padded, sgd, {"accumulate_steps": 3}, steps=6, batch=no_rows_on_some),
    "recompute": Case(several_uses, adam, {"recompute_segments": 2}),
    "local groups": Case(two_tables, sgd, {"use_hierarchical_allreduce": True}),
    "one bucket each": Case(two_tables, adam, {"fuse_all_reduce_ops": False, "nccl_comm_num": 2}),
    "each waited for": Case(two_tables, sgd, {"sync_nccl_allreduce": True}),
    "threads": Case(several_uses, sgd, {"num_threads": 4}),
    "auto": Case(two_tables, sgd, SLOW),
    "auto switches": Case(one_table, sgd, SLOW, steps=70, batch=first_many),
    "auto on a fast link": Case(two_tables, sgd, {"sparse_embeddings": "auto"}),
    "sharded": Case(two_tables, adam, {"sharding": True, "fuse_parameter_groups_size": 2}),
    "sharded, merge, clipped": Case(several_uses, clipped, {"sharding": True, "accumulate_steps": 2}),
    "sharded, auto": Case(one_table, momentum, SLOW | {"sharding": True}),
    "sharded, Lamb": Case(two_tables, lamb, {"sharding": True}),
    "off": Case(two_tables, sgd, {"sparse_embeddings": False}),
}
BESIDE_DENSE = {
    "same bits": Case(beside_dense=True),
    "same bits, adam": Case(optimizer=adam, beside_dense=True),
    "same bits, clipped": Case(two_tables, clipped, beside_dense=True),
    "local sgd": Case(two_tables, sgd, LOCAL, steps=7, beside_dense=True),
    "local sgd, adam, merge": Case(two_tables, adam, LOCAL | {"accumulate_steps": 2}, steps=12, beside_dense=True),
    "amp": Case(two_tables, sgd, {"amp_level": "O1", "amp_dtype": "bfloat16"}, beside_dense=True),
    "bf16": Case(two_tables, sgd, {"compression": "bf16"}, beside_dense=True),
}
CASES = EXACT | BESIDE_DENSE


def build(case: Case, wrap: Callable[[Any], Any]) -> tuple[Any, Any, Any, Any]:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        paddle.seed(7)
        ids = paddle.static.data("ids", [None, 5], "int64")
        others = paddle.static.data("others", [None, 3], "int32")
        label = paddle.static.data("label", [None, 1], "float32")
        found = nn.Linear(WIDTH, 1)(F.tanh(nn.Linear(WIDTH, WIDTH)(case.network(ids, others))))
        loss = paddle.mean((found - label) ** 2)
        optimizer = wrap(case.optimizer())
        if isinstance(optimizer, paddle.optimizer.Optimizer):
            # Paddle alone updates a name that is used twice once per use.
            optimizer.apply_gradients(summed_over_uses(optimizer.backward(loss, startup))[0])
        else:
            optimizer.minimize(loss, startup)
    return main, startup, optimizer, loss


def values_of(main: Any, scope: Any) -> dict[str, Any]:
    names = {op.attrs()["parameter_name"] for op in main.global_block().ops if op.name() == "builtin.parameter"}
    return {name: np.array(scope.find_var(name).get_tensor()) for name in sorted(names) if "learning" not in name}


def operators(main: Any) -> list[str]:
    return [operator.name() for operator in main.global_block().ops]


@dataclass
class Ran:
    """A program and its values, behind some steps."""

    main: Any
    optimizer: Any
    scope: Any = field(default_factory=paddle.static.Scope)

    def run(self, feed: Feed) -> None:
        with paddle.static.scope_guard(self.scope):
            paddle.static.Executor(fleet.place()).run(self.main, feed=feed)

    def start_with(self, startup: Any, values: Feed) -> Feed:
        """Run ``startup``, then set ``values``; returns all."""
        with paddle.static.scope_guard(self.scope):
            paddle.static.Executor(fleet.place()).run(startup)
        for name, value in values.items():
            self.scope.find_var(name).get_tensor().set(value, fleet.place())
        return values_of(self.main, self.scope)

    def end_update(self) -> None:
        if hasattr(self.optimizer._learning_rate, "step"):
            self.optimizer._learning_rate.step()


def train(case: Case) -> dict[str, Any]:
    rank, ranks, size = fleet.worker_index(), fleet.worker_num(), case.settings.get("accumulate_steps", 1)
    said = io.StringIO()

    def by_fleet(**more: Any) -> tuple[Any, Any, Any, Any]:
        profile = Profile(**{**ON, **case.settings, **more})
        return build(case, lambda inner: fleet.distributed_optimizer(inner, profile))

    with contextlib.redirect_stderr(said):
        main, startup, optimizer, _ = by_fleet()
        plan = fleet.plan()
        alone = by_fleet(sparse_embeddings=False) if case.beside_dense else build(case, lambda inner: inner)
        ran, beside = Ran(main, optimizer), Ran(alone[0], alone[2])
        start = beside.start_with(alone[1], {})
        ran.start_with(startup, start)
        fleet.communication()
        for step in range(case.steps):
            ran.run(case.batch(rank, step))
            is_update = step % size == size - 1
            if case.beside_dense:
                beside.run(case.batch(rank, step))
            elif is_update:
                shares = [case.batch(r, s) for s in range(step + 1 - size, step + 1) for r in range(ranks)]
                beside.run({name: np.concatenate([share[name] for share in shares]) for name in shares[0]})
            if is_update:
                ran.end_update()
                beside.end_update()
    found, expected = values_of(ran.main, ran.scope), values_of(beside.main, beside.scope)
    assert plan is not None
    buckets = [bucket for bucket in plan.buckets if bucket.algorithm == "rows"]
    return {
        "error": max(float(np.abs(found[name] - expected[name]).max()) for name in expected),
        "moved": min(float(np.abs(start[name] - expected[name]).max()) for name in expected),
        "digest": digest(found),
        "digest beside": digest(expected),
        "plan": plan.digest,
        "rows": [gradient.name for bucket in buckets for gradient in bucket.gradients],
        "operators": operators(main),
        "said": [line for line in said.getvalue().splitlines() if line.startswith("fleet_train: ")],
    }


def resume(folder: str, case: Case, choices: tuple[bool, bool] = (True, True)) -> dict[str, Any]:
    """Saved behind the second of three micro-batches, and loaded into a new program, which goes on."""
    found = []
    for saves, choice in zip((True, False), choices, strict=True):
        profile = Profile(**case.settings, sparse_embeddings=choice)
        main, startup, optimizer, _ = build(
            case, lambda inner, given=profile: fleet.distributed_optimizer(inner, given)
        )
        ran = Ran(main, optimizer)
        ran.start_with(startup, {})
        with paddle.static.scope_guard(ran.scope):
            if not saves:
                fleet.load_persistables(None, folder, main)
            for step in range(0 if saves else 5, 9):
                if step == 5 and saves:
                    fleet.save_persistables(None, folder, main)
                ran.run(case.batch(fleet.worker_index(), step))
        found.append(values_of(main, ran.scope))
    return {"digests": [digest(values) for values in found]}


def written(case: Case) -> dict[str, Any]:
    """The program that Paddle writes, which trains on one card, beside one that was never converted."""
    main, startup, optimizer, _ = build(case, lambda inner: fleet.distributed_optimizer(inner, Profile(**ON)))
    with paddle.static.program_guard(main, startup):
        optimizer.gradient_norm()
    plain, alone = for_one_card(main), build(case, lambda inner: inner)
    rans = [Ran(plain, optimizer), Ran(alone[0], alone[2])]
    start = rans[1].start_with(alone[1], {})
    rans[0].start_with(startup, start)
    for step in range(3):
        for ran in rans:
            ran.run(case.batch(0, step))
    return {"digests": [digest(values_of(ran.main, ran.scope)) for ran in rans], "operators": operators(plain)}


def norms(case: Case) -> list[float]:
    """The norm of the gradient, with rows and with whole tables."""
    found = []
    for choice in (True, False):
        profile = Profile(sparse_embeddings=choice)
        main, startup, optimizer, _ = build(
            case, lambda inner, given=profile: fleet.distributed_optimizer(inner, given)
        )
        with paddle.static.program_guard(main, startup):
            norm = optimizer.gradient_norm()
        with paddle.static.scope_guard(paddle.static.Scope()):
            executor = paddle.static.Executor(fleet.place())
            executor.run(startup)
            (value,) = executor.run(main, feed=case.batch(fleet.worker_index(), 0), fetch_list=[norm])
        found.append(float(value.item()))
    return found


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    names = json.loads(sys.argv[1])
    report(fleet.worker_index(), cases={name: train(CASES[name]) for name in names})
    if len(sys.argv) > 2:
        merged = {"accumulate_steps": 3}
        report(
            fleet.worker_index(),
            resumed={
                "rows": resume(f"{sys.argv[2]}/rows", Case(two_tables, momentum, merged)),
                "padded": resume(f"{sys.argv[2]}/padded", Case(padded, adam, merged)),
                "rows, then tables": resume(f"{sys.argv[2]}/to tables", Case(two_tables, sgd, merged), (True, False)),
                "tables, then rows": resume(f"{sys.argv[2]}/to rows", Case(two_tables, sgd, merged), (False, True)),
            },
            written={name: written(EXACT[name]) for name in ("sgd", "several uses", "two tables", "adam")},
            norms={name: norms(EXACT[name]) for name in ("sgd", "two tables", "adam")},
        )


if __name__ == "__main__":
    main()
