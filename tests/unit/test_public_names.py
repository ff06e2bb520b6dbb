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
        python(*arguments), env=clean_environ(), capture_output=True, text=True, timeout=60, check=False
    )


def modules_loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    done = run("-c", f"import json, sys\n{code}\njson.dump(sorted(sys.modules), sys.stderr)")
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in json.loads(done.stderr.splitlines()[-1])}


def test_a_script_imports_three_names() -> None:
    assert sorted(fleet_train.__all__) == ["DistributedStrategy", "fleet", "role_maker"]


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="DistributedStrategy, fleet, role_maker"):
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


@pytest.mark.parametrize("command", ["launch", "train", "check", "plan", "port", "profiles"])
def test_help_of_every_command_loads_no_paddle(command: str) -> None:
    code = (
        "from fleet_train.cli import cli\n"
        f"try:\n    cli(['{command}', '--help'])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
    )
    assert not modules_loaded_by(code) & {"paddle", "visualdl", "sklearn", "matplotlib"}


def test_launch_help_answers_without_the_heavy_libraries() -> None:
    loaded = modules_loaded_by("from fleet_train.cli import cli\ncli(['launch', '--help'], standalone_mode=False)")
    # Half a second is the promise; on a loaded machine only the cause can be tested: what is imported.
    assert not loaded & {"paddle", "visualdl", "sklearn", "pandas", "matplotlib", "safetensors"}


def test_help_of_port_answers_without_the_syntax_library() -> None:
    loaded = modules_loaded_by("from fleet_train.cli import cli\ncli(['port', '--help'], standalone_mode=False)")
    assert "libcst" not in loaded
