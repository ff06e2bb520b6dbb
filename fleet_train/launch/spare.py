"""The process of a spare: it makes the imports at the top of a rank's script, and waits until it becomes the next rank.

    python -u .../spare.py DESCRIPTOR SCRIPT ARGUMENTS...
    python -u .../spare.py DESCRIPTOR -m MODULE ARGUMENTS...

The launcher (`spares`) starts it and talks to it over that socket: it hears when the imports are done, and sends the
log and the environment of a rank. Then it is the process that ``python -u SCRIPT ARGUMENTS...`` would be after these
lines.

Only what a script does first can be done beforehand: a later import may see what the script, or a module of its own,
has set or replaced before it. So the imports end with the first line that is no import of an installed package.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # Above all other imports: where the script's own process would look for modules.
    from os import getcwd
    from os.path import dirname, realpath

    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = getcwd() if sys.argv[2] == "-m" else dirname(realpath(sys.argv[2]))

import ast
import builtins
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import io
import json
import os
import runpy
import site
import socket
import struct
import sysconfig
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

READY = "ready"
_PACKAGE = Path(__file__).resolve().parents[1]
_NICENESS = 5
_LENGTH = struct.Struct("!Q")
_CAP_SYS_NICE = 23
_OOM_SCORE, _FIRST_TO_GO = "/proc/self/oom_score_adj", "1000"


def main() -> None:
    with socket.socket(fileno=int(sys.argv[1])) as link:
        command = sys.argv[2:]
        sys.argv = command[1:] if command[0] == "-m" else command[:]
        # It is no rank yet: the flight recorder, which starts with an import of fleet_train, leaves it alone.
        sys.orig_argv = [sys.executable, "-m", "fleet_train.launch.spare"]
        oom_score = _read(_OOM_SCORE)
        _write(_OOM_SCORE, _FIRST_TO_GO)
        with _low_priority():
            problem = imported(command, {link.fileno()})
        link.sendall(f"{problem or READY}\n".encode())
        log, changes = _start(link)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    _write(_OOM_SCORE, oom_score)
    set_variables(changes)
    if problem:  # it was not known yet when the launcher took this process
        os.execv(sys.executable, [sys.executable, "-u", *command])
    become(command)


def imported(command: Sequence[str], known: set[int]) -> str:
    """Make the imports at the top of the command's script; returns why this process cannot become a rank, or nothing.
    ``known``: its open descriptors of sockets.

    An import that fails is left to the script, which then shows the error.
    """
    imports, end = top_imports(command)
    _of_the_user()  # what Python has loaded at its start (a sitecustomize), it loads in a rank, too
    for module, names in imports:
        with contextlib.suppress(BaseException):
            found = importlib.import_module(module)
            for name in names:  # an attribute, or a module of this package
                if not hasattr(found, name):
                    importlib.import_module(f"{module}.{name}")
        if own := _of_the_user():
            return f"the import of {module} loads {own}, which is not installed"
        if _sockets() - known:
            return f"the import of {module} opens a connection or a port"
        if has_context():
            return f"the import of {module} touches a GPU"
    if end and "paddle" not in sys.modules:
        return f"line {end} of the script stands above its import of Paddle: move it below its imports, if it can"
    return "" if imports else "the script does not begin with imports of installed packages"


def top_imports(command: Sequence[str]) -> tuple[list[tuple[str, list[str]]], int]:
    """(module, names imported from it) of the lines at the top of a command's script that import installed packages, up
    to the first line that does anything else; and the number of that line if imports of Paddle, or of this package,
    follow, else 0."""
    if [*command[:3]] == ["-m", "fleet_train", "train"]:  # the reference trainer: all of it is installed
        return [("fleet_train.cli", []), ("fleet_train.train.reference", [])], 0
    imports: list[tuple[str, list[str]]] = []
    lines = _lines(command)
    for number, line in enumerate(lines):
        found = _imported_by(line)
        if found is None or not all(_is_installed(module.partition(".")[0]) for module, _ in found):
            later = [module for each in lines[number:] for module, _ in _imported_by(each) or ()]
            is_above = any(module.partition(".")[0] in ("paddle", "fleet_train") for module in later)
            return imports, line.lineno if is_above else 0
        imports += found
    return imports, 0


def _imported_by(line: ast.stmt) -> list[tuple[str, list[str]]] | None:
    """What a line imports; nothing for a docstring, None for any other line."""
    if isinstance(line, ast.Import):
        return [(each.name, []) for each in line.names]
    if isinstance(line, ast.ImportFrom) and line.module and not line.level:
        return [(line.module, [each.name for each in line.names if each.name != "*"])]
    is_text = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    return [] if is_text else None


def _lines(command: Sequence[str]) -> list[ast.stmt]:
    path: str | None = command[0]
    try:
        if command[0] == "-m":
            spec = importlib.util.find_spec(command[1])
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{command[1]}.__main__")
            path = None if spec is None else spec.origin
        return ast.parse(Path(path).read_bytes()).body if path else []
    except (OSError, ValueError, SyntaxError, ImportError):
        return []


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return spec is not None and (spec.origin in ("built-in", "frozen") or _is_inside(spec.origin))


@functools.cache
def _folders() -> tuple[str, ...]:
    """Those of Python's library, of installed packages, and this package's."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(_PACKAGE)]
    return tuple(os.path.realpath(folder) + os.sep for folder in folders)


def _is_inside(file: str | None) -> bool:
    return file is not None and os.path.realpath(file).startswith(_folders())


_looked_at: set[str] = set()


def _of_the_user() -> str:
    """A module loaded since the last call that is neither installed nor this one; empty if there is none."""
    new = [(name, module) for name, module in list(sys.modules.items()) if name not in _looked_at]
    _looked_at.update(name for name, _ in new)
    for name, module in new:
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and getattr(module, "__spec__", None) is not None and not _is_inside(file):
            return name
    return ""


def _sockets() -> set[int]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                found.add(int(descriptor))
    return found


def has_context(load: Any = ctypes.CDLL) -> bool:
    """Whether this process has a CUDA context on some device: it would take memory there while it waits."""
    try:
        cuda = load("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # nothing has loaded it
        return False
    count = ctypes.c_int()
    if cuda.cuDeviceGetCount(ctypes.byref(count)):  # the driver is not initialised
        return False
    for ordinal in range(count.value):
        device, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), ordinal):
            continue
        if not cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) and active.value:
            return True
    return False


@contextlib.contextmanager
def _low_priority() -> Any:
    """Training goes on meanwhile. Only where the priority can be taken back: by a rank of a container it cannot."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    effective = next((line.split()[1] for line in _read("/proc/self/status").splitlines() if "CapEff" in line), "0")
    if not int(effective, 16) >> _CAP_SYS_NICE & 1 or niceness >= _NICENESS:
        yield
        return
    os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    try:
        yield
    finally:
        for thread in os.listdir("/proc/self/task"):  # libraries have started some, with the priority of this one
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), niceness)


def _start(link: socket.socket) -> tuple[int, Any]:
    """The descriptor of the rank's log, and what it is to be; ends this process with the launcher."""
    first, descriptors, *_ = socket.recv_fds(link, 1, 1)
    if not first or not descriptors:
        raise SystemExit(0)
    return descriptors[0], _message(link)


def framed(message: Any) -> bytes:
    """The bytes of a JSON value, with their number in front."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def _message(link: socket.socket) -> Any:
    """What was sent as `framed`, and nothing behind it; ends this process with the launcher."""
    (length,) = _LENGTH.unpack(_received(link, _LENGTH.size))
    return json.loads(_received(link, length))


def _received(link: socket.socket, length: int) -> bytes:
    whole = bytearray()
    while len(whole) < length:
        piece = link.recv(length - len(whole))
        if not piece:
            raise SystemExit(0)
        whole += piece
    return bytes(whole)


def set_variables(changes: Mapping[str, str | None]) -> None:
    """Change the environment; None: the variable is not set any more."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def become(command: Sequence[str]) -> None:
    """Be the process of this command: ``[SCRIPT, ...]`` or ``["-m", MODULE, ...]``."""
    is_module = command[0] == "-m"
    script = None if is_module else os.path.join(os.getcwd(), command[0])
    sys.orig_argv = [sys.executable, "-u", *command]
    if (recorder := sys.modules.get("fleet_train.cluster.flight.ring")) is not None:
        recorder.start_under_a_launcher()  # as its import would have done
    ours, sys.modules["__main__"] = sys.modules["__main__"], _main_module(script)
    try:
        if script is None:
            runpy._run_module_as_main(command[1])  # type: ignore[attr-defined]
        else:
            with io.open_code(script) as file:
                code = compile(file.read(), script, "exec", dont_inherit=True)
            exec(code, sys.modules["__main__"].__dict__)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _end(error)
    finally:
        del ours  # kept until here: this code is its


def _main_module(script: str | None) -> ModuleType:
    main = ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    main.__annotations__ = {}
    if script is not None:
        main.__file__, main.__cached__ = script, None  # type: ignore[attr-defined]
        main.__loader__ = SourceFileLoader("__main__", script)
    return main


def _end(error: BaseException) -> None:
    """As the interpreter ends with an exception, without this file's lines in the traceback."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback
    sys.audit("sys.excepthook", sys.excepthook, type(error), error, traceback)
    sys.excepthook(type(error), error, traceback)
    raise SystemExit(1)


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read()
    return ""


def _write(path: str, text: str) -> None:
    with contextlib.suppress(OSError), open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
