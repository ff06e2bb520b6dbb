"""What TAB completes: click's machinery asked directly, and each installed shell with the script that we print."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleet_train.cli import COMMANDS, cli
from fleet_train.cli.completion import SHELLS, completions
from fleet_train.cluster.engines import CHOICES
from fleet_train.profile import profile_names
from tests.support.processes import clean_environ, python


def values(*words: str) -> list[str]:
    return [item.value for item in completions(cli, *words) if item.type == "plain"]


def kinds(*words: str) -> set[str]:
    return {item.type for item in completions(cli, *words)}


def test_commands_complete() -> None:
    assert sorted(values("")) == sorted(COMMANDS)
    assert values("pro") == ["profiles"]


@pytest.mark.parametrize("command", ["launch", "train", "plan"])
def test_profiles_complete_for_strategy(command: str) -> None:
    assert values(command, "--strategy", "") == profile_names()
    assert values(command, "--strategy", "multi") == ["multi_node"]
    assert values(command, "--strategy=multi") == ["multi_node"]
    assert kinds(command, "--strategy", "./mine") == {"file"}


@pytest.mark.parametrize("command", ["launch", "train", "plan", "recommend"])
def test_knobs_and_their_words_complete_for_set(command: str) -> None:
    assert values(command, "--set", "fuse_par") == ["fuse_parameter_groups_size"]
    assert values(command, "--set", "compression=in") == ["compression=int8", "compression=int4"]
    assert values(command, "--set", "use_local_sgd=") == ["use_local_sgd=true", "use_local_sgd=false"]
    assert values(command, "--set", "fetch_frequency=") == []
    assert "name" not in values(command, "--set", "")


def test_profiles_complete_as_the_argument_of_profiles() -> None:
    assert values("profiles", "powe") == ["powersgd"]


def test_engines_and_other_choices_complete() -> None:
    assert values("launch", "--engine", "") == list(CHOICES)
    assert values("launch", "--engine", "sl") == ["slurm"]
    assert "mlp" in values("train", "--model", "")
    assert values("completion", "") == list(SHELLS)


def test_flags_complete() -> None:
    assert values("launch", "--max") == ["--max_restarts"]
    assert values("train", "--epoc") == ["--epochs"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["launch", "--nproc_per_node", "2", ""], "file"),
        (["launch", "--log_dir", ""], "dir"),
        (["plan", "--script", ""], "file"),
        (["recommend", "--script", ""], "file"),
        (["train", "--data_dir", ""], "dir"),
        (["check", "--data", ""], "dir"),
        (["monitor", "--logdir", ""], "file"),
        (["port", ""], "file"),
    ],
)
def test_paths_are_completed_by_the_shell(words: list[str], kind: str) -> None:
    assert kinds(*words) == {kind}


def test_an_unknown_shell_is_refused_and_the_help_has_a_line_for_each() -> None:
    refused = CliRunner().invoke(cli, ["completion", "tcsh"])
    assert refused.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in refused.output
    text = CliRunner().invoke(cli, ["completion", "--help"]).output
    assert all(f"completion {shell}" in text for shell in SHELLS)


# In each shell: the script is read, TAB is pressed behind these words, what it offers is printed.
PRESS = {
    "bash": """
eval "$(python -m fleet_train completion bash)"
tab() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _fleet_train_completion fleet_train
    echo "${COMPREPLY[@]}"
}
tab fleet_train launch --strategy multi
tab fleet_train launch --strategy = multi
tab fleet_train launch --engine sl
fleet_train --version
""",
    "zsh": """
compdef() { : }
eval "$(python -m fleet_train completion zsh)"
compadd() { print -r -- $completions }
_describe() { print -r -- $completions_with_descriptions }
tab() { words=("$@"); CURRENT=$#; _fleet_train_completion }
tab fleet_train launch --strategy multi
tab fleet_train launch --strategy=multi
tab fleet_train launch --engine sl
fleet_train --version
""",
    "fish": """
python -m fleet_train completion fish | source
complete -C "fleet_train launch --strategy multi"
complete -C "fleet_train launch --strategy=multi"
complete -C "fleet_train launch --engine sl"
fleet_train --version
""",
}


@pytest.mark.parametrize("shell", list(SHELLS))
def test_a_shell_completes_with_the_script_that_we_print(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "press").write_text(PRESS[shell])
    environ = clean_environ({"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)})
    done = subprocess.run(
        [shell, str(tmp_path / "press")], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert done.stderr == ""
    profile, again, engine, version = done.stdout.splitlines()
    assert profile == "multi_node"
    assert again == ("multi_node" if shell == "bash" else "--strategy=multi_node")  # the whole word is replaced
    assert engine == "slurm"
    assert version.startswith("fleet_train ")


def test_nothing_of_it_is_imported_by_other_commands() -> None:
    code = (
        "import sys\nfrom fleet_train.cli import cli\nimport fleet_train.cli.launch\nsys.exit('paddle' in sys.modules)"
    )
    assert subprocess.run(python("-c", code), env=clean_environ(), check=False, timeout=180).returncode == 0
