"""Everything that communicates in a program is one chain in program order, regardless of who added it and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn

from fleet_train.collectives.host_ops import emit_barrier, passes_a_token, token
from fleet_train.convert.rewrite import broadcast_start_state, chain_in_program_order


class Job:
    """What host operators ask of one when they run."""

    timeout_seconds = 1.0

    def __init__(self) -> None:
        self.met: list[str] = []

    def count(self, _: str) -> int:
        return 0

    def step_barrier(self, moment: str, _: float) -> None:
        self.met.append(moment)


def links(program: Any) -> list[Any]:
    return [operator for operator in program.global_block().ops if passes_a_token(operator)]


def is_one_chain(program: Any) -> bool:
    """Whether each operator that talks takes the token of the one before it."""
    found = links(program)
    before = [link.operand_source(0).get_defining_op().id() for link in found[1:]]
    return before == [link.id() for link in found[:-1]]


def test_interleaved_chains_become_one_in_program_order() -> None:
    main, job = paddle.static.Program(), Job()
    with paddle.static.program_guard(main):
        x = paddle.static.data("x", [2], "float32")
        first, second = token(), token()
        first = emit_barrier(job, "a", first)  # type: ignore[arg-type]
        second = emit_barrier(job, "b", second)  # type: ignore[arg-type]
        y = paddle.tanh(x)
        second = emit_barrier(job, "c", second)  # type: ignore[arg-type]
        first = emit_barrier(job, "d", first)  # type: ignore[arg-type]
        assert not is_one_chain(main)
        operators = [operator.id() for operator in main.global_block().ops]
        chain_in_program_order(main.global_block().ops)
    assert is_one_chain(main)
    assert [operator.id() for operator in main.global_block().ops] == operators, "nothing is moved"
    exe = paddle.static.Executor(paddle.CPUPlace())
    exe.run(main, feed={"x": np.zeros(2, "float32")}, fetch_list=[y, first, second])
    assert job.met == ["a 0", "b 0", "c 0", "d 0"]


def test_program_without_anything_that_talks_is_left_alone() -> None:
    main = paddle.static.Program()
    with paddle.static.program_guard(main):
        paddle.tanh(paddle.static.data("x", [2], "float32"))
        before = str(main)
        chain_in_program_order(main.global_block().ops)
    assert str(main) == before


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_start_values_that_several_optimizers_add_are_broadcast_in_one_order(calls: int) -> None:
    """The executor runs operators on several threads: two chains in one startup program cross on some rank."""
    main, startup, job = paddle.static.Program(), paddle.static.Program(), SimpleNamespace()
    with paddle.static.program_guard(main, startup):
        for _ in range(calls):
            nn.Linear(3, 2)
            broadcast_start_state(job, startup)  # type: ignore[arg-type]
    assert len(links(startup)) == calls * (1 + 2)
    assert is_one_chain(startup)
