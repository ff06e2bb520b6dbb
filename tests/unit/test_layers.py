"""Rules that the package's sources keep: imports go one way, only certain layers import Paddle, nothing is measured by
the wall clock, and no pickle is read.

Imports inside functions, below TYPE_CHECKING and through import_module("...") count like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from tests.support.processes import ROOT

PACKAGE = ROOT / "fleet_train"

# The column "may import" of the table in docs/design.md; what a layer may import, those above it may too.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "lazy": set(),
    "timeouts": set(),
    "log": {"errors"},
    "profile": {"files", "lazy", "log", "timeouts"},
    "cluster": {"profile", "lazy"},
    "plan": {"cluster", "profile"},
    "collectives": {"plan"},
    "compression": {"collectives"},
    "convert": {"collectives"},
    "data": {"cluster"},
    "train": {"fleet", "convert", "data"},
    "launch": {"cluster", "profile"},
    "spawning": {"convert", "launch"},
    "ray": {"spawning"},
    "selftest": {"fleet", "convert", "launch"},
    "recommend": {"selftest"},
    "doctor": {"selftest"},
    "port": {"profile"},
    "compat": {"convert", "data"},
    "hosts": {"launch"},
    "cli": {"train", "launch", "hosts", "port", "selftest", "recommend", "doctor"},
    "fleet": {"convert"},
    "__init__": {"convert", "lazy", "spawning"},  # on first use; and cluster, whose correction is as light as errors
    "__main__": {"cli"},
}
# Narrower than the table: the trainer is a user of the facade like any other.
NOT_EVEN_INDIRECTLY = {"train": {"collectives"}}
LAYERS_WITH_PADDLE = {"collectives", "compat", "compression", "convert", "data", "recommend", "selftest", "train"}


def allowed(layer: str) -> set[str]:
    direct = MAY_IMPORT[layer]
    return (direct.union(*(allowed(one) for one in direct))) - NOT_EVEN_INDIRECTLY.get(layer, set())


@cache
def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def layers_imported(path: Path) -> Iterator[tuple[int, str]]:
    for line, name in imported_names(path):
        parts = name.split(".")
        if parts[0] == "fleet_train" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            yield line, parts[1]


def test_a_layer_imports_only_layers_below_it() -> None:
    assert {layer_of(path) for path in modules()} <= MAY_IMPORT.keys()
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: must not import {other}; it may import {sorted(allowed(layer_of(path)))}"
        for path in modules()
        for line, other in layers_imported(path)
        if other != layer_of(path) and other not in allowed(layer_of(path))
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


def importers(*names: str) -> set[str]:
    return {
        str(path.relative_to(PACKAGE))
        for path in modules()
        for _, name in imported_names(path)
        if name.startswith(names)
    }


def test_what_is_slow_to_import_is_imported_by_who_needs_it() -> None:
    assert importers("visualdl") == {"train/metrics.py", "train/dashboard_server.py"}  # its sink and its server
    compiled = ("numba", "llvmlite", "fleet_train.collectives.methods.codec_loops")
    assert importers(*compiled) == {"collectives/methods/codec_loops.py", "collectives/methods/codec.py"}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def import_graph() -> dict[str, set[str]]:
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


def test_folders_import_one_way() -> None:
    """What stands side by side in a folder, modules and folders alike, can be read in one order: else
    graphlib.CycleError has the cycle in its arguments. So no module imports itself by way of others either."""
    for folder in sorted({path.parent for path in modules()}):
        prefix = module_of(folder / "__init__.py") + "."
        siblings: dict[str, set[str]] = {}
        for module, imported in import_graph().items():
            if module.startswith(prefix):
                here = module.removeprefix(prefix).split(".")[0]
                there = {one.removeprefix(prefix).split(".")[0] for one in imported if one.startswith(prefix)}
                siblings.setdefault(here, set()).update(there - {here})
        list(TopologicalSorter(siblings).static_order())


def found_in_sources(words: str) -> dict[str, set[str]]:
    found = {
        str(path.relative_to(PACKAGE)): set(re.findall(words, path.read_text(), re.MULTILINE)) for path in modules()
    }
    return {name: uses for name, uses in found.items() if uses}


def test_the_wall_clock_is_shown_to_people_and_orders_runs_and_nothing_else() -> None:
    """It can be set, by hand and by NTP."""
    calls = r"\btime\.(?:time|time_ns|localtime|gmtime|ctime)\b|\b(?:datetime|date)\.(?:now|utcnow|today)\b"
    of_files = r"\bst_[acm]time(?:_ns)?\b|\bgetmtime\b|\bcreate_time\b"
    imported = r"^from (?:time|datetime) import .*\b(?:time|time_ns|now|localtime)\b"
    assert found_in_sources(f"{calls}|{of_files}|{imported}") == {
        "doctor/measure_apart.py": {"st_mtime", "time.time"},  # what a killed doctor left, by an hour and more
        "doctor/pairs.py": {"time.time"},  # the clocks of two machines are what is compared
        "hosts/agent.py": {"st_mtime_ns"},  # whether a log is still the same; compared with itself
        "launch/spares.py": {"st_mtime_ns"},  # whether a script is still the same; compared with itself
        "selftest/record.py": {"datetime.now"},  # the date of a record
        "recommend/report.py": {"datetime.now"},  # the date at the top of a written profile
        "train/metrics.py": {"time.time"},  # of each record; records are ordered by their steps
        "train/prometheus_sink.py": {"time.time"},  # of the newest record, for people's eyes
        "train/checkpoint/storage.py": {"time.time"},  # a run's begin, made later than that of every run seen then
    }


def test_files_are_never_read_as_pickles_or_as_yaml_with_objects() -> None:
    pickles = r"\b(?:c?pickle|cloudpickle|dill|joblib|marshal)\.(?:loads?|Unpickler)\b"
    others = r"\byaml\.(?:unsafe_load|full_load|load\((?!.*Safe))|\b(?:np|numpy|paddle|torch)\.load\("
    assert found_in_sources(f"{pickles}|{others}") == {
        "spawning/shipping.py": {"cloudpickle.loads"}  # from files in memory of this spawn's processes
    }


def test_every_folder_of_the_package_is_installed() -> None:
    listed = re.search(r"^packages = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL)
    assert listed is not None
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("*.py")}
    assert set(re.findall(r'"([\w.]+)"', listed[1])) == folders | {"fleet_train.strategies"}
