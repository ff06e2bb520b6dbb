"""What users import is pinned here, and the command line stays light: it must not pay for Paddle."""

from __future__ import annotations

import json
import subprocess

import pytest

import fleet_train
from tests.support.processes import clean_environ, python

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


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python(*arguments), env=clean_environ(), capture_output=True, text=True, timeout=180, check=False
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
