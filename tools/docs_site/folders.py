"""Write, or check, ``docs/layout.md``: what lives in each folder of the package.

``python -m tools.docs_site.folders`` writes it; ``--check`` fails if it is out of date, or if a folder's ``__init__``
has no docstring to quote.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

PACKAGE = "fleet_train"
HEAD = """# Where things are

Made by `python -m tools.docs_site.folders`; do not edit: each line is the first sentence of what the folder's
`__init__.py` says. Which way a gradient goes through them: [how it works](how-it-works.md).

Each box imports only what is below it; a line leads from a box to those that it names itself, unless a box between them
leads there. A box that is no folder of the table is a single module.

![The layers of the package and what they import](images/layers.svg)

| folder | what lives there |
| --- | --- |
"""


def first_sentence(text: str) -> str:
    """The first sentence of a docstring's first paragraph, on one line, for a cell of a table."""
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    # A full stop ends it if a capital letter or nothing follows: not the one of "module.py" or "e.g. this".
    sentence = re.split(r"(?<=[.?!])\s+(?=[A-Z`])", paragraph)[0]
    return sentence.replace("|", "\\|")


def docstring_of(folder: Path) -> str:
    """What a folder's ``__init__`` says of it; empty if it says nothing."""
    return ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""


def folders(root: Path) -> list[Path]:
    """Every folder of the package that is a package itself, parents first."""
    return sorted(path.parent for path in (root / PACKAGE).rglob("__init__.py"))


def dotted_name(folder: Path, root: Path) -> str:
    """As imports name a folder."""
    return ".".join(folder.relative_to(root).parts)


def page(root: Path) -> str:
    """The text of ``docs/layout.md``."""
    rows = ((folder.relative_to(root).as_posix(), first_sentence(docstring_of(folder))) for folder in folders(root))
    return HEAD + "".join(f"| `{name}/` | {sentence} |\n" for name, sentence in rows)


def problems(root: Path) -> list[str]:
    """One line for each folder that says nothing, and one if the page is out of date."""
    silent = [
        f"{folder.relative_to(root)}/__init__.py: needs a docstring that says what lives in the folder"
        for folder in folders(root)
        if not docstring_of(folder)
    ]
    written = root / "docs" / "layout.md"
    if not written.is_file() or written.read_text(encoding="utf-8") != page(root):
        silent.append("docs/layout.md: is not what the folders say; run: python -m tools.docs_site.folders")
    return silent


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if the page is written or up to date, else 1 with the reasons on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs_site.folders", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    root = Path(__file__).resolve().parents[2]
    if not parser.parse_args(arguments).check:
        (root / "docs" / "layout.md").write_text(page(root), encoding="utf-8")
        print("wrote docs/layout.md")
        return 0
    found = problems(root)
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
