"""Executes the code cells of a notebook in one namespace, as a kernel does: stdout has no descriptor, cells no file.

Writes a JSON list of what each cell has printed. Stops at the first cell that raises.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import sys
from pathlib import Path


def main(notebook: Path, written: Path) -> None:
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, object] = sys.modules["__main__"].__dict__
    printed = []
    for number, cell in enumerate(cells):
        source, name = "".join(cell["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(source, name, "exec"), namespace)
        printed.append(output.getvalue())
    written.write_text(json.dumps(printed))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
