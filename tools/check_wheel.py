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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.demo import (  # noqa: E402
    NODES,
    RECIPE,
    Folders,
    checked_summary,
    free_port,
    started,
    stopping_on_signals,
    wait_for_all,
)

# Everything the build needs. README.md is the description.
SOURCES = ("fleet_train", "strategies", "pyproject.toml", "README.md", "LICENSE")
EXTRA = "cpu"
_INSTALL_SECONDS = 1500.0
_COMMAND_SECONDS = 300.0


class WheelFailed(click.ClickException):
    """What is wrong with the wheel; exit code 1."""


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel, and a folder outside the checkout to run its commands in."""

    venv: Path
    folder: Path

    def program(self, name: str) -> str:
        return str(self.venv / "bin" / name)

    def run(self, *command: str, timeout_seconds: float = _COMMAND_SECONDS) -> str:
        """Run a command; returns its output. Raises WheelFailed if it fails or times out."""
        try:
            streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            there: Any = {"cwd": self.folder, "env": outside_environment(), **streams}
            done: subprocess.CompletedProcess[str] = subprocess.run(command, timeout=timeout_seconds, **there)
        except subprocess.TimeoutExpired:
            raise WheelFailed(f"not finished after {timeout_seconds:g} s: {' '.join(command)}") from None
        if done.returncode:
            raise WheelFailed(f"exit code {done.returncode}: {' '.join(command)}\n{done.stdout}")
        return done.stdout


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", default=Path("dist"), show_default=True, type=Path, help="Folder for the wheel.")
@click.option("--python", default=sys.executable, show_default=True, help="Interpreter to install it for.")
@click.option("--timeout", default=300.0, show_default=True, help="Timeout of the training in seconds.")
def main(output: Path, python: str, timeout: float) -> None:
    """Build the wheel, install it with the cpu extra in a new environment, and train with it on two "nodes"."""
    with stopping_on_signals(), tempfile.TemporaryDirectory(prefix="fleet_train_wheel_") as name:
        scratch = Path(name)
        began = time.monotonic()
        wheel = built(ROOT, scratch)
        check_contents(wheel, ROOT)
        click.echo(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {_since(began)}")
        installed = installation(wheel, python, scratch)
        click.echo(f"installed with [{EXTRA}] for {installed.run(python, '--version').strip()}, {_since(began)}")
        run_commands(installed)
        accuracy = train(installed, timeout)
        click.echo(f"test accuracy {accuracy:.4f} on two nodes, {_since(began)}")
        output.mkdir(parents=True, exist_ok=True)
        shutil.copy(wheel, output)  # only a wheel that passed is put where it may be published from
    click.echo(f"{output / wheel.name}")


def _since(began: float) -> str:
    return f"{time.monotonic() - began:.0f} s since the start"


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
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run([*command, "--wheel-dir", str(wheels), "."], cwd=copy, env=outside_environment(), check=False)
    found = sorted(wheels.glob("*.whl"))
    if done.returncode or len(found) != 1:
        raise WheelFailed(f"pip wheel ended with {done.returncode} and made {[path.name for path in found]}")
    return found[0]


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
        raise WheelFailed(
            f"{wheel.name} differs from the checkout; pyproject.toml has `packages` and `package-data`:\n"
            + "\n".join(wrong)
        )


def installation(wheel: Path, python: str, scratch: Path) -> Installed:
    """Install the wheel with its extra, as a user would, in an empty environment."""
    installed = Installed(scratch / "venv", scratch / "elsewhere")
    installed.folder.mkdir()
    installed.run(python, "-m", "venv", str(installed.venv))
    pip = (installed.program("python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    installed.run(*pip, f"{wheel}[{EXTRA}]", timeout_seconds=_INSTALL_SECONDS)
    where = Path(
        installed.run(installed.program("python"), "-c", "import fleet_train; print(fleet_train.__file__)").strip()
    )
    if not where.is_relative_to(installed.venv):
        raise WheelFailed(f"{where} was imported, which is not what was installed into {installed.venv}")
    return installed


def commands(installed: Installed) -> list[tuple[list[str], Sequence[str]]]:
    """Run the first commands of a user; each must print certain words."""
    ours = installed.program("fleet_train")
    profiles = sorted(path.stem for path in (ROOT / "strategies").glob("*.yaml"))
    return [
        ([ours, "--version"], ["fleet_train ", "paddlepaddle "]),
        ([ours, "version"], ["python", "numpy", "processor"]),
        ([installed.program("python"), "-m", "fleet_train", "profiles"], profiles),
        ([ours, "profiles", "multi_node"], ["nccl_comm_num"]),
        ([ours, "plan", "--model", "mlp", "--nodes", "2", "--strategy", "multi_node"], ["bucket"]),
    ]


def run_commands(installed: Installed) -> None:
    for command, words in commands(installed):
        printed = installed.run(*command)
        missing = [word for word in words if word not in printed]
        if missing:
            raise WheelFailed(f"{' '.join(command)} did not say {missing}:\n{printed}")
        click.echo("  fleet_train " + " ".join(command[1 + command.index("fleet_train") if "-m" in command else 1 :]))


def node_commands(installed: Installed, folders: Folders, port: int) -> list[list[str]]:
    """The demo's training with the installed package: the reference trainer as a module, no file of the checkout."""
    return [
        [
            *(
                installed.program("fleet_train"),
                "launch",
                f"--cluster_node_ips={','.join(NODES)}",
                f"--node_ip={node_ip}",
            ),
            *(f"--started_port={port}", "--nproc_per_node=1", "--strategy=multi_node"),
            *(f"--log_dir={folders.log / f'node{index}'}", "-m", "fleet_train", "train"),
            *(*RECIPE, f"--output_dir={folders.output}"),
        ]
        for index, node_ip in enumerate(NODES)
    ]


def train(installed: Installed, timeout_seconds: float) -> float:
    """The test accuracy of two nodes, which must be at least the demo's."""
    folders = Folders(installed.folder / "run")
    folders.prepare()
    each = node_commands(installed, folders, free_port(NODES))
    with started(each, folders, outside_environment(), installed.folder) as nodes:
        exit_codes = wait_for_all(nodes, timeout_seconds)
    return float(checked_summary(folders, exit_codes)["test_accuracy"])


if __name__ == "__main__":
    main()
