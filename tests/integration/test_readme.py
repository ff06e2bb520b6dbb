"""The READMEs keep their word: both say the same, the diff is the real one, every path exists.

That every command is run by a test, test_docs.py sees to.
"""

from __future__ import annotations

import re
import subprocess

import pytest
from coverage import Coverage

from tests.integration.test_examples import changed_lines
from tests.support import commands
from tests.support.processes import ROOT, clean_environ

READMES = ("README.md", "README_cn.md")
# What tests/integration/test_launch_forms.py and test_install.py run.
RUN_BY_NAME = (
    commands.FLEET_TRAIN,
    commands.OLD_RECIPE,
    commands.TODAYS_IPS,
    commands.TODAYS_MASTER,
    commands.ONE_PROCESS,
    commands.INSTALL,
)


def text_of(readme: str) -> str:
    return (ROOT / readme).read_text()


def test_both_readmes_have_the_same_commands_in_the_same_order() -> None:
    english, chinese = (commands.shell_commands(text_of(readme)) for readme in READMES)
    assert english == chinese
    assert [command for command in RUN_BY_NAME if command not in english] == []


def test_only_bash_diff_blocks_are_used() -> None:
    languages = {lang for readme in READMES for lang in re.findall(r"^```(\w*)\n", text_of(readme), re.MULTILINE)}
    assert languages - {""} == {"bash", "diff"}, "a command in a block of another language would be missed"


def test_make_demo_is_the_demo_script() -> None:
    assert ".venv/bin/python tools/demo.py" in _recipe_of("demo")
    assert (ROOT / "tools" / "demo.py").exists()


def test_make_test_is_this_suite() -> None:
    """``make test`` and ``make test-long`` leave no test out."""
    short, long = (_recipe_of(target)[-1] for target in ("test", "test-long"))
    assert short.startswith(".venv/bin/python -m pytest ")
    assert short.endswith(' -m "not long"')
    assert short.removesuffix('"not long"') == long.removesuffix("long")


def test_make_coverage_runs_the_same_tests_of_two_folders() -> None:
    measured, short = (_recipe_of(target)[-1] for target in ("coverage", "test"))
    assert measured.startswith(f"{short} --cov ")
    assert measured.endswith(" tests/unit tests/parallel")
    settings = Coverage(config_file=str(ROOT / "pyproject.toml"))
    asked = {name: settings.get_option(f"run:{name}") for name in ("source", "branch", "patch")}
    assert asked == {"source": ["fleet_train"], "branch": True, "patch": ["subprocess"]}


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


def test_gpu_requirements_differ_only_in_paddle_and_what_computes_on_cpus() -> None:
    cpu, gpu = (
        [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith(("#", "--"))]
        for name in ("requirements.txt", "requirements-gpu.txt")
    )
    # numba compiles the codec's loops on CPUs; on GPUs the codec is made of Paddle's operators.
    shared = [line for line in cpu if not line.startswith("numba==")]
    assert len(shared) == len(cpu) - 1
    assert [line.replace("paddlepaddle-gpu==", "paddlepaddle==") for line in gpu] == shared


def test_ci_runs_the_readmes_test_command() -> None:
    assert re.search(r"^make test( +#.*)?$", text_of("README.md"), re.MULTILINE)
