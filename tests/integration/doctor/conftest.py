"""Fixtures: two machines on one network."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.namespaces import Namespace, two_machines

Two = tuple[Namespace, Namespace]


@pytest.fixture
def two() -> Iterator[Two]:
    with two_machines() as machines:
        yield machines
