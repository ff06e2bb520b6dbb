"""Runs the installed ``paddle.distributed.launch`` without the rest of Paddle, whose import takes longer than its work.

    paddle_launch_main.py -m paddle.distributed.launch --ips=... (the arguments of the plain command)

The launcher's modules are Paddle's own, unchanged. They read a few facts about the build from the packages around
them, which are the same in every CPU build; placeholders provide them. If the build is a different one, or anything
else is accessed, this process executes the plain command instead, as long as it has started nothing.
Standard library only, and no import of fleet_train: like ``worker_main.py`` this runs between a command and its ranks.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

_LAUNCHER = "paddle.distributed.launch"
_PLAIN_COMMAND = [sys.executable, *sys.argv[1:]]
# Of paddle/version: the values of a CPU build.
_CPU_BUILD = {"cuda_version": "False", "xpu_xre_version": "False", "hip_version": None}


class Placeholder(ModuleType):
    """Placeholder of a package that is not imported; falls back to the plain command on any unknown attribute."""

    def __init__(self, name: str, folder: Path | None, **known: Any) -> None:
        super().__init__(name)
        self.__path__ = [] if folder is None else [str(folder)]
        self.__spec__ = ModuleSpec(name, None, is_package=True)
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or _has_children():
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        become_the_plain_command()


def become_the_plain_command() -> NoReturn:
    """Continue as ``python -m paddle.distributed.launch ...``, with the same process id, parent and files."""
    os.execv(sys.executable, _PLAIN_COMMAND)


def _has_children() -> bool:
    try:
        return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text().strip())
    except OSError:
        return True  # it is unknown: prefer an error to starting ranks twice


def folder_of_paddle() -> Path | None:
    spec = PathFinder.find_spec("paddle")
    places = spec.submodule_search_locations if spec is not None else None
    return Path(places[0]) if places else None


def is_build_for_cpus(folder: Path) -> bool:
    """By Paddle's own file about its build; plug-in devices are found by a variable or a folder."""
    if os.environ.get("CUSTOM_DEVICE_ROOT") or (folder.parent / "paddle_custom_device").exists():
        return False
    facts: dict[str, Any] = {"__name__": "paddle.version"}
    exec(compile((folder / "version" / "__init__.py").read_text(), "paddle.version", "exec"), facts)
    return all(facts.get(name, "unknown") == value for name, value in _CPU_BUILD.items())


def put_placeholders(folder: Path) -> None:
    """For everything that the launcher's modules import; ``strtobool`` is Paddle's own."""
    core = Placeholder(
        "paddle.base.core",
        None,
        get_all_custom_device_type=list,
        is_compiled_with_cuda=bool,
        is_compiled_with_xpu=bool,
        is_compiled_with_ipu=bool,
    )
    parts = {
        "distributed": Placeholder("paddle.distributed", folder / "distributed"),
        "base": Placeholder("paddle.base", None, core=core),
        "device": Placeholder("paddle.device", None, get_available_custom_device=list),
        "utils": Placeholder("paddle.utils", folder / "utils"),
    }
    paddle = Placeholder("paddle", folder, is_compiled_with_rocm=bool, **parts)
    # Part of the launcher's node discovery, which is unused in a job whose nodes are given.
    httpx = Placeholder("httpx", None)
    sys.modules.update({each.__name__: each for each in (paddle, *parts.values(), core, httpx)})
    from paddle.utils.environments import strtobool

    parts["utils"].__dict__["strtobool"] = strtobool


def main() -> None:
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later
        sys.path[0] = os.getcwd()  # as with -m: instead of this file's folder
    try:
        folder = folder_of_paddle()
        if sys.argv[1:3] != ["-m", _LAUNCHER] or folder is None or not is_build_for_cpus(folder):
            become_the_plain_command()
        put_placeholders(folder)
        from paddle.distributed.launch import main as launcher
    except Exception:  # another Paddle: whatever fails here, fall back to its own import
        become_the_plain_command()
    sys.argv = [str(launcher.__file__), *sys.argv[3:]]
    launcher.launch()


if __name__ == "__main__":
    main()
