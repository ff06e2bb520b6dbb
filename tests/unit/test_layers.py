"""The layers of docs/design.md: imports go one way, and only certain layers import Paddle.

Imports inside functions, below TYPE_CHECKING and through import_module("...") count like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.processes import ROOT

PACKAGE = ROOT / "fleet_train"

# The column "may import" of the table in docs/design.md; what a layer may import, those above it may too.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "lazy": set(),
    "timeouts": set(),
    "log": {"errors"},
    "profile": {"files", "log", "timeouts"},
    "cluster": {"profile", "lazy"},
    "plan": {"cluster", "profile"},
    "collectives": {"plan"},
    "convert": {"collectives"},
    "data": {"cluster"},
    "train": {"fleet", "convert", "data"},
    "launch": {"cluster", "profile"},
    "spawning": {"convert", "launch"},
    "ray": {"spawning"},
    "selftest": {"fleet", "convert", "launch"},
    "recommend": {"selftest"},
    "doctor": {"selftest"},
    "port": {"files", "log", "timeouts"},
    "manifest": {"errors", "timeouts"},
    "compat": {"convert", "data"},
    "cli": {"train", "launch", "port", "selftest", "recommend", "manifest", "doctor"},
    "fleet": {"convert"},
    "__init__": {
        "convert",
        "lazy",
        "spawning",
    },  # by name, on first use; and cluster, whose correction is as light as errors
    "__main__": {"cli"},
}
# Narrower than the table: the trainer is a user of the facade like any other.
NOT_EVEN_INDIRECTLY = {"train": {"collectives"}}
LAYERS_WITH_PADDLE = {"collectives", "compat", "convert", "data", "recommend", "selftest", "train"}


def allowed(layer: str) -> set[str]:
    direct = MAY_IMPORT[layer]
    return (direct.union(*(allowed(one) for one in direct))) - NOT_EVEN_INDIRECTLY.get(layer, set())


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, wherever in it."""
    package = ("fleet_train", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module) if part)
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and (name := _literal_module(node)):
            yield node.lineno, name


def _literal_module(call: ast.Call) -> str | None:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in {"import_module", "__import__"} or not call.args or not isinstance(call.args[0], ast.Constant):
        return None
    return str(call.args[0].value)


def layers_imported(path: Path) -> Iterator[tuple[int, str]]:
    for line, name in imported_names(path):
        parts = name.split(".")
        if parts[0] == "fleet_train" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            yield line, parts[1]


def test_every_layer_is_in_the_table() -> None:
    assert {layer_of(path) for path in modules()} <= MAY_IMPORT.keys()


@pytest.mark.parametrize("layer", sorted(MAY_IMPORT))
def test_layer_imports_only_layers_below_it(layer: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {layer} must not import {other}; it may import {sorted(allowed(layer))}"
        for path in modules()
        if layer_of(path) == layer
        for line, other in layers_imported(path)
        if other != layer and other not in allowed(layer)
    ]
    assert wrong == []


def test_paddle_is_imported_only_where_programs_are_made_or_run() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in modules()
        if layer_of(path) not in LAYERS_WITH_PADDLE
        for line, name in imported_names(path)
        if name.split(".")[0] == "paddle"
    ]
    assert wrong == []


def test_visualdl_is_imported_only_by_its_sink_and_in_its_servers_process() -> None:
    importers = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        for _, name in imported_names(path)
        if name.startswith("visualdl")
    }
    assert importers == {"train/metrics.py", "train/dashboard_server.py"}


def test_numba_is_imported_only_by_the_loops_that_it_compiles_and_by_who_asks_for_them() -> None:
    importers = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        for _, name in imported_names(path)
        if name.split(".")[0] in ("numba", "llvmlite") or name.startswith("fleet_train.collectives.methods.codec_loops")
    }
    assert importers == {"collectives/methods/codec_loops.py", "collectives/methods/codec.py"}


def test_every_folder_of_the_package_is_installed() -> None:
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "fleet_train").rglob("__init__.py")}
    listed = re.search(r"^packages = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE)
    assert listed is not None
    assert set(re.findall(r'"([^"]+)"', listed[1])) == folders | {"fleet_train.strategies"}


def test_table_is_the_one_in_the_design() -> None:
    table = {}
    for line in (ROOT / "docs" / "design.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if line.startswith("| `") and not line.startswith("| `fleet_train/") and len(cells) == 3:  # not the budgets
            table[cells[0].strip("`/")] = set(cells[2].replace(",", " ").split()) - {"nothing"}
    table["cli"] = {
        "doctor",
        "train",
        "launch",
        "port",
        "recommend",
        "selftest",
        "manifest",
    }  # the design says "all": these reach everything that commands use
    assert table == {layer: MAY_IMPORT[layer] for layer in MAY_IMPORT if not layer.startswith("__")}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph() -> dict[str, set[str]]:
    return _graph_of(PACKAGE)


@cache
def _graph_of(package: Path) -> dict[str, set[str]]:  # noqa: ARG001
    """Who imports whom, imports inside functions and below TYPE_CHECKING included.

    Without ``fleet_train`` itself and the names that packages load on first use, which point at every layer.
    """
    paths = {module_of(path): path for path in modules()}
    graph: dict[str, set[str]] = {}
    for module, path in paths.items():
        found = set()
        if module != "fleet_train" and "load_on_use" not in path.read_text():
            for _, name in imported_names(path):
                found |= {one for one in (name, name.rpartition(".")[0]) if one in paths and one != "fleet_train"}
        graph[module] = {one for one in found if one != module and not module.startswith(f"{one}.")}
    return graph


def order(graph: dict[str, set[str]]) -> list[str]:
    """Raises graphlib.CycleError, with the cycle in its arguments."""
    return list(TopologicalSorter(graph).static_order())


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert set(order(import_graph())) >= {"fleet_train.errors", "fleet_train.cli"}


@pytest.mark.parametrize("folder", sorted({path.parent for path in modules()}), ids=lambda path: path.name)
def test_folders_import_one_way(folder: Path) -> None:
    """What stands side by side in a folder, modules and folders alike, can be read in one order."""
    prefix = module_of(folder / "__init__.py") + "."
    siblings: dict[str, set[str]] = {}
    for module, imported in import_graph().items():
        if module.startswith(prefix):
            here = module.removeprefix(prefix).split(".")[0]
            there = {one.removeprefix(prefix).split(".")[0] for one in imported if one.startswith(prefix)}
            siblings.setdefault(here, set()).update(there - {here})
    order(siblings)


def test_every_folder_says_who_lives_there() -> None:
    silent = []
    for path in PACKAGE.rglob("__init__.py"):
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        if not first.endswith("."):
            silent.append(str(path.relative_to(ROOT)))
    assert silent == []


def test_cycles_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "fleet_train")
    for name, text in {
        "plan/a.py": "from fleet_train.plan.inner import b\n",
        "plan/inner/b.py": "if TYPE_CHECKING:\n    from fleet_train.plan.c import X\n",
        "plan/c.py": "def f():\n    import fleet_train.plan.a\n",
    }.items():
        module = tmp_path / "fleet_train" / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    with pytest.raises(CycleError):
        order(import_graph())


def test_reader_of_imports_sees_lazy_relative_and_named_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    lazy = "def f():\n    from ..convert import fleet\n    import paddle.static\n"
    (tmp_path / "plan").mkdir()
    module = tmp_path / "plan" / "buckets.py"
    module.write_text(lazy + "import_module('visualdl')\nfrom . import x\n")
    assert sorted(imported_names(module)) == [
        (2, "fleet_train.convert.fleet"),
        (3, "paddle.static"),
        (4, "visualdl"),
        (5, "fleet_train.plan.x"),
    ]
