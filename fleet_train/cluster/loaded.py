"""What a rank had imported once it trained, for the spare processes of its node: they import the same beforehand.

The launcher names a file in the environment of its node's first rank. The rank writes it before its second step: that
it is there also means that this attempt has trained.
"""

from __future__ import annotations

import hashlib
import json
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fleet_train
from fleet_train.files import publish, read_regular

LOADED = "FLEET_TRAIN_LOADED"
"""The variable with the name of that file."""
IMPORTS = "imports.json"
"""Its name in a job's log folder."""
_MOST_BYTES = 4 << 20
_OURS = "FLEET_TRAIN_"  # variables that only this package reads, after its imports
OF_ONE_ATTEMPT = frozenset(
    "FLEET_TRAIN_STORE FLEET_TRAIN_ATTEMPT FLEET_TRAIN_LAUNCHED PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM "
    "PADDLE_TRAINER_ENDPOINTS PADDLE_CURRENT_ENDPOINT PADDLE_MASTER PADDLE_NNODES PADDLE_GLOBAL_SIZE PADDLE_LOCAL_SIZE "
    "PADDLE_GLOBAL_RANK".split()
)
"""The variables of a rank that another attempt may have differently: nothing reads them before the script does."""


def note_imports(on_each_run: Callable[[Callable[[Any, Any], None]], None], trains: Callable[[Any], bool]) -> None:
    """Write what is loaded before the second run of a program that ``trains``, if this rank was asked to.

    Called by ``fleet.init``: what has been changed in the environment by then is noted as well.
    """
    path, environment, runs = os.environ.get(LOADED), changed_variables(), 0

    def on_run(program: Any, _: Any) -> None:
        nonlocal runs
        if runs < 2 and trains(program):
            runs += 1
            if runs == 2:
                noted = {"modules": installed_modules(), "environment": environment}
                with suppress(OSError):
                    publish(Path(path or ""), json.dumps(noted).encode(), f"{Path(path or '').name}.tmp")

    if path:
        on_each_run(on_run)


def changed_variables(own: Path = Path("/proc/self/environ")) -> dict[str, str]:
    """Name -> digest of the value, of the variables that this process has changed since it was started: libraries may
    have read them when they were imported. Empty: the variable is not set any more."""
    try:
        pairs = own.read_bytes().split(b"\0")
    except OSError:
        return {}
    given = {os.fsdecode(name): os.fsdecode(value) for name, _, value in (pair.partition(b"=") for pair in pairs)}
    names = {each for each in given.keys() | os.environ.keys() if not each.startswith(_OURS)} - OF_ONE_ATTEMPT - {""}
    return {name: _digest(os.environ.get(name)) for name in names if given.get(name) != os.environ.get(name)}


def _digest(value: str | None) -> str:
    return "" if value is None else hashlib.sha256(os.fsencode(value)).hexdigest()[:16]


def installed_modules() -> dict[str, str]:
    """Name -> file of the modules that this process has loaded from Python's library, from installed packages and from
    this one, in the order of their imports; the user's own are left out."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(Path(fleet_train.__file__).parent)]
    inside = tuple(folder.rstrip(os.sep) + os.sep for folder in folders)
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        spec = getattr(module, "__spec__", None)
        if isinstance(file, str) and file.startswith(inside) and spec is not None and spec.name == name:
            found[name] = file
    return found


def read_loaded(path: Path) -> Mapping[str, Mapping[str, str]] | None:
    """``modules`` and ``environment`` as `note_imports` has written them; None if they are not there, or are something
    else."""
    try:
        noted = json.loads(read_regular(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    is_one = isinstance(noted, dict) and noted.keys() == {"modules", "environment"}
    return noted if is_one and all(_is_texts(each) for each in noted.values()) else None


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())
