"""The state of methods as arrays by parameter: read from one set of buckets, written to another."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.methods import registry as state
from fleet_train.collectives.methods.dense import DenseMethod, FlatAllreduce
from fleet_train.plan import Bucket, TensorSpec


class Remembering:
    """A method with the state it is given; keeps what it is told to take back."""

    def __init__(self, kind: str, own_state: tuple[str, ...] = (), **held: list[float]) -> None:
        self.kind, self.own_state = kind, own_state
        self.held = {name.replace("__", "."): values for name, values in held.items()}
        self.taken: dict[str, Any] = {}

    def state(self) -> dict[str, Any]:
        return {name: paddle.to_tensor(values) for name, values in self.held.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self.taken = {name: tensor.tolist() for name, tensor in state.items()}


def bucket(*names: str) -> Bucket:
    return Bucket(0, tuple(TensorSpec(name, (1,), "float32") for name in names), 0)


def as_lists(arrays: dict[str, np.ndarray]) -> dict[str, list[float]]:
    return {name: array.tolist() for name, array in arrays.items()}


def test_what_ranks_have_alike_and_what_is_a_ranks_own_come_apart() -> None:
    first = Remembering("dgc", (".error", ".velocity"), step=[3.0], a__error=[1.0], a__velocity=[2.0], a__mean=[4.0])
    second = Remembering("powersgd", (), step=[5.0], b__error=[6.0])
    alike, own = state.read_state([(bucket("a"), first), (bucket("b"), second)])
    assert as_lists(alike) == {
        "dgc/step": [3.0],
        "dgc/a.mean": [4.0],
        "powersgd/step": [5.0],
        "powersgd/b.error": [6.0],
    }
    assert as_lists(own) == {"dgc/a.error": [1.0], "dgc/a.velocity": [2.0]}


def test_what_is_read_does_not_change_with_the_method() -> None:
    held = paddle.ones([2])
    method = Remembering("dgc")
    method.state = lambda: {"step": held}  # type: ignore[method-assign]
    alike, _ = state.read_state([(bucket("a"), method)])
    held.zero_()
    assert alike["dgc/step"].tolist() == [1.0, 1.0]


def test_each_method_gets_the_state_of_its_parameters_and_kind() -> None:
    """Also where buckets are cut in another way, parameters' names contain dots, and one name begins another."""
    arrays = {
        name: np.full(1, float(index))
        for index, name in enumerate(
            ["dgc/step", "dgc/a.error", "dgc/a.b.error", "dgc/c.error", "powersgd/a.error", "dgc/gone.error", "other"]
        )
    }
    first, second, third = Remembering("dgc"), Remembering("dgc"), Remembering("powersgd")
    unknown = state.write_state(
        [(bucket("a", "c"), first), (bucket("a.b"), second), (bucket("a"), third)], arrays, paddle.CPUPlace()
    )
    assert first.taken == {"step": [0.0], "a.error": [1.0], "c.error": [3.0]}
    assert second.taken == {"step": [0.0], "a.b.error": [2.0]}
    assert third.taken == {"a.error": [4.0]}
    assert unknown == ["dgc/gone.error", "other"]


def test_method_that_finds_nothing_of_its_kind_is_given_nothing() -> None:
    method = Remembering("dgc")
    method.taken = {"step": [9.0]}
    assert state.write_state([(bucket("a"), method)], {}, paddle.CPUPlace()) == []
    assert method.taken == {}


def test_dense_gradients_remember_nothing() -> None:
    method = DenseMethod(bucket("a"), FlatAllreduce(None), 2)
    assert state.read_state([(bucket("a"), method)]) == ({}, {})
    assert state.write_state([(bucket("a"), method)], {"dense/step": np.ones(1)}, paddle.CPUPlace()) == []
