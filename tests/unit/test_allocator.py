"""The thresholds of glibc's allocator: which are raised, and which setting has precedence."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from fleet_train.collectives.paddle_compat import keep_freed_memory
from tests.support.processes import ROOT

CODE = """
from fleet_train.collectives.paddle_compat import keep_freed_memory
print(keep_freed_memory({}), keep_freed_memory({"GLIBC_TUNABLES": "glibc.malloc.check=3"}))
"""
TRIM, MMAP = (-1, 1024**3), (-3, 32 * 1024**2)  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of <malloc.h>


def test_thresholds_are_raised_unless_the_user_has_set_them() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["True", "False"]


def library(monkeypatch: pytest.MonkeyPatch, mallopt: Callable[[int, int], int]) -> list[tuple[int, int]]:
    """What a C library is asked for."""
    asked: list[tuple[int, int]] = []

    def ask(parameter: int, value: int) -> int:
        asked.append((parameter, value))
        return mallopt(parameter, value)

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=ask) if name is None else None)
    return asked


def test_freed_blocks_up_to_32_mib_stay_until_a_gib_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = library(monkeypatch, lambda *_: 1)
    assert keep_freed_memory({"PATH": "/bin"})
    assert asked == [TRIM, MMAP]


@pytest.mark.parametrize("refused", [TRIM, MMAP])
def test_what_the_library_refuses_is_logged(monkeypatch: pytest.MonkeyPatch, refused: tuple[int, int]) -> None:
    library(monkeypatch, lambda *asked: int(asked != refused))
    assert keep_freed_memory({}) is False


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_each_variable_of_the_user_leaves_the_library_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = library(monkeypatch, lambda *_: 1)
    assert keep_freed_memory({name: ""}) is False
    assert asked == []


@pytest.mark.parametrize("error", [AttributeError, OSError, TypeError])
def test_another_c_library_is_no_error(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    def none(_: None) -> None:
        raise error

    monkeypatch.setattr(ctypes, "CDLL", none)
    assert keep_freed_memory({}) is False
