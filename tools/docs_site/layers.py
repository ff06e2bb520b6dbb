"""Draw the layers of the package, and what each may import: the table ``MAY_IMPORT`` of tests/unit/test_layers.py.

Nothing is imported: the table is read from the source.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import cache
from html import escape

Table = Mapping[str, frozenset[str]]
TABLES = "tests/unit/test_layers.py"

BOX_WIDTH, BOX_HEIGHT, GAP, ROW = 112, 34, 36, 86
MARGIN = 24
# The same on a light page and on a dark one.
PAPER, INK, LINE, PLAIN, WITH_PADDLE = "#ffffff", "#1f2430", "#7b8494", "#eef1f6", "#dbe9ff"


def tables(source: str) -> tuple[Table, frozenset[str]]:
    """``MAY_IMPORT`` and ``LAYERS_WITH_PADDLE`` of the test's source, restricted to layers."""
    found: dict[str, ast.expr] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    rows = found["MAY_IMPORT"]
    if not isinstance(rows, ast.Dict):
        raise ValueError("tests/unit/test_layers.py: MAY_IMPORT is not written as a dictionary")
    names = [str(ast.literal_eval(key)) for key in rows.keys if key is not None]
    below = [
        frozenset() if isinstance(value, ast.Call) else frozenset(ast.literal_eval(value)) for value in rows.values
    ]
    table = {name: set_ for name, set_ in zip(names, below, strict=True) if not name.startswith("__")}
    return table, frozenset(ast.literal_eval(found["LAYERS_WITH_PADDLE"]))


def heights(table: Table) -> dict[str, int]:
    """The number of layers below each one on its longest path."""

    @cache
    def height(layer: str) -> int:
        return 1 + max((height(below) for below in table[layer]), default=-1)

    return {layer: height(layer) for layer in table}


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


def places(table: Table) -> dict[str, list[tuple[float, int]]]:
    """Positions: (middle in pixels, height) of each layer, and of each point of the lines from layers downwards.

    A line that passes a row has its own position in it, so that it runs between the boxes and not behind them. Its
    name is ``layer>layer``. Each row is sorted by where its members lead.
    """
    level = heights(table)
    ways = {f"{layer}>{below}": (level[layer], level[below], below) for layer, below in drawn_imports(table)}
    found: dict[str, list[tuple[float, int]]] = {}
    for height in range(max(level.values()) + 1):
        wanted: dict[str, float] = {}
        for layer in sorted(layer for layer in table if level[layer] == height):
            ends = [(found.get(f"{layer}>{below}") or found[below])[0][0] for below in table[layer]]
            wanted[layer] = sum(ends) / len(ends) if ends else 0.0
        for way, (top, bottom, below) in sorted(ways.items()):
            if bottom < height < top:
                wanted[way] = (found.get(way) or found[below])[0][0]
        for name, middle in _in_a_row(wanted, table).items():
            found.setdefault(name, []).insert(0, (middle, height))
    return found


def _in_a_row(wanted: Mapping[str, float], table: Table) -> dict[str, float]:
    """The middles of the members of a row, side by side, around the mean of their preferred positions."""
    names = sorted(wanted, key=lambda name: (wanted[name], name))
    widths = [BOX_WIDTH + GAP if name in table else GAP for name in names]
    start = sum(wanted.values()) / len(wanted) - sum(widths) / 2
    return {name: start + sum(widths[:index]) + widths[index] / 2 for index, name in enumerate(names)}


def picture(table: Table, with_paddle: frozenset[str]) -> str:
    """The picture as SVG: one row of boxes for each height, the highest on top."""
    spots = places(table)
    top = max(height for way in spots.values() for _, height in way)
    left = min(x for way in spots.values() for x, _ in way) - BOX_WIDTH / 2 - MARGIN
    width = max(x for way in spots.values() for x, _ in way) + BOX_WIDTH / 2 + MARGIN - left
    height = MARGIN + top * ROW + BOX_HEIGHT + 2 * MARGIN
    x = {layer: spots[layer][0][0] - BOX_WIDTH / 2 - left for layer in table}
    y = {layer: MARGIN + (top - spots[layer][0][1]) * ROW for layer in table}
    lines = []
    for layer, below in drawn_imports(table):
        way = [*spots[layer], *spots.get(f"{layer}>{below}", []), *spots[below]]
        lines.append(_line([(x - left, MARGIN + (top - height) * ROW) for x, height in way]))
    boxes = [
        f'<rect x="{x[layer]:.1f}" y="{y[layer]}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" '
        f'fill="{WITH_PADDLE if layer in with_paddle else PLAIN}"/>'
        f'<text x="{x[layer] + BOX_WIDTH / 2:.1f}" y="{y[layer] + BOX_HEIGHT / 2 + 5}">{escape(layer)}</text>'
        for layer in sorted(table)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" '
            f'height="{height}" role="img" font-family="system-ui, sans-serif" font-size="15">',
            "<title>The layers of fleet_train: each imports only layers below it</title>",
            f'<rect width="100%" height="100%" fill="{PAPER}"/>',
            f'<g fill="none" stroke="{LINE}" stroke-width="1.4">',
            *lines,
            "</g>",
            f'<g stroke="{LINE}" text-anchor="middle">',
            *(box.replace("<text", f'<text stroke="none" fill="{INK}"') for box in boxes),
            "</g>",
            f'<g fill="{INK}" font-size="13">',
            f'<rect x="{MARGIN}" y="{height - 31}" width="22" height="14" fill="{WITH_PADDLE}" stroke="{LINE}"/>',
            f'<text x="{MARGIN + 30}" y="{height - 19}">may import Paddle</text>',
            "</g>",
            "</svg>",
            "",
        ]
    )


def _line(points: list[tuple[float, int]]) -> str:
    """From the bottom of a box, past the rows between, to the top of another one. Points: (middle, top of the row)."""
    (x, y), *others = points
    path = f"M{x:.1f} {y + BOX_HEIGHT}"
    for x_next, y_next in others:
        path += f" C{x:.1f} {y_next - 12} {x_next:.1f} {y + BOX_HEIGHT + 12} {x_next:.1f} {y_next}"
        path += f" V{y_next + BOX_HEIGHT}" if (x_next, y_next) != others[-1] else ""
        x, y = x_next, y_next
    return f'<path d="{path}"/>'
