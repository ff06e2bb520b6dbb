"""The mode that host operators run in, and the memory that their results share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import paddle
import pytest
from paddle.static import python_op

from fleet_train.collectives.methods.dense import flatten, views
from fleet_train.collectives.paddle_compat import dynamic_mode, ensured_dynamic_mode, operators_in_dynamic_mode


@pytest.fixture(autouse=True)
def static_mode() -> Iterator[None]:
    paddle.enable_static()
    yield
    paddle.disable_static()


def as_operator(function: Any) -> Any:
    """``function`` as Paddle's executor calls a host operator that was emitted in our mode."""
    with operators_in_dynamic_mode():
        return python_op.run_in_dynamic_mode(function)


def tracer() -> Any:
    return paddle.base.framework.global_var._dygraph_tracer_


def test_the_thread_is_as_before_when_an_operator_ends_or_raises() -> None:
    def fail() -> None:
        assert paddle.in_dynamic_mode()
        raise ValueError("in the operator")

    with pytest.raises(ValueError, match="in the operator"):
        as_operator(fail)()
    assert (tracer(), paddle.in_dynamic_mode()) == (None, False)
    with dynamic_mode():
        before = tracer()
        as_operator(lambda: None)()
        assert tracer() is before


def test_a_threads_operators_share_one_tracer_and_threads_do_not() -> None:
    found: list[Any] = []
    note = as_operator(lambda: found.append(tracer()))
    note()
    note()
    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    assert found[0] is found[1]
    assert found[2] is not found[0]
    assert None not in found


def test_views_of_a_view_begin_where_it_begins() -> None:
    with dynamic_mode():
        whole = paddle.arange(12, dtype="float32")
        parts = views(whole[4:], [[2, 3], [2]])
        assert [part.tolist() for part in parts] == [[[4.0, 5.0, 6.0], [7.0, 8.0, 9.0]], [10.0, 11.0]]
        whole.scale_(2.0)
        assert parts[1].tolist() == [20.0, 22.0]
        np.testing.assert_array_equal(flatten(parts).numpy(), whole[4:].numpy())


def test_a_buffer_of_one_tensor_is_copied_when_made_and_shared_when_cut() -> None:
    with dynamic_mode():
        gradient = paddle.ones([2, 2])
        flat = flatten([gradient])
        gradient.scale_(3.0)
        (cut,) = views(flat, [[2, 2]])
        flat.scale_(5.0)
        assert cut.tolist() == [[5.0, 5.0], [5.0, 5.0]]


def test_the_thread_is_as_before_when_its_dynamic_mode_ends_or_raises() -> None:
    def fail() -> None:
        with dynamic_mode():
            assert paddle.ones([2]).tolist() == [1.0, 1.0]
            raise ValueError("in the body")

    with pytest.raises(ValueError, match="in the body"):
        fail()
    assert (tracer(), paddle.in_dynamic_mode()) == (None, False)
    with dynamic_mode():
        before = tracer()
        with dynamic_mode():
            assert tracer() is not before
        assert tracer() is before


def test_dynamic_mode_asks_for_the_processs_place_where_it_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        paddle.base.framework, "_current_expected_place_", lambda: asked.append("") or paddle.CPUPlace()
    )
    with dynamic_mode(paddle.CPUPlace()):
        assert asked == []
    with dynamic_mode():
        assert asked == [""]


def test_dynamic_mode_is_ensured_where_the_thread_is_not_in_it() -> None:
    with ensured_dynamic_mode():
        inside = tracer()
        assert inside is not None
        with ensured_dynamic_mode():
            assert tracer() is inside
    assert tracer() is None
