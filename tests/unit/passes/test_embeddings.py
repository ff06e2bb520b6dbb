"""Which tables of a program are found, how their dense gradients are taken out, and why others are sent whole."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.regularizer import L2Decay

from fleet_train.cluster import Cluster
from fleet_train.collectives.methods.rows import Lookups
from fleet_train.convert import process
from fleet_train.convert.embeddings import LAZY_NOTICE, find_tables, remove_dense_gradients
from fleet_train.convert.optimizer import DistributedOptimizer
from fleet_train.convert.planning import summed_over_uses
from fleet_train.profile import Profile
from fleet_train.profile.methods.rows import ASSUMED_SAMPLES


def job(world_size: int = 2, reads_values: bool = True) -> Any:
    engine = SimpleNamespace(reads_values=reads_values)
    return SimpleNamespace(world_size=world_size, cluster=Cluster.imagined(world_size, 1), engine=engine)


def find(
    build: Callable[[Any, Any], Any],
    optimizer: Any = None,
    given: Any = None,
    *,
    is_ours: bool = True,
    plain: bool = True,
    read: bool = False,
    **knobs: Any,
) -> tuple[dict[str, Any], list[str], Any]:
    """``read``: an operator of the script reads the gradients."""
    main = paddle.static.Program()
    optimizer = optimizer or paddle.optimizer.SGD(0.1)
    with paddle.static.program_guard(main, paddle.static.Program()), paddle.utils.unique_name.guard():
        ids, fixed = paddle.static.data("ids", [None, 3], "int64"), paddle.static.data("fixed", [4, 2], "int32")
        pairs, _ = summed_over_uses(optimizer.backward(paddle.mean(build(ids, fixed))))
        if read:
            paddle.add_n([paddle.sum(value) for _, value in pairs])
        profile = Profile(**{"sparse_embeddings": True, **knobs})
        tables, said = find_tables(given or job(), profile, pairs, optimizer, is_ours=is_ours, plain=plain)
        values = [value for parameter, value in pairs if parameter.name in tables]
        operands = {name: [list(one.shape) for one in table.operands] for name, table in tables.items()}
        remove_dense_gradients(main, values)
    return tables, said, SimpleNamespace(names=[one.name() for one in main.global_block().ops], operands=operands)


@pytest.fixture(autouse=True)
def static() -> Any:
    paddle.enable_static()
    yield
    paddle.disable_static()


def one(ids: Any, fixed: Any) -> Any:
    del fixed
    return nn.Embedding(5000, 4, padding_idx=-1)(ids)


def several(ids: Any, fixed: Any) -> Any:
    layer = nn.Embedding(5000, 4, padding_idx=2)
    attr = paddle.ParamAttr(name="shared")
    named = [nn.Embedding(70, 4, weight_attr=attr, padding_idx=padding) for padding in (None, 1)]
    return layer(ids).sum() + layer(fixed).sum() + (named[0](ids) * 2).sum() + named[1](fixed).sum()


def test_a_table_is_found_with_its_lookups_and_its_dense_gradient_is_gone() -> None:
    tables, said, program = find(one)
    assert list(tables) == ["embedding_0.w_0"]
    assert tables["embedding_0.w_0"].described == Lookups((4999,), True)
    assert tables["embedding_0.w_0"].rows == 3 * ASSUMED_SAMPLES
    assert program.operands == {"embedding_0.w_0": [[5000, 4], [-1, 3], [-1, 3, 4]]}
    assert "pd_op.embedding_grad" not in program.names
    assert said == []


def test_lookups_of_one_layer_and_of_one_name_are_found_together() -> None:
    tables, _, program = find(several)
    assert {name: table.described.paddings for name, table in tables.items()} == {
        "embedding_0.w_0": (2, 2),
        "shared": (1, -1),
    }
    # As many as there are indices, and no more than the table has; the size of a batch does not count.
    assert {name: table.rows for name, table in tables.items()} == {"embedding_0.w_0": 5000, "shared": 70}
    assert find(lambda _, fixed: nn.Embedding(5000, 4)(fixed))[0]["embedding_0.w_0"].rows == 2 * ASSUMED_SAMPLES
    assert not {"pd_op.embedding_grad", "pd_op.add_n"} & set(program.names)


def tied(ids: Any, fixed: Any) -> Any:
    del fixed
    table = nn.Embedding(5000, 4)
    return paddle.matmul(table(ids).mean(1), table.weight, transpose_y=True)


def wide(ids: Any, fixed: Any) -> Any:
    del fixed
    weight = paddle.static.create_parameter([5000, 4], "float64", name="wide")
    return nn.functional.embedding(ids, weight).cast("float32")


def in_a_branch(ids: Any, fixed: Any) -> Any:
    table = nn.Embedding(5000, 4)
    return paddle.static.nn.cond(fixed.sum() > 3, lambda: table(ids).sum(), lambda: table(ids).mean())


@pytest.mark.parametrize(
    ("build", "options", "why"),
    [
        (tied, {}, "pd_op.matmul_grad makes a part of its gradient, in all rows"),
        (wide, {}, "it is float64, and rows are added in float32"),
        (in_a_branch, {}, "makes a part of its gradient"),
        (one, {"read": True}, "pd_op.sum reads its local gradient"),
        (one, {"is_ours": False}, "the script calls backward() itself"),
    ],
)
def test_what_cannot_be_sent_by_rows_is_said_by_name_if_it_was_asked_for(
    build: Any, options: dict[str, Any], why: str
) -> None:
    tables, said, _ = find(build, **options)
    assert tables == {}
    (sentence,) = said
    name = "wide" if build is wide else "embedding_0.w_0"
    assert sentence.startswith(f"embedding '{name}': its whole table is sent, because ")
    assert why in sentence
    for choice in ("auto", False):
        assert find(build, **options, sparse_embeddings=choice)[:2] == ({}, [])


@pytest.mark.parametrize(
    "settings",
    [{"sparse_embeddings": False}, {"compression": "int8"}],
    ids=str,
)
def test_whole_tables_are_sent_where_the_profile_needs_them(settings: dict[str, Any]) -> None:
    tables, said, program = find(one, **{"sparse_embeddings": "auto", "link_gigabits": 0.001, **settings})
    assert (tables, said) == ({}, [])
    assert "pd_op.embedding_grad" in program.names
    assert list(find(one, sparse_embeddings="auto", link_gigabits=0.001)[0]) == ["embedding_0.w_0"]


def test_one_process_and_a_table_that_does_not_pay_are_left_alone() -> None:
    assert find(one, given=job(1))[:2] == ({}, [])
    assert find(one, sparse_embeddings="auto")[:2] == ({}, [])


def attributed(ids: Any, fixed: Any) -> Any:
    del fixed
    return nn.Embedding(5000, 4, weight_attr=paddle.ParamAttr(regularizer=L2Decay(0.1)))(ids)


@pytest.mark.parametrize(
    ("make", "options", "alone"),
    [
        (lambda: paddle.optimizer.SGD(0.1), {}, True),
        (lambda: paddle.optimizer.SGD(0.1, weight_decay=0.1), {}, False),
        (lambda: paddle.optimizer.SGD(0.1, grad_clip=nn.ClipGradByNorm(1.0)), {}, False),
        (lambda: paddle.optimizer.Momentum(0.1), {}, False),
        (lambda: paddle.optimizer.SGD(0.1), {"plain": False}, False),
        (lambda: paddle.optimizer.SGD(0.1), {"accumulate_steps": 2}, False),
        (lambda: paddle.optimizer.SGD(0.1), {"given": job(reads_values=False)}, False),
    ],
    ids=["sgd", "decay", "clip", "momentum", "operators around it", "merge", "streams"],
)
def test_rows_alone_are_updated_where_the_others_do_not_move(make: Any, options: dict[str, Any], alone: bool) -> None:
    tables, _, _ = find(one, make(), **options)
    assert tables["embedding_0.w_0"].rows_only == alone


def test_a_decay_of_its_own_moves_all_rows_of_a_table() -> None:
    assert not find(attributed)[0]["embedding_0.w_0"].rows_only


def test_lazy_adam_is_said_to_be_dense() -> None:
    assert find(one, paddle.optimizer.Adam(0.1, lazy_mode=True))[1] == [LAZY_NOTICE]
    assert find(one, paddle.optimizer.Adam(0.1))[1] == []


@pytest.mark.parametrize(
    ("known", "reads_values", "set_to"), [(True, False, [1]), (False, False, []), (True, True, [])]
)
def test_gpus_add_rows_in_one_order(
    monkeypatch: pytest.MonkeyPatch, known: bool, reads_values: bool, set_to: list[int]
) -> None:
    flag, values = "FLAGS_embedding_deterministic", []
    monkeypatch.setattr(paddle.base.core, "globals", lambda: {flag: 0} if known else {})
    monkeypatch.setattr(process, "set_flags", lambda flags: values.append(flags[flag]))
    wrapped: Any = SimpleNamespace(_job=job(reads_values=reads_values), _rank=1)
    DistributedOptimizer._add_rows_alike(wrapped)
    assert values == set_to


def test_paddle_does_not_carry_out_lazy_mode() -> None:
    moved = []
    for lazy in (True, False):
        main, startup, scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
            start = paddle.ParamAttr(initializer=nn.initializer.Constant(1.0))
            ids = paddle.static.data("ids", [2], "int64")
            loss = nn.Embedding(6, 3, sparse=True, weight_attr=start)(ids).sum()
            paddle.optimizer.Adam(0.1, lazy_mode=lazy).minimize(loss)
        executor = paddle.static.Executor(paddle.CPUPlace())
        with paddle.static.scope_guard(scope):
            executor.run(startup)
            for step in range(3):
                executor.run(main, feed={"ids": np.array([0, 1] if step == 0 else [4, 5])})
            moved.append(1.0 - np.array(scope.find_var("embedding_0.w_0").get_tensor()))
    np.testing.assert_array_equal(moved[0], moved[1])
    assert (moved[0][0] > 0.11).all(), "row 0 moves on in the steps that do not touch it"
    assert (moved[0][2] == 0).all()
