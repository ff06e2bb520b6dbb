"""Draw the layers of the package, and what each imports: the table ``MAY_IMPORT`` of tests/unit/test_layers.py.

Nothing is imported: the table is read from the source.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from html import escape

Table = Mapping[str, frozenset[str]]
TABLES = "tests/unit/test_layers.py"

BOX_WIDTH, BOX_HEIGHT, ROW, MARGIN = 130, 26, 34, 24
# The same on a light page and on a dark one.
PAPER, INK, LINE, PLAIN, WITH_PADDLE = "#ffffff", "#1f2430", "#7b8494", "#eef1f6", "#dbe9ff"


def tables(source: str) -> tuple[Table, frozenset[str]]:
    """``MAY_IMPORT`` and ``LAYERS_WITH_PADDLE`` of the test's source, restricted to layers."""
    assignments = [node for node in ast.parse(source).body if isinstance(node, (ast.Assign, ast.AnnAssign))]
    targets = {node: node.target if isinstance(node, ast.AnnAssign) else node.targets[0] for node in assignments}
    found = {target.id: node.value for node, target in targets.items() if isinstance(target, ast.Name)}
    rows = found["MAY_IMPORT"]
    if not isinstance(rows, ast.Dict):
        raise ValueError(f"{TABLES}: MAY_IMPORT is not written as a dictionary")
    named = {ast.literal_eval(key): below for key, below in zip(rows.keys, rows.values, strict=True) if key}
    table = {
        name: frozenset[str]() if isinstance(below, ast.Call) else frozenset[str](ast.literal_eval(below))
        for name, below in named.items()
        if not name.startswith("__")
    }
    with_paddle = found["LAYERS_WITH_PADDLE"]
    return table, frozenset(ast.literal_eval(with_paddle) if with_paddle else ())


def ordered(table: Table) -> list[str]:
    """The layers from top to bottom: by the number of layers below each one on its longest path."""

    @cache
    def height(layer: str) -> int:
        return 1 + max((height(below) for below in table[layer]), default=-1)

    return sorted(table, key=lambda layer: (-height(layer), layer))


def drawn_imports(table: Table) -> list[tuple[str, str]]:
    """(layer, layer below): every import that is not implied by two others."""

    @cache
    def reached(layer: str) -> frozenset[str]:
        return table[layer].union(*(reached(below) for below in table[layer]))

    return [
        (layer, below)
        for layer in sorted(table)
        for below in sorted(table[layer])
        if not any(below in reached(other) for other in table[layer] if other != below)
    ]


def picture(table: Table, with_paddle: frozenset[str]) -> str:
    """The picture as SVG: a column of boxes, and beside it an arc for each import."""
    names, arrow = ordered(table), "M0 0L8 -4V4z"
    tops = {name: MARGIN + ROW * number for number, name in enumerate(names)}
    right, height = MARGIN + BOX_WIDTH, MARGIN + ROW * len(names) + 30
    arcs, boxes = [], []
    for layer, below in drawn_imports(table):
        start, end = tops[layer] + BOX_HEIGHT - 8, tops[below] + 8
        reach = right + 30 + 0.62 * (end - start)
        arcs.append(f'<path d="M{right} {start}C{reach:.0f} {start} {reach:.0f} {end} {right + 8} {end}"/>')
        arcs.append(f'<path d="{arrow}" transform="translate({right} {end})" fill="{LINE}"/>')
    for name, top in tops.items():
        colour = WITH_PADDLE if name in with_paddle else PLAIN
        boxes.append(f'<rect x="{MARGIN}" y="{top}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" fill="{colour}"/>')
        middle = f'x="{MARGIN + BOX_WIDTH / 2:.0f}" y="{top + 18}"'
        boxes.append(f'<text {middle} stroke="none" fill="{INK}" text-anchor="middle">{escape(name)}</text>')
    boxes.append(f'<rect x="{MARGIN}" y="{height - 26}" width="22" height="14" fill="{WITH_PADDLE}"/>')
    boxes.append(f'<text x="{MARGIN + 30}" y="{height - 14}" stroke="none" fill="{INK}">may import Paddle</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 560 {height}" width="560" height="{height}" '
            'role="img" font-family="system-ui, sans-serif" font-size="15">',
            "<title>The layers of fleet_train: each imports only layers below it</title>",
            f'<rect width="100%" height="100%" fill="{PAPER}"/>',
            f'<g fill="none" stroke="{LINE}" stroke-width="1.4">',
            *arcs,
            *boxes,
            "</g>",
            "</svg>",
            "",
        ]
    )
