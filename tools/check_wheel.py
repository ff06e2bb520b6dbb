"""Build the wheel that users install, check its files, install it in an empty environment, and train with it there.

    python tools/check_wheel.py --output dist

The wheel is built from a copy of its sources, without files of an earlier build. It is installed with the `cpu` extra
into a new virtual environment in a temporary folder; its commands run there, where the checkout cannot be imported.
Downloads a few hundred MB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.demo import (
    NODES,
    Folders,
    checked_summary,
    free_port,
    node_commands,
    started,
    wait_for_all,
)
from tools.processes import ROOT, leaving_on_signals

# Everything the build needs. README.md is the description.
SOURCES = ("fleet_train", "strategies", "pyproject.toml", "README.md", "LICENSE")
INSTALL_SECONDS = 1500.0


class WheelFailed(click.ClickException):
    """What is wrong with the wheel; exit code 1."""


def run(folder: Path, *command: str, timeout_seconds: float = 300.0) -> str:
    """Run a command in a folder; returns its output. Raises WheelFailed if it fails or times out."""
    shown = " ".join(command)
    try:
        done = subprocess.run(
            command, cwd=folder, env=outside_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout_seconds, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise WheelFailed(f"not finished after {timeout_seconds:g} s: {shown}") from None
    if done.returncode:
        raise WheelFailed(f"exit code {done.returncode}: {shown}\n{done.stdout}")
    return done.stdout


def outside_environment() -> dict[str, str]:
    """This process's environment without variables that point to the checkout or a job."""
    leads_here = ("PYTHON", "FLEET_TRAIN_", "PADDLE_", "FLAGS_", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if not name.startswith(leads_here)}


def built(root: Path, scratch: Path) -> Path:
    """The wheel, built by pip in an environment of its own from a copy of the sources."""
    copy, wheels = scratch / "sources", scratch / "wheels"
    copy.mkdir()
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(root / name, copy / name)
    flags = ["--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", str(wheels)]
    run(copy, sys.executable, "-m", "pip", "wheel", *flags, ".", timeout_seconds=INSTALL_SECONDS)
    (wheel,) = wheels.glob("*.whl")
    return wheel


def expected_contents(root: Path) -> set[str]:
    """The names that the checkout's files have in the wheel, where strategies are a package below fleet_train."""
    files = [path for name in ("fleet_train", "strategies") for path in (root / name).rglob("*") if path.is_file()]
    names = {path.relative_to(root).as_posix() for path in files if path.suffix != ".pyc"}
    return {name if name.startswith("fleet_train/") else f"fleet_train/{name}" for name in names}


def check_contents(wheel: Path, root: Path) -> None:
    """Raises WheelFailed if files of the checkout are missing, or others are there, such as tests or deleted files."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    metadata = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    expected = expected_contents(root)
    wrong = [f"misses {name}" for name in sorted(expected - names)]
    wrong += [f"should not have {name}" for name in sorted(names - metadata - expected)]
    for ending in ("/METADATA", "/entry_points.txt", "/licenses/LICENSE"):
        if not any(name.endswith(ending) for name in metadata):
            wrong.append(f"misses its {ending[1:]}")
    if wrong:
        where = f"{wheel.name} differs from the checkout; pyproject.toml has `packages` and `package-data`:"
        raise WheelFailed("\n".join([where, *wrong]))


def installed(wheel: Path, python: str, venv: Path, folder: Path) -> Path:
    """Install the wheel with its extra in an empty environment, as a user would; its folder of programs."""
    run(folder, python, "-m", "venv", str(venv))
    flags = ["--quiet", "--disable-pip-version-check", f"{wheel}[cpu]"]
    run(folder, str(venv / "bin/python"), "-m", "pip", "install", *flags, timeout_seconds=INSTALL_SECONDS)
    where = run(folder, str(venv / "bin/python"), "-c", "import fleet_train; print(fleet_train.__file__)").strip()
    if not Path(where).is_relative_to(venv):
        raise WheelFailed(f"{where} was imported, which is not what was installed into {venv}")
    return venv / "bin"


def first_commands(programs: Path) -> dict[tuple[str, ...], list[str]]:
    """The first commands of a user, and the words that each must print."""
    ours, profiles = str(programs / "fleet_train"), [path.stem for path in (ROOT / "strategies").glob("*.yaml")]
    return {
        (ours, "--version"): ["fleet_train ", "paddlepaddle "],
        (ours, "version"): ["python", "numpy", "processor"],
        (str(programs / "python"), "-m", "fleet_train", "profiles"): profiles,
        (ours, "profiles", "multi_node"): ["nccl_comm_num"],
        (ours, "plan", "--model", "mlp", "--nodes", "2", "--strategy", "multi_node"): ["bucket"],
    }


def node_commands_of(programs: Path, folders: Folders, port: int) -> list[list[str]]:
    """The demo's training with the installed package: the reference trainer as a module, no file of the checkout."""
    trainer = ["-m", "fleet_train", "train"]
    return node_commands([str(programs / "fleet_train")], trainer, folders, "multi_node", port)


@click.command(
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(__doc__ or "").replace("    python", "\b\n    python"),
)
@click.option("--output", default=Path("dist"), show_default=True, type=Path, help="Folder for the wheel.")
@click.option("--python", default=sys.executable, show_default=True, help="Interpreter to install it for.")
@click.option("--timeout", default=300.0, show_default=True, help="Timeout of the training in seconds.")
def main(output: Path, python: str, timeout: float) -> None:
    began = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"{text}, {time.monotonic() - began:.0f} s since the start")

    with leaving_on_signals(), tempfile.TemporaryDirectory(prefix="fleet_train_wheel_") as name:
        wheel, elsewhere = built(ROOT, Path(name)), Path(name, "elsewhere")
        check_contents(wheel, ROOT)
        say(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
        folders = Folders(elsewhere / "run")
        folders.prepare()
        programs = installed(wheel, python, Path(name, "venv"), elsewhere)
        say(f"installed with [cpu] for {run(elsewhere, python, '--version').strip()}")
        for command, words in first_commands(programs).items():
            printed = run(elsewhere, *command)
            if missing := [word for word in words if word not in printed]:
                raise WheelFailed(f"{' '.join(command)} did not say {missing}:\n{printed}")
            say(" ".join([Path(command[0]).name, *command[1:]]))
        each = node_commands_of(programs, folders, free_port(NODES))
        with started(each, folders, outside_environment(), elsewhere) as nodes:
            exit_codes = wait_for_all(nodes, timeout)
        say(f"test accuracy {checked_summary(folders, exit_codes)['test_accuracy']:.4f} on two nodes")
        output.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, output)  # only a wheel that passed is put where it may be published from
    click.echo(f"{output / wheel.name}")


if __name__ == "__main__":
    main()
