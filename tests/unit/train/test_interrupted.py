"""A save that ends at any of its file operations, by a crash of the machine or a full disk: nothing is lost.

A crash is worse here than a kill: files that were not synced lose their second half.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import paddle
import pytest

from fleet_train import files, fleet
from fleet_train.convert import persistables
from fleet_train.convert.exporting import export as export_program
from fleet_train.convert.program_state import SavedState
from fleet_train.errors import NotSaved
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState


class Crash(BaseException):
    """The machine stops here."""


class Disk:
    """Counts what is done to the disk, and lets the operation with number ``fails_at`` end with ``failure``.

    What is synced is only counted: a disk would make hundreds of saves slow.
    """

    def __init__(self, folder: Path, fails_at: int, failure: BaseException) -> None:
        self.operations = 0
        self._folder, self._fails_at, self._failure = folder, fails_at, failure
        self._synced = {path.stat().st_ino: path.stat().st_size for path in folder.rglob("*")}

    def _count(self) -> None:
        self.operations += 1
        if self.operations == self._fails_at:
            raise self._failure

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        really_open, write_all = io.open, files.write_all

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, **kwargs: self._count() or real(*args, **kwargs)

        def synced(descriptor: int) -> None:
            self._count()
            self._synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

        def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if "w" in mode:
                self._count()
            return really_open(file, mode, *args, **kwargs)

        def torn(file: Any, content: Any) -> None:
            try:
                self._count()
            except BaseException:
                write_all(file, memoryview(content)[: len(content) // 2])
                raise
            write_all(file, content)

        for name in ("replace", "mkdir", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, counted(getattr(os, name)))
        monkeypatch.setattr(os, "fsync", synced)
        monkeypatch.setattr(io, "open", opened)
        for module in (files, persistables):
            monkeypatch.setattr(module, "write_all", torn)

    def lose_what_was_not_synced(self) -> None:
        for path in self._folder.rglob("*"):
            if path.is_file() and self._synced.get(path.stat().st_ino) != path.stat().st_size:
                os.truncate(path, path.stat().st_size // 2)


@pytest.fixture(autouse=True)
def saving(monkeypatch: pytest.MonkeyPatch, program: None) -> None:
    """There is something to save."""
    del program
    monkeypatch.setattr(os, "fsync", lambda _: None)


def variable() -> Any:
    return fleet.main_program.state_dict("all")["linear_0.w_0"]


def save(output: Path, step: int, value: float, said: list[str] | None = None) -> Path | None:
    variable().set(np.full((4, 3), value, "float32"), paddle.CPUPlace())
    say = (said if said is not None else []).append
    checkpoints = Checkpoints(output, keep=1, keep_best=True, say=say)
    checkpoints.newest()  # so that all are of one run
    checkpoints.save(None, TrainState(0, step, 10, 1, {}, {}, {}, {}), score=value)
    try:
        return checkpoints.finish()
    except NotSaved:
        return None
    finally:
        checkpoints.close()


def found(output: Path) -> tuple[int, float]:
    """Step and weight of the newest checkpoint."""
    checkpoints = Checkpoints(output)
    newest = checkpoints.newest()
    assert newest is not None
    checkpoints.load(None, newest)
    values = np.unique(np.asarray(variable()))
    assert len(values) == 1
    return newest.state.step, float(values[0])


# (steps and weights saved before, the save that is interrupted): a new step; the same step again; one that removes two.
SCENARIOS: dict[str, tuple[list[tuple[int, float]], tuple[int, float]]] = {
    "new step": ([(10, 1.0)], (20, 2.0)),
    "same step": ([(10, 1.0)], (10, 2.0)),
    "new best": ([(10, 3.0), (20, 2.0)], (30, 4.0)),
}


def interrupted(output: Path, name: str, fails_at: int, failure: BaseException) -> tuple[Disk, list[str], Path | None]:
    before, (step, value) = SCENARIOS[name]
    for earlier in before:
        assert save(output, *earlier) is not None
    disk, said, path = Disk(output, fails_at, failure), [], None
    with pytest.MonkeyPatch.context() as monkeypatch:
        disk.install(monkeypatch)
        try:
            path = save(output, step, value, said)
        except Crash:
            disk.lose_what_was_not_synced()
    return disk, said, path


def assert_goes_on(output: Path) -> None:
    assert save(output, 40, 5.0) is not None
    assert found(output) == (40, 5.0)
    assert sorted(path.name for path in (output / "checkpoints").glob("*step-*")) == ["step-00000040"]


@pytest.mark.parametrize("name", SCENARIOS)
def test_crash_at_any_operation_leaves_the_one_before_or_the_new_one(tmp_path: Path, name: str) -> None:
    before, new = SCENARIOS[name]
    outcomes = []
    for fails_at in range(1, 100):
        output = tmp_path / str(fails_at)
        disk, _, _ = interrupted(output, name, fails_at, Crash())
        outcomes.append(found(output))
        assert_goes_on(output)
        if disk.operations < fails_at:
            break
    assert len(outcomes) > 15
    assert set(outcomes) == {before[-1], new}
    assert outcomes == sorted(outcomes), "once the new one counts, it stays"


@pytest.mark.parametrize("name", SCENARIOS)
def test_full_disk_at_any_operation_is_said_and_leaves_the_one_before(tmp_path: Path, name: str) -> None:
    before, new = SCENARIOS[name]
    for fails_at in range(1, 100):
        output = tmp_path / str(fails_at)
        disk, said, path = interrupted(output, name, fails_at, OSError(28, "No space left on device"))
        if disk.operations < fails_at:
            assert (said, path is not None) == ([], True)
            break
        # pathlib does not mind what mkdir says of a folder that is there.
        assert len(said) == 1 or path is not None
        assert all("No space left on device" in one for one in said)
        # The last thing that can fail is the sync of the folder in which the new one is already in its place.
        assert found(output) == new or (path is None and found(output) == before[-1])
        if path is None:
            assert not list((output / "checkpoints").glob(".writing-*")), "the draft is removed: its space is needed"
        assert_goes_on(output)


def save_state(folder: Path, value: float) -> None:
    arrays = {"w": np.full((40, 3), value, "float32"), "v": np.full(2, value, "float32")}
    kinds = {"w": "parameter", "v": "optimizer"}
    own = [{"fleet_train/int8/w.error": np.full(120, value, "float32")} for _ in range(2)]
    persistables.publish(folder, persistables.write_tensors(folder, SavedState(arrays, kinds, own)))


def value_in(folder: Path) -> float:
    """The one value that all of a saved state has."""
    state = persistables.read_folder(folder)
    values = {
        float(each) for arrays in (state.arrays, *state.ranks) for array in arrays.values() for each in array.flat
    }
    assert len(values) == 1
    return values.pop()


def cut_short(folder: Path, fails_at: int, action: Callable[[], None]) -> int:
    """How many operations were done when the machine stopped; its disk then holds what was synced."""
    with pytest.MonkeyPatch.context() as patched:
        disk = Disk(folder, fails_at, Crash())
        disk.install(patched)
        with suppress(Crash):
            action()
    disk.lose_what_was_not_synced()
    return disk.operations


def test_a_state_saved_over_another_is_one_of_the_two_wherever_the_save_ends(tmp_path: Path) -> None:
    save_state(tmp_path / "counted", 0.0)
    operations = cut_short(tmp_path / "counted", 0, lambda: save_state(tmp_path / "counted", 1.0))
    assert operations > 10
    seen = set()
    for first in range(1, operations + 2):
        folder = tmp_path / str(first)
        save_state(folder, 1.0)
        cut_short(folder, first, lambda folder=folder: save_state(folder, 2.0))
        seen.add(left := value_in(folder))
        for second in range(1, operations + 4, 2):
            again = tmp_path / f"{first} {second}"
            shutil.copytree(folder, again)
            cut_short(again, second, lambda again=again: save_state(again, 3.0))
            assert value_in(again) in (left, 3.0)
            save_state(again, 4.0)
            assert value_in(again) == 4.0
            assert not list(again.glob("*.part"))
    assert seen == {1.0, 2.0}


def test_an_export_over_another_never_has_parameters_beside_the_program_of_others(tmp_path: Path) -> None:
    """Paddle reads two files: they are of one export, or the program is missing, which Paddle says."""

    def export(folder: Path, number: int) -> None:
        def write(prefix: str, *_: Any, **__: Any) -> None:
            Path(f"{prefix}.json").write_text(f"program {number // 2}")
            Path(f"{prefix}.pdiparams").write_text(f"parameters {number}")

        block = SimpleNamespace(program=None)
        with mock.patch.object(paddle.static, "save_inference_model", write):
            export_program(None, folder, [], [SimpleNamespace(block=block)])

    for before, after in ((2, 3), (2, 4)):  # the same program, and another one
        seen = set()
        for fails_at in range(1, 30):
            folder = tmp_path / f"{before} {after} {fails_at}"
            export(folder, before)
            cut_short(folder, fails_at, lambda folder=folder, after=after: export(folder, after))
            found = [
                (folder / name).read_text() for name in ("model.pdiparams", "model.json") if (folder / name).exists()
            ]
            seen.add(tuple(found))
        whole = {(f"parameters {number}", f"program {number // 2}") for number in (before, after)}
        assert whole <= seen
        assert all(len(each) == 1 for each in seen - whole)
        assert (before // 2 != after // 2) == bool(seen - whole)
