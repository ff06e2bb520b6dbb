"""Which call of Paddle's carries out which collective, and with what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import paddle
import pytest

from fleet_train.collectives.engine import Collective

GROUP, TENSOR, OUTPUT, PARTS = "group", "tensor", "output", ["part", "part"]
CALLS: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "all_reduce": ("all_reduce", (TENSOR,), {"op": paddle.distributed.ReduceOp.MAX}),
    "reduce": ("reduce", (TENSOR,), {"dst": 3}),
    "broadcast": ("broadcast", (TENSOR,), {"src": 3}),
    "all_gather": ("all_gather", (OUTPUT, TENSOR), {}),
    "all_to_all": ("alltoall_single", (OUTPUT, TENSOR), {}),
    "gather": ("gather", (TENSOR, OUTPUT), {"dst": 3}),
    "scatter": ("scatter", (TENSOR, PARTS), {"src": 3}),
}


class Streams:
    """``paddle.distributed.stream``, written down."""

    def __init__(self) -> None:
        self.called: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> str:
            self.called.append((name, arguments, options))
            return f"task of {name}"

        return call


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    fake = SimpleNamespace(stream=made, ReduceOp=paddle.distributed.ReduceOp)
    monkeypatch.setattr(paddle, "distributed", fake)
    return made


@pytest.mark.parametrize("sync_op", [True, False])
@pytest.mark.parametrize("kind", CALLS)
def test_each_kind_is_one_call_that_returns_its_task(streams: Streams, kind: str, sync_op: bool) -> None:
    collective = Collective(kind, GROUP, TENSOR, root=3, op="max", output=OUTPUT, parts=PARTS)
    name, arguments, options = CALLS[kind]
    assert collective.begin(sync_op) == f"task of {name}"
    assert streams.called == [(name, arguments, {**options, "group": GROUP, "sync_op": sync_op})]


@pytest.mark.parametrize(("op", "reduction"), [("sum", "SUM"), ("max", "MAX"), ("min", "MIN")])
def test_each_reduction_is_paddles_own(streams: Streams, op: str, reduction: str) -> None:
    Collective("all_reduce", GROUP, TENSOR, op=op).begin(True)
    assert streams.called[0][2]["op"] == getattr(paddle.distributed.ReduceOp, reduction)


def test_unknown_kind_calls_nothing(streams: Streams) -> None:
    with pytest.raises(AssertionError, match="unknown collective 'send'"):
        Collective("send", GROUP, TENSOR).begin(True)
    assert streams.called == []
