"""Commands: what `--help` imports, what TAB completes, and options of the trainer that would have no effect.

Since a machine may be busy, the test of `--help` checks what is imported instead of the time.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from fleet_train.cli import COMMANDS, GONE, cli, launch, main, stacks, train
from fleet_train.cluster.engines import CHOICES
from fleet_train.errors import GUIDE, ClusterError, FleetTrainError
from fleet_train.profile import profile_names
from fleet_train.train import reference
from fleet_train.train.config import TrainConfig
from tests.support.processes import ROOT, clean_environ, output_of, python

# Each takes a tenth of a second or more to import, or pulls in one that does.
HEAVY = set(
    "asyncio flask google libcst llvmlite matplotlib numba paddle pandas psutil pydantic safetensors scipy sklearn "
    "visualdl".split()
)


HELPS = """
import contextlib, io, json, sys
from fleet_train.cli import COMMANDS, cli
loaded = {}
for words in ([], *([command] for command in COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            cli([*words, "--help"])
        except SystemExit as end:
            assert not end.code, end.code
    assert "Usage: " in printed.getvalue(), words
    loaded[" ".join(words)] = sorted({name.partition(".")[0] for name in sys.modules})
print(json.dumps(loaded))
"""


def test_ctrl_c_before_a_command_has_begun_ends_it_as_any_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch.command, "callback", interrupted)
    monkeypatch.setattr("sys.argv", ["fleet_train", "launch", "train.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err.strip() == ""


def test_the_end_of_a_truncated_file_is_no_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    def truncated(**_: object) -> None:
        raise EOFError("No data left in file")

    monkeypatch.setattr(launch.command, "callback", truncated)
    monkeypatch.setattr("sys.argv", ["fleet_train", "launch", "train.py"])
    with pytest.raises(EOFError, match="No data left in file"):
        main()


def test_what_click_refuses_is_an_error_of_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fleet_train", "profile"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "No such command 'profile'" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "instead"), GONE.items())
def test_a_command_that_was_here_before_is_refused_with_what_to_use_instead(name: str, instead: str) -> None:
    result = CliRunner().invoke(cli, [name, "--data", "x"])
    assert (result.exit_code, f"No such command '{name}': {instead}." in result.output) == (2, True)


@pytest.mark.parametrize(("flag", "instead"), launch.INSTEAD.items())
def test_a_flag_of_another_launcher_is_refused_with_what_to_write(flag: str, instead: str) -> None:
    own = {name for each in launch.command.params for name in each.opts}
    typed = flag[:2] + flag[2:].replace("_", "-")
    for words in ([flag, "4"], [f"{flag}=4"], [typed, "4"], ["--nproc_per_node", "2", "--strict", typed, "4"]):
        result = CliRunner().invoke(cli, ["launch", *words, "train.py"])
        assert result.exit_code == 2
        assert re.search(f"No such option '({flag}|{typed})': {re.escape(instead)}\\.", " ".join(result.output.split()))
    written = set(re.findall(r"(?<![\w-])--?[a-zA-Z]\w*(?:-\w+)*", re.sub(r"python -m .*|~.*", "", instead)))
    assert written <= own, "the flags to write instead are this launcher's"
    assert flag not in own


def test_flags_of_other_launchers_name_the_page_about_other_frameworks() -> None:
    torch, mpi = "--nnodes --node_rank --master_addr --rdzv_endpoint".split(), "-np -H -x --hostfile --min_np".split()
    for flag in (*torch, *mpi):
        assert launch.INSTEAD[flag].endswith(f" ({GUIDE})")
    assert (ROOT / GUIDE).is_file()
    assert not any(GUIDE in launch.INSTEAD[flag] for flag in ("--master", "--max_restart"))


@pytest.mark.parametrize("words", ["{} --nnodes 2 -np 4 -x A --local_rank=0", "-- {} -np 4", "-m {} --node_rank 1"])
def test_flags_behind_the_script_are_the_scripts(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    program = words.format("train" if "-m" in words.split() else "train.py")
    result = CliRunner().invoke(cli, ["launch", "--verify_joint_batch", "--dry-run", *program.split()])
    assert (result.exit_code, result.exception) == (0, None)
    assert result.output.splitlines()[-1].endswith(f" -u {program.removeprefix('-- ')}")


@pytest.mark.parametrize("typed", ["-np2", "-n2", "-N2", "-Ha:2", "-Hpc1,pc2", "-xNCCL_DEBUG=INFO"])
def test_a_flag_that_is_glued_to_its_value_is_known(typed: str) -> None:
    result = CliRunner().invoke(cli, ["launch", typed, "train.py"])
    assert result.exit_code == 2
    flag = next(each for each in ("-np", "-n", "-N", "-H", "-x") if typed.startswith(each))
    assert launch.INSTEAD[flag] in " ".join(result.output.split())


@pytest.mark.parametrize("word", ["gpu", "auto"])
def test_a_process_for_each_gpu_is_the_default(word: str) -> None:
    result = CliRunner().invoke(cli, ["launch", f"--nproc_per_node={word}", "train.py"])
    assert result.exit_code == 2
    assert "leave it out, which is a process for each GPU, or one without; or a number" in result.output


def test_a_list_of_hosts_is_no_address_of_this_machine() -> None:
    result = CliRunner().invoke(cli, ["launch", "--host", "pc1,pc2", "train.py"])
    assert isinstance(result.exception, ClusterError)
    assert "--node_ip=pc1,pc2 (--host): it is this machine's own address; a list is --hosts" in str(result.exception)


@pytest.mark.parametrize("flags", [["--needs", "20"], ["--only", "data"]])
def test_flags_about_data_need_a_folder(flags: list[str]) -> None:
    result = CliRunner().invoke(cli, ["doctor", *flags])
    assert result.exit_code == 2
    assert "--needs and --only data are about a folder of data: give --data" in result.output


def test_help_imports_nothing_heavy() -> None:
    """The list of all commands, which imports none of them; then each command's, in the same process."""
    loaded = json.loads(output_of(python("-c", HELPS)))
    assert loaded.keys() == {"", *COMMANDS}
    assert "numpy" not in loaded[""]
    assert {command: HEAVY.intersection(names) for command, names in loaded.items()} == {
        command: set() for command in loaded
    }


def test_a_command_that_is_no_more_is_refused_with_what_to_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["fleet_train", "manifest", "slurm", "--nodes=2", "train.py"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (said,) = re.findall("No such command 'manifest': copy a file of (\\S+) .*", capsys.readouterr().err)
    assert [path.name for path in sorted((ROOT / said).iterdir())] == [
        "Dockerfile", "job.yaml", "paddlejob.yaml", "train.sbatch", "trainjob.yaml",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("pro", ["profiles"]),
        ("", sorted(COMMANDS)),
        *((f"{command} --strategy multi", ["multi_node"]) for command in ("launch", "train", "plan")),
        ("launch --strategy ", profile_names()),
        ("launch --strategy=multi", ["multi_node"]),
        ("launch --strategy ./mine", "file"),
        *((f"{each} --set fuse_par", ["fuse_parameter_groups_size"]) for each in ("launch", "train", "plan")),
        ("recommend --set compression=in", ["compression=int4", "compression=int8"]),
        ("launch --set use_local_sgd=", ["use_local_sgd=false", "use_local_sgd=true"]),
        ("launch --set fetch_frequency=", []),
        ("launch --set name", []),  # it is no knob
        ("profiles powe", ["powersgd"]),
        ("launch --engine ", sorted(CHOICES)),
        ("launch --max", ["--max_restarts"]),
        ("train --epoc", ["--epochs"]),
        ("launch --nproc_per_node 2 ", "file"),
        ("launch --log_dir ", "dir"),
        ("plan --script ", "file"),
        ("train --data_dir ", "dir"),
        ("monitor --logdir ", "file"),
        ("port ", "file"),
    ],
)
def test_words_complete_and_paths_are_left_to_the_shell(words: str, offered: list[str] | str) -> None:
    *before, incomplete = words.split(" ")
    items = ShellComplete(cli, {}, "fleet_train", "_FLEET_TRAIN_COMPLETE").get_completions(before, incomplete)
    if isinstance(offered, str):
        assert {item.type for item in items} == {offered}
    else:
        assert sorted(item.value for item in items if item.type == "plain") == offered


# In each shell: the line of docs/installing.md is read, TAB is pressed behind these words, what it offers is printed.
PRESS = {
    "bash": """
eval "$(_FLEET_TRAIN_COMPLETE=bash_source fleet_train)"
tab() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _fleet_train_completion fleet_train
    echo "${COMPREPLY[@]}"
}
tab fleet_train launch --strategy multi
tab fleet_train launch --engine sl
""",
    "zsh": """
compdef() { : }
eval "$(_FLEET_TRAIN_COMPLETE=zsh_source fleet_train)"
compadd() { print -r -- $completions }
_describe() { print -r -- $completions_with_descriptions }
tab() { words=("$@"); CURRENT=$#; _fleet_train_completion }
tab fleet_train launch --strategy multi
tab fleet_train launch --engine sl
""",
    "fish": """
_FLEET_TRAIN_COMPLETE=fish_source fleet_train | source
complete -C "fleet_train launch --strategy multi"
complete -C "fleet_train launch --engine sl"
""",
}


@pytest.mark.parametrize("shell", list(PRESS))
def test_a_shell_completes_after_the_line_of_the_docs(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    line = next(line for line in PRESS[shell].splitlines() if "_source" in line)
    assert line in (ROOT / "docs/installing.md").read_text()
    (tmp_path / "press").write_text(PRESS[shell])
    (tmp_path / "fleet_train").write_text(f'#!/bin/sh\nexec {sys.executable} -m fleet_train "$@"\n')
    (tmp_path / "fleet_train").chmod(0o755)
    environ = clean_environ({"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)})
    environ["PATH"] = f"{tmp_path}{os.pathsep}{environ['PATH']}"
    done = subprocess.run(
        [shell, str(tmp_path / "press")], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=180
    )
    assert done.stderr == ""
    assert done.stdout.split() == ["multi_node", "slurm"]


# What makes each option of the trainer do something, and what does not.
COMPANIONS = {
    "--data digits": ("", "--data_dir images"),
    "--image_size 64": ("--data_dir images", "--data digits"),
    "--max_corrupt 0.5": ("--data_dir images", ""),
    "--workers 2": ("--data_dir images", ""),
    "--workers 0": ("--data_dir images --loader dali", "--data_dir images --loader thread"),
    "--uneven pad": ("--data_dir images --shard_by folder", "--data_dir images"),
    "--last_batch keep": ("--shard_by sample", "--data_dir images --shard_by folder"),
    "--lr_decay 0.5": ("--lr_schedule step", "--lr_schedule cosine"),
    "--lr_power 1": ("--lr_schedule polynomial", ""),
    "--no_decay_norm_bias": ("--weight_decay 1e-4", "--weight_decay 0"),
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    configs: list[TrainConfig] = []
    monkeypatch.setattr(reference, "run", configs.append)
    return configs


@pytest.mark.parametrize("option", COMPANIONS)
def test_an_option_without_its_companion_is_refused(option: str, started: list[TrainConfig]) -> None:
    with_it, without_it = COMPANIONS[option]
    result = CliRunner().invoke(train.command, [*option.split(), *without_it.split()])
    assert isinstance(result.exception, FleetTrainError)
    name = option.split()[0]
    assert str(result.exception).startswith(f"{name} ")
    assert " would have no effect: it " in str(result.exception)
    assert str(result.exception).endswith(f", or leave {name} out")
    assert started == []
    assert CliRunner().invoke(train.command, [*option.split(), *with_it.split()]).exit_code == 0
    assert len(started) == 1


def test_a_default_is_never_refused_and_every_option_with_a_companion_has_a_case(started: list[TrainConfig]) -> None:
    assert {case.split()[0].removeprefix("--") for case in COMPANIONS} == set(train.NEEDS)
    for flags in ("", "--data_dir images --shard_by folder", "--lr_schedule constant", "--loader thread"):
        assert CliRunner().invoke(train.command, flags.split()).exit_code == 0, flags
    assert len(started) == 4


@pytest.mark.parametrize(
    ("flags", "is_installed", "why"),
    [
        (["--native"], False, "--native needs py-spy, which is not installed: python -m pip install py-spy"),
        (["--native", "--log_dir=log"], True, "--native looks at this machine's processes: leave out --log_dir and"),
        (["--native", "--ips=127.0.0.2"], True, "--native looks at this machine's processes: leave out --log_dir and"),
    ],
)
def test_native_frames_that_cannot_be_had_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], is_installed: bool, why: str
) -> None:
    if is_installed:
        (tmp_path / "py-spy").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(stacks.command, flags)
    assert result.exit_code == 2
    assert why in result.output
