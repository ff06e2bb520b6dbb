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
# Libraries read these when they are loaded: a later change has no effect on them.
_READ_AT_IMPORT = (
    "FLAGS_ GLOG_ OMP_ GOMP_ KMP_ MKL_ OPENBLAS_ BLIS_ GOTO_ CUDA_ NVIDIA_ HIP_ ROCR_ LD_ MALLOC_ PYTHON".split()
)
_EACH_RANKS_OWN = "FLAGS_selected_gpus"


def note_imports(on_each_run: Callable[[Callable[[Any, Any], None]], None], trains: Callable[[Any], bool]) -> None:
    """Write what is loaded before the second run of a program that ``trains``, if this rank was asked to.

    Called by ``fleet.init``: what the script has changed in the environment by then is noted as well.
    """
    path, environment, runs = os.environ.get(LOADED), read_at_import(), 0

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


def read_at_import(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Name -> digest of the value, of the variables that libraries read when they are loaded."""
    return {
        name: hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:16]
        for name, value in environ.items()
        if name.startswith(tuple(_READ_AT_IMPORT)) and name != _EACH_RANKS_OWN
    }


def installed_modules() -> dict[str, str]:
    """Name -> file of the modules that this process has loaded from Python's library, from installed packages and from
    this one, in the order of their imports; the user's own are left out."""
    folders = [*sysconfig.get_paths().values(), *site.getsitepackages(), site.getusersitepackages()]
    folders.append(str(Path(fleet_train.__file__).parent))
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
