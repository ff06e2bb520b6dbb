"""The names that users import are fixed here, and the command line does not import Paddle."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import fleet_train
from tests.support.processes import ROOT, clean_environ, python

# Statements as users write them: literal, so that moving a module cannot move its name out of the test.
PINNED_FILE = Path(__file__).with_name("public_imports.txt")
PINNED = [line for line in PINNED_FILE.read_text().splitlines() if line and not line.startswith("#")]
TOLD_TO_USERS = [
    *(ROOT / name for name in ("README.md", "README_cn.md", "docs/notebook.ipynb")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "tools" / "examples").glob("*.py")),
    *sorted((ROOT / "tests" / "integration").glob("test_docs*.py")),
]
OTHER_NAMES = {"fleet_train.convert.fleet": "fleet_train.fleet"}
NEED_A_JOB = {"fleet_train.fleet.main_program", "fleet_train.fleet.startup_program"}

FACADE = {
    "agree",
    "all_reduce",
    "barrier_worker",
    "communication",
    "distributed_optimizer",
    "init",
    "is_first_worker",
    "load_persistables",
    "local_rank",
    "main_program",
    "node_num",
    "place",
    "request_stop",
    "save_inference_model",
    "save_persistables",
    "shutdown",
    "startup_program",
    "stop_requested",
    "worker_endpoints",
    "worker_index",
    "worker_num",
}


def run(*arguments: str, timeout_seconds: int = 180) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python(*arguments), env=clean_environ(), capture_output=True, text=True, timeout=timeout_seconds, check=False
    )


def modules_loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    done = run("-c", f"import json, sys\n{code}\njson.dump(sorted(sys.modules), sys.stderr)")
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}


def test_a_script_imports_three_names_and_starts_ranks_by_a_fourth() -> None:
    assert sorted(fleet_train.__all__) == ["DistributedStrategy", "fleet", "role_maker", "spawn"]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="DistributedStrategy, fleet, role_maker, spawn"):
        _ = fleet_train.flete


def test_facade_has_the_documented_functions() -> None:
    code = (
        "import json, sys\nfrom fleet_train import DistributedStrategy, fleet, role_maker\n"
        "assert callable(role_maker.PaddleCloudRoleMaker)\n"
        "assert callable(DistributedStrategy.from_profile) and callable(DistributedStrategy.from_stock)\n"
        "print(json.dumps([*dir(fleet), *getattr(fleet, '__all__', [])]))"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout.splitlines()[-1])) >= FACADE


def test_importing_the_package_loads_no_paddle() -> None:
    loaded = modules_loaded_by("import fleet_train")
    assert not loaded & {"paddle", "numpy", "visualdl", "pydantic"}


def test_spawning_itself_loads_no_paddle() -> None:
    loaded = modules_loaded_by("from fleet_train import spawn")
    assert not loaded & {"paddle", "numpy", "visualdl", "cloudpickle"}


EXECUTE = """
import json, sys
failures = {}
for line in json.loads(sys.argv[1]):
    try:
        exec(line, {})
    except Exception as error:
        failures[line] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    """What went wrong with each pinned import, in a process of its own: some import Paddle, one imports Ray."""
    done = run("-c", EXECUTE, json.dumps(PINNED), timeout_seconds=150)
    assert done.returncode == 0, done.stderr
    told: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return told


def cases() -> Iterator[object]:
    for line in PINNED:
        yield pytest.param(line, marks=pytest.mark.ray) if line.startswith("from fleet_train.ray") else line


@pytest.mark.parametrize("line", list(cases()))
def test_what_users_import_keeps_importing(line: str, failures: dict[str, str]) -> None:
    assert failures.get(line, "") == ""


def imported(statements: str) -> set[str]:
    """Dotted names that these statements import: ``fleet_train.train.Trainer``; modules by their own names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(statements)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imports_in(text: str) -> set[str]:
    """Imports of ours in a page, a notebook or a script, wherever in a line they stand."""
    found = re.findall(r"\b(?:from fleet_train[\w.]* import \w+(?:, \w+)*|import fleet_train[\w.]*)", text)
    return imported("\n".join(found))


@pytest.mark.parametrize("page", TOLD_TO_USERS, ids=lambda page: page.name)
def test_every_import_that_users_are_shown_is_pinned(page: Path) -> None:
    missing = imports_in(page.read_text()) - imported("\n".join(PINNED))
    assert not missing, f"{page.name} shows imports that {PINNED_FILE.name} does not hold: {sorted(missing)}"


def test_imports_are_found_in_fences_notebooks_and_sentences() -> None:
    page = '`import fleet_train.fleet as fleet` and\n+from fleet_train import a, b\n"from fleet_train.c import d\\n"'
    assert imports_in(page) == {"fleet_train.fleet", "fleet_train.a", "fleet_train.b", "fleet_train.c.d"}


def offered() -> Iterator[tuple[str, str]]:
    """Each module that has ``__all__`` with each name in it, read from the source."""
    for path in sorted((ROOT / "fleet_train").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
                yield from ((OTHER_NAMES.get(module, module), name) for name in ast.literal_eval(node.value))


def test_every_name_in_an_all_is_pinned() -> None:
    names = {f"{module}.{name}" for module, name in offered()}
    assert len(names) > 150
    missing = sorted(names - imported("\n".join(PINNED)) - NEED_A_JOB)
    assert not missing, f"public names that {PINNED_FILE.name} does not hold; users will rely on them: {missing}"
