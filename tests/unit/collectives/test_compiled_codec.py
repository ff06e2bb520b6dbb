"""Compiled loops give numpy's bits, are cached per user, and are optional."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives.methods.codec import (
    CompiledCodec,
    HostCodec,
    find_loops,
    make_codec,
    notices_of,
)
from fleet_train.collectives.paddle_compat import add_in_place, host_view
from fleet_train.errors import ConversionError
from fleet_train.profile.methods.base import QuantisedSettings
from tests.support.processes import clean_environ, python

Array = np.ndarray[Any, Any]
BLOCKS = 200  # of 512 elements: more than a piece of 65536
# Without Paddle: how often the loops were found in the cache.
LOOPS = """
from fleet_train.collectives.methods.codec_loops import compile_loops

loops = compile_loops()
print(sum(loops.encode.stats.cache_hits.values()), sum(loops.decode.stats.cache_hits.values()))
"""


def values_of(seed: int, block: int) -> Array:
    """Blocks of very different sizes; zeros, denormals, infinities and NaNs among them."""
    random = np.random.default_rng(seed)
    blocks = random.standard_normal([BLOCKS, block]) * 10.0 ** random.integers(-30, 20, [BLOCKS, 1])
    with np.errstate(over="ignore"):
        values = blocks.astype(np.float32)
    values[3], values[4], values[5] = 0.0, -0.0, np.float32(1e-42)
    values[6, 1], values[7, 2], values[8, 3], values[9, :2] = np.nan, np.inf, -np.inf, (np.inf, np.nan)
    values[10].view(np.uint32)[7] = 0xFF812345  # a NaN with a sign and a payload
    values[11] = np.float32(3e38)
    values[12, ::2] = np.float32(2.0**-100)
    return values.reshape(-1)


def bits(array: Array) -> Array:
    """As integers; all NaNs alike, because a sum of two may take after either."""
    as_bits = array.view(np.uint32).copy()
    as_bits[np.isnan(array)] = 0x7FC00000
    return as_bits


def results(codec: Any, settings: QuantisedSettings, block: int) -> list[Array]:
    mine, other = values_of(1, block), values_of(2, block)
    drawn = [settings.dither("w", 0, phase, 5) if settings.stochastic else None for phase in (0, 1)]
    wire, left = codec.encode(paddle.to_tensor(mine), drawn[0])
    other_wire, _ = codec.encode(paddle.to_tensor(other), drawn[1])
    read = [
        codec.decode([wire], 1.0),
        codec.decode([other_wire, wire, wire], 0.3),
        codec.decode([wire, other_wire], 1 / 3, paddle.to_tensor(other)),
    ]
    return [wire.numpy().copy(), bits(left.numpy()), *(bits(each.numpy()) for each in read)]


@pytest.fixture
def loops() -> Any:
    found = find_loops()
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("block", [32, 96, 512, 2048])
@pytest.mark.parametrize("number", [8, 4])
def test_compiled_loops_give_the_bits_of_numpy(loops: Any, number: int, block: int, stochastic: bool) -> None:
    settings = QuantisedSettings(number, block, stochastic=stochastic)
    by_numpy = results(HostCodec(settings), settings, block)
    compiled = results(CompiledCodec(settings, loops), settings, block)
    for ours, theirs in zip(compiled, by_numpy, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    finite = by_numpy[2].view(np.float32)
    assert np.isfinite(finite).sum() > BLOCKS // 2 * block
    assert np.isnan(finite).sum() == 5 * block


def test_wires_of_unequal_sizes_are_refused(loops: Any) -> None:
    codec = CompiledCodec(QuantisedSettings(8, 32), loops)
    short, long = (codec.encode(paddle.ones([blocks * 32]))[0] for blocks in (1, 2))
    with pytest.raises(ConversionError, match=r"wires of \[36, 72\] bytes; all must have the same size"):
        codec.decode([short, long], 1.0)


def test_a_view_is_the_memory_of_its_tensor_and_keeps_it() -> None:
    tensor = paddle.arange(12, dtype="float32").reshape([3, 4])
    view = host_view(tensor)
    view[5] = 50
    total = add_in_place(paddle.ones([17]), [tensor.t(), paddle.to_tensor(7.0), tensor[1].cast("bfloat16")])
    assert total.numpy().tolist() == [1, 5, 9, 2, 51, 10, 3, 7, 11, 4, 8, 12, 8, 5, 51, 7, 8]
    del tensor
    later = [paddle.full([3, 4], 9.0) for _ in range(8)]
    assert view.tolist() == [0, 1, 2, 3, 4, 50, 6, 7, 8, 9, 10, 11]
    assert later[0].sum() == 108
    assert host_view(paddle.zeros([0, 4])).shape == (0,)


@pytest.mark.parametrize("make", [lambda: paddle.zeros([2, 3]).transpose([1, 0]), lambda: paddle.zeros([2], "int64")])
def test_a_tensor_that_has_no_such_view_is_refused(make: Any) -> None:
    with pytest.raises(ConversionError, match="it takes contiguous float32, float64, uint8 or bfloat16 on the CPU"):
        host_view(make())


def test_without_numba_numpy_codes_and_that_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_codec(QuantisedSettings(8), on_host=True)) is CompiledCodec
    assert notices_of(on_host=True) == []
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "numba", None)
        find_loops.cache_clear()
        assert type(make_codec(QuantisedSettings(8), on_host=True)) is HostCodec
        (notice,) = notices_of(on_host=True)
        assert notice.startswith("numpy encodes int8 and int4 and takes several times the processor time: numba ")
        assert notice.endswith("pip install numba")
        assert notices_of(on_host=False) == []
    find_loops.cache_clear()


def start(caches: Path) -> subprocess.Popen[str]:
    environ = clean_environ({"XDG_CACHE_HOME": str(caches), "NUMBA_CACHE_DIR": ""})
    return subprocess.Popen(python("-c", LOOPS), env=environ, stdout=-1, stderr=-1, text=True)


def said(process: subprocess.Popen[str]) -> str:
    out, problems = process.communicate(timeout=150)
    assert (process.returncode, problems) == (0, "")
    return out.strip()


def test_loops_are_cached_in_a_folder_that_only_this_user_may_write_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loops_module = importlib.import_module("fleet_train.collectives.methods.codec_loops")
    monkeypatch.setattr(loops_module.numba.config, "CACHE_DIR", str(tmp_path / "caches"))
    folder = loops_module._cache_folder()
    assert folder is not None
    assert (folder.parent, folder.stat().st_mode & 0o777) == (tmp_path / "caches", 0o700)
    assert loops_module._cache_folder() == folder
    for mode in (0o720, 0o702):
        folder.chmod(mode)
        assert loops_module._cache_folder() is None
    folder.chmod(0o755)
    assert loops_module._cache_folder() == folder
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda path, mode: (path, mode) != (folder, os.W_OK))
        assert loops_module._cache_folder() is None
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert loops_module._cache_folder() is None


def test_loops_of_numba_that_compiles_nothing_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """In plain Python they would take a thousand times as long as numpy."""
    monkeypatch.setattr(importlib.import_module("numba").config, "DISABLE_JIT", 1)
    find_loops.cache_clear()
    assert find_loops() == "NUMBA_DISABLE_JIT is set; unset it"
    find_loops.cache_clear()


@pytest.mark.long
def test_processes_compile_at_once_and_later_ones_find_what_they_made(tmp_path: Path) -> None:
    several = [start(tmp_path) for _ in range(3)]
    for process in several:
        said(process)
    assert said(start(tmp_path)) == "1 1"
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    for index in folder.rglob("*.nbi"):
        index.write_bytes(b"")  # as a power cut leaves it
    assert said(start(tmp_path)) == "0 0"
    (tmp_path / "file").touch()
    assert said(start(tmp_path / "file")) == "0 0"
