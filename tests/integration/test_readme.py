"""The READMEs keep their word: every command is run by a test, the diff is the real one, every path exists."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.integration.test_examples import changed_lines
from tests.support import commands
from tests.support.processes import ROOT, clean_environ

READMES = ("README.md", "README_cn.md")
LAUNCH_FORMS = "tests/integration/test_launch_forms.py"

# Commands that another test runs, word for word but for addresses, ports and where the script is.
RUN_ELSEWHERE = {
    commands.FLEET_TRAIN: f"{LAUNCH_FORMS}::test_fleet_train_launch",
    commands.OLD_RECIPE: f"{LAUNCH_FORMS}::test_old_recipe_forms_one_job_with_the_stock_launcher",
    commands.TODAYS_IPS: f"{LAUNCH_FORMS}::test_todays_form_with_ips",
    commands.TODAYS_MASTER: f"{LAUNCH_FORMS}::test_todays_form_with_master",
    commands.PADDLECLOUD: f"{LAUNCH_FORMS}::test_fleet_train_launch_in_paddlecloud_pods",
    commands.ONE_PROCESS: f"{LAUNCH_FORMS}::test_plain_python_is_one_process",
    commands.INSTALL: "tests/integration/test_install.py::test_installed_package_finds_its_profiles_and_trains",
    # It runs tools/demo.py; that this is what make demo does, test_make_demo_is_the_demo_script says.
    "make demo": "tests/integration/train/test_demo.py::test_demo_learns_the_digits_and_says_where_everything_is",
    "make test": "tests/integration/test_readme.py::test_make_test_is_this_suite",
}
# Commands that are run here as they stand, next to a train.py: what their output must contain.
RUN_HERE = {
    "python -m fleet_train launch --nproc_per_node=2 --dry-run train.py": "train.py",
    "python -m fleet_train train --model mlp --data digits --epochs 3 --output_dir runs/mlp": "",
    "python -m fleet_train profiles": "multi_node",
    "python -m fleet_train profiles multi_node": "nccl_comm_num",
    "python -m fleet_train profiles --compatibility": "LocalSGD",
    "python -m fleet_train plan --script train.py": "bucket",
}


def text_of(readme: str) -> str:
    return (ROOT / readme).read_text()


@pytest.mark.parametrize("readme", READMES)
def test_every_command_is_run_by_a_test(readme: str) -> None:
    unmapped = [c for c in commands.shell_commands(text_of(readme)) if c not in RUN_ELSEWHERE.keys() | RUN_HERE.keys()]
    assert unmapped == [], f"add these commands of {readme} to RUN_HERE or RUN_ELSEWHERE"


def test_both_readmes_have_the_same_commands_in_the_same_order() -> None:
    english, chinese = (commands.shell_commands(text_of(readme)) for readme in READMES)
    assert english == chinese
    assert set(english) == RUN_ELSEWHERE.keys() | RUN_HERE.keys()


def test_only_bash_diff_blocks_are_used() -> None:
    languages = {lang for readme in READMES for lang in re.findall(r"^```(\w*)\n", text_of(readme), re.MULTILINE)}
    assert languages - {""} == {"bash", "diff"}, "a command in a block of another language would be missed"


@pytest.mark.parametrize("test", sorted(set(RUN_ELSEWHERE.values())))
def test_named_test_exists(test: str) -> None:
    path, name = test.split("::")
    functions = {n.name for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.FunctionDef)}
    assert name in functions


@pytest.mark.parametrize("command", RUN_HERE)
def test_command_runs(command: str, tmp_path: Path) -> None:
    script = ROOT / "tools" / "examples" / "train_with_fleet.py"
    (tmp_path / "train.py").write_bytes(script.read_bytes())
    done = subprocess.run(
        shlex.split(command),
        cwd=tmp_path,
        env=clean_environ(),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert RUN_HERE[command] in done.stdout


def test_make_demo_is_the_demo_script() -> None:
    assert ".venv/bin/python tools/demo.py" in _recipe_of("demo")
    assert (ROOT / "tools" / "demo.py").exists()


def test_make_test_is_this_suite() -> None:
    assert ".venv/bin/python -m pytest" in _recipe_of("test")


def _recipe_of(target: str) -> list[str]:
    done = subprocess.run(
        ["make", "-n", target, "VENV=.venv", "ARGS="],
        cwd=ROOT,
        env=clean_environ(),
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.strip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("readme", READMES)
def test_diff_is_the_real_one(readme: str) -> None:
    (block,) = commands.fenced_blocks(text_of(readme), "diff")
    shown = block.splitlines()
    removed, added = changed_lines()
    assert [line[1:] for line in shown if line.startswith("-")] == removed
    assert [line[1:] for line in shown if line.startswith("+")] == added
    script = (ROOT / "tools" / "examples" / "train_with_fleet.py").read_text().splitlines()
    context = [line[1:] for line in shown if line.startswith(" ") and line != " ..."]
    assert [line for line in context if line not in script] == []


@pytest.mark.parametrize("readme", READMES)
def test_every_linked_path_exists(readme: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text_of(readme))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_gpu_requirements_differ_only_in_paddle() -> None:
    cpu, gpu = (
        [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "--"))]
        for name in ("requirements.txt", "requirements-gpu.txt")
    )
    assert [line.replace("paddlepaddle-gpu==", "paddlepaddle==") for line in gpu] == cpu


def test_ci_runs_the_readmes_test_command() -> None:
    assert re.search(r"^make test( +#.*)?$", text_of("README.md"), re.MULTILINE)
