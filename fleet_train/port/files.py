"""Scripts on disk: found, ported together, shown as a diff, written atomically."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from fleet_train.errors import DataError
from fleet_train.files import open_new, write_all
from fleet_train.port.script import Ported, port

_SKIPPED = {"__pycache__", "node_modules", "build", "dist"}


def scripts_in(paths: Iterable[Path]) -> list[Path]:
    """The given files, and the ``*.py`` below folders, without hidden ones; each once. Raises DataError."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            below = sorted(one for one in path.rglob("*.py") if one.is_file() and not _is_skipped(one, path))
            if not below:
                raise DataError(f"{path}: a folder without *.py files; give the folder of your scripts")
            found |= dict.fromkeys(below)
        elif path.is_file():
            found[path] = None
        else:
            raise DataError(f"{path}: no such file or folder")
    return list(found)


def port_all(paths: Sequence[Path]) -> list[Ported]:
    """Every script ported, in memory. Raises ConversionError for the first one that cannot be parsed."""
    return [port(path.read_bytes(), str(path)) for path in paths]


def difference(ported: Ported) -> str:
    """A unified diff, empty if nothing changes."""
    before, after = (text.decode(errors="replace").splitlines(keepends=True) for text in (ported.old, ported.new))
    name = ported.path.lstrip("/")
    lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def write(ported: Ported) -> None:
    """Replace the old text by the new one, atomically for concurrent readers."""
    path = Path(ported.path).resolve()
    beside = path.with_name(f".{path.name}.ported")
    with open_new(beside) as file:
        os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
        write_all(file, ported.new)
    os.replace(beside, path)


def _is_skipped(path: Path, folder: Path) -> bool:
    return any(part in _SKIPPED or part.startswith(".") for part in path.relative_to(folder).parts)
