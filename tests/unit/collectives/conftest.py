"""Ranks of a job that need no other process."""

from __future__ import annotations

from collections.abc import Iterator

import paddle
import pytest

from fleet_train.collectives.methods import dense, quantised
from tests.unit.collectives.played import Attributed, OneOfTwo, form, one_of_two


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[OneOfTwo]:
    with one_of_two(monkeypatch) as made:
        yield made


@pytest.fixture
def blamed() -> Attributed:
    return Attributed()


@pytest.fixture
def groups_on_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (dense, quantised):
        monkeypatch.setattr(module, "new_group", form)


@pytest.fixture
def main() -> Iterator[paddle.static.Program]:
    """The current program, in static mode."""
    paddle.enable_static()
    made = paddle.static.Program()
    with paddle.static.program_guard(made, paddle.static.Program()):
        yield made
    paddle.disable_static()
