from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest
from hypothesis.configuration import set_hypothesis_home_dir

from tests.unit.fuzz import little_memory

# Hypothesis keeps tables of characters: not in the checkout.
_HOME = tempfile.TemporaryDirectory(prefix="fuzz-")
set_hypothesis_home_dir(_HOME.name)


@pytest.fixture(autouse=True, scope="module")
def bounded() -> Iterator[None]:
    with little_memory():
        yield
