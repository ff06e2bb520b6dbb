"""Random input to files and command lines: the answer is always one of our errors.

What is tried: texts and bytes as profiles, files of a checkpoint in which something was changed, flags of ``launch``
and the environment of ranks. What must hold for each: a `FleetTrainError` (or click's usage error) whose message has no
control characters, or a result that the next step takes; no other exception, and no more memory than `little_memory`
leaves.

The examples are the same in every run (`fixed`), and nothing is kept of them: a failure is printed with the code that
repeats it (``@reproduce_failure`` or the arguments); put it as a literal case beside the module's own tests.
More examples: FUZZ_EXAMPLES=10000 python -m pytest tests/unit/fuzz (each test then takes minutes).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fleet_train.errors import UNPRINTABLE

_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def fixed(examples: int) -> settings:
    """So many examples, the same in every run, without a database."""
    return settings(
        max_examples=_EXAMPLES or examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


@contextmanager
def little_memory(nbytes: int = 1 << 30) -> Iterator[None]:
    """No more address space than this process has now and so many bytes: what asks for more gets a MemoryError."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def check(read: Callable[[], Any], *errors: type[Exception]) -> str:
    """What an expected error says, which must be printable."""
    told = ""
    try:
        read()
    except errors as error:
        told = str(error)
    assert UNPRINTABLE.search(told) is None
    assert len(told) < 50_000
    return told


@st.composite
def mutated(draw: st.DrawFn, originals: st.SearchStrategy[bytes], tokens: tuple[bytes, ...]) -> bytes:
    """One of the originals with a few changes: bits turned, pieces removed, repeated, cut off, tokens put in."""
    content = bytearray(draw(originals))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(content)))
        length = draw(st.integers(0, 20))
        kind = draw(st.sampled_from(("turn", "remove", "repeat", "cut", "token", "digits")))
        if kind == "turn" and start < len(content):
            content[start] ^= 1 << draw(st.integers(0, 7))
        elif kind == "remove":
            del content[start : start + length]
        elif kind == "repeat":
            content[start:start] = content[start : start + length] * draw(st.integers(1, 50))
        elif kind == "cut":
            del content[start:]
        elif kind == "token":
            content[start : start + length] = draw(st.sampled_from(tokens))
        else:
            content[start:start] = b"9" * draw(st.sampled_from((1, 18, 40, 5_000)))
    return bytes(content)
