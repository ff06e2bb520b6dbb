"""The folders that a job writes to: space, speed, and whether other nodes see the same one."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fleet_train import timeouts
from fleet_train.doctor.facts import UNLIMITED, Folder
from fleet_train.files import open_new

_BYTES = 32 << 20
_PIECE = 1 << 20
MARK = ".fleet_train-doctor-"


def nearest(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    folder = folder.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())


def examine_all(log_dir: Path, output_dir: Path, mark: str) -> tuple[Folder, ...]:
    """Both, at the same time; one if they are, or will be, in the same place."""
    wanted = {"logs": log_dir, "output": output_dir}
    if nearest(log_dir) == nearest(output_dir):
        wanted = {"logs and output": log_dir}
    with ThreadPoolExecutor(len(wanted), "doctor folders") as pool:
        return tuple(pool.map(lambda purpose: examine(purpose, wanted[purpose], mark), wanted))


def examine(purpose: str, folder: Path, mark: str) -> Folder:
    """Write into it, in a separate process: a hanging disk must not block the doctor. The file ``mark`` stays."""
    command = [sys.executable, "-m", "fleet_train.doctor.measure_folders", str(folder.absolute()), mark]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    child = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        output, _ = child.communicate(timeout=timeouts.DOCTOR_DISK_SECONDS)
        content = json.loads(output)
    except subprocess.TimeoutExpired:
        child.kill()  # without waiting: it may be in a call that does not end
        return Folder(purpose, str(folder), error=f"did not answer within {timeouts.DOCTOR_DISK_SECONDS:g} s")
    except ValueError:
        return Folder(purpose, str(folder), error="could not be examined")
    return Folder(purpose, **content)


def write_into(folder: Path, mark: str) -> dict[str, object]:
    """Free space and files, bytes per second including the sync to disk, and the error, if any."""
    there = nearest(folder)
    found: dict[str, object] = {"path": str(there)}
    trial = there / f"{mark}.trial"
    try:
        _remove_leftovers(there)
        space = os.statvfs(there)
        found["free"] = space.f_bavail * space.f_frsize
        found["free_files"] = space.f_favail if space.f_files else UNLIMITED
        with open_new(there / mark) as file:
            file.write(b"Made by `python -m fleet_train doctor`; may be removed.\n")
        found["bytes_per_second"] = _speed(trial)
    except OSError as error:
        found["error"] = f"cannot be written to: {error.strerror or error}"
    finally:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)
    return found


def _remove_leftovers(folder: Path) -> None:
    for path in folder.glob(f"{MARK}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > timeouts.DOCTOR_LEFT_BEHIND_SECONDS:
                path.unlink()


def _speed(path: Path) -> float:
    piece, written = os.urandom(_PIECE), 0
    began = time.perf_counter()
    with open_new(path) as file:
        while written < _BYTES and time.perf_counter() - began < timeouts.DOCTOR_WRITING_SECONDS:
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


if __name__ == "__main__":
    print(json.dumps(write_into(Path(sys.argv[1]), sys.argv[2])))
