"""Two machines on one wire, as each test wants them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.namespaces import Namespace, two_machines

Two = tuple[Namespace, Namespace]


@pytest.fixture
def two() -> Iterator[Two]:
    with two_machines() as machines:
        yield machines
