"""What a process of its own measures, so that a hanging disk or numpy's threads cannot harm the doctor.

Of the folders that a job writes to: space, speed, and whether other nodes see the same one. Of the processors: the
speed of one of them. Of a folder of training data: what `fleet_train.data.measure` prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fleet_train import timeouts
from fleet_train.doctor.facts import FAIL, UNLIMITED, Finding, Folder
from fleet_train.files import open_new

_DOCTOR_WRITING_SECONDS, _DOCTOR_DISK_SECONDS = 3.0, 6.0
"""How long the doctor writes into a folder; a disk that does not answer within the second hangs."""
_DOCTOR_LEFT_BEHIND_SECONDS = 3600.0
"""How old a file is that a killed doctor has left behind: a doctor ends within minutes."""

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_BYTES = 32 << 20
_PIECE = 1 << 20
MARK = ".fleet_train-doctor-"


def nearest(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    folder = folder.absolute()
    return next(place for place in (folder, *folder.parents) if place.is_dir())


def examine_all(log_dir: Path, output_dir: Path, mark: str) -> tuple[Folder, ...]:
    """Examine both folders at the same time; one if they are, or will be, in the same place."""
    wanted = {"logs": log_dir, "output": output_dir}
    if nearest(log_dir) == nearest(output_dir):
        wanted = {"logs and output": log_dir}
    with ThreadPoolExecutor(len(wanted), "doctor folders") as pool:
        return tuple(pool.map(lambda purpose: examine(purpose, wanted[purpose], mark), wanted))


def examine(purpose: str, folder: Path, mark: str) -> Folder:
    """Write into it; the file ``mark`` stays."""
    try:
        return Folder(purpose, **run_apart(_DOCTOR_DISK_SECONDS, "folder", str(folder.absolute()), mark))
    except subprocess.TimeoutExpired:
        return Folder(purpose, str(folder), error=f"did not answer within {_DOCTOR_DISK_SECONDS:g} s")
    except ValueError:
        return Folder(purpose, str(folder), error="could not be examined")


def of_data(arguments: tuple[str, ...]) -> tuple[Finding, ...]:
    """What is found of a folder of training data; hosts are left out."""
    seconds = timeouts.DOCTOR_DATA_SECONDS
    try:
        found = run_apart(seconds, *arguments, module="fleet_train.data.measure")
        return tuple(Finding("data", hosts=(), **each) for each in found)
    except (subprocess.TimeoutExpired, ValueError):
        why = f"{arguments[0]}: nothing could be measured within {seconds:g} s"
        return (Finding("data", "data", FAIL, (), why, "can be read", f"ls {shlex.quote(arguments[0])}"),)


def run_apart(seconds: float, *arguments: str, module: str = "fleet_train.doctor.measure_apart") -> Any:
    """What a module prints with these arguments, as JSON, with one thread of numpy. Raises TimeoutExpired, and
    ValueError if it prints none."""
    command = [sys.executable, "-m", module, *arguments]
    environ = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        output, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        child.kill()  # without waiting: it may be in a call that does not end
        raise
    return json.loads(output)


def write_into(folder: Path, mark: str) -> dict[str, object]:
    """Free space and files, bytes per second including the sync to disk, and the error, if any."""
    there = nearest(folder)
    facts: dict[str, object] = {"path": str(there)}
    trial = there / f"{mark}.trial"
    try:
        _remove_leftovers(there)
        space = os.statvfs(there)
        facts["free"] = space.f_bavail * space.f_frsize
        facts["free_files"] = space.f_favail if space.f_files else UNLIMITED
        with open_new(there / mark) as file:
            file.write(b"Made by `fleet_train doctor`; may be removed.\n")
        facts["bytes_per_second"] = _speed(trial)
    except OSError as error:
        facts["error"] = f"cannot be written to: {error.strerror or error}"
    finally:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)
    return facts


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{MARK}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > _DOCTOR_LEFT_BEHIND_SECONDS:
                path.unlink()


def _speed(path: Path) -> float:
    piece, written = os.urandom(_PIECE), 0
    began = time.perf_counter()
    with open_new(path) as file:
        while written < _BYTES and time.perf_counter() - began < _DOCTOR_WRITING_SECONDS:
            written += file.write(piece)
        os.fsync(file.fileno())
    return written / (time.perf_counter() - began)


def seen(folder: Folder, mark: str) -> bool:
    """Whether a mark that another node wrote into its folder is in ours."""
    return os.path.lexists(Path(folder.path) / mark)


def clean(folders: tuple[Folder, ...], mark: str) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            (Path(folder.path) / mark).unlink(missing_ok=True)


_MATRIX_SIDE = 256


def measure_speed() -> tuple[float, float]:
    """Gigaflops of one processor, from the best of many short products, which other programs do not affect; and the
    share of it that a busy thread gets, from 0 to 1, which they reduce."""
    import numpy as np  # only in the process of its own: numpy reads the number of threads at import

    left = np.full((_MATRIX_SIDE, _MATRIX_SIDE), 0.5, np.float32)
    right, out = left.copy(), np.empty_like(left)
    np.matmul(left, right, out=out)
    best, began, used = float("inf"), time.perf_counter(), time.process_time()
    while time.perf_counter() - began < timeouts.DOCTOR_SPEED_SECONDS:
        start = time.perf_counter()
        np.matmul(left, right, out=out)
        best = min(best, time.perf_counter() - start)
    wall = time.perf_counter() - began
    return 2 * _MATRIX_SIDE**3 / best / 1e9, min(1.0, (time.process_time() - used) / wall)


if __name__ == "__main__":
    print(json.dumps(measure_speed() if sys.argv[1] == "speed" else write_into(Path(sys.argv[2]), sys.argv[3])))
