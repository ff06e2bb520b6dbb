"""What users type: the commands and the diff of the README and of the pages work word for word.

Commands that name two machines are run by test_launch_forms.py and others; here they are read up to their flags.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import shlex
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from fleet_train.cli import cli
from tests.support import commands
from tests.support.commands import fenced_blocks, shell_commands
from tests.support.ports import free_ports
from tests.support.processes import ROOT, output_of, python

EXAMPLES = ROOT / "tools" / "examples"
INSTALLING = (ROOT / "docs" / "installing.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "README_cn.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PRINTED = {command: page for page in PAGES for command in shell_commands(page.read_text())}
# Profile that pages call ./mine.yaml.
MINE = "description: Our five PCs on the office switch.\nextends: multi_node\nfuse_grad_size_in_MB: 4\n"
# What ends within seconds and needs neither root nor another machine: words of its output. A group shares a folder.
RUN = [
    {
        "python -m fleet_train launch --nproc_per_node=2 train.py": "step99 cost=",
        "python -m fleet_train launch --nproc_per_node=2 --verify_joint_batch train.py": (
            "verified: the gradient of 2 ranks is the joint batch's"
        ),
        "python -m fleet_train launch --nproc_per_node=2 --dry-run train.py": "train.py",
        "python -m fleet_train launch --nproc_per_node=2 --strategy multi_node train.py": "step99 cost=",
        "python -m fleet_train version": "fleet_train",
        "python -m fleet_train profiles --all": "unfused",
        "python -m fleet_train profiles multi_node": "nccl_comm_num",
        "python -m fleet_train profiles ./mine.yaml": "fuse_grad_size_in_MB",
        "python -m fleet_train profiles --compatibility": "LocalSGD",
    },
    {
        "python -m fleet_train plan --script train.py": "bucket",
        "python -m fleet_train plan --model ResNet50 --nodes 5": "97.492 MB of gradients",
        "python -m fleet_train plan --nodes 4 --ranks_per_node 2 --strategy multi_node --script train.py --lr 0.1": (
            "per update: 2 collectives, 11.245 MB sent by each rank for 6.426 MB of gradients"
        ),
        "python -m fleet_train plan --nodes 4 --set sharding=true --script train.py": (
            "sharding: each rank of 4 keeps at most 0.250 of the optimizer's state; cut by rows: fc_1.w_0"
        ),
        "python -m fleet_train plan --model cnn --nodes 2 --latency_us 100 --bandwidth_mbps 1000 --compute_ms 30 "
        "--batch_size 64": (
            "predicted step: 31.525 ms = 30.000 computing + 1.525 exposed of 1.525 communication; 4060 samples/s"
        ),
        "python -m fleet_train plan --model mlp --nodes 2 --ranks_per_node 2 --strategy local_sgd --simulate": (
            "bit-equal after updates 1, 2, 6, 10"
        ),
    },
    {
        "python -m fleet_train train --model mlp --data digits --epochs 2 --checkpoint_every 1 --keep_checkpoints 1 "
        "--keep_best --background_checkpoints --output_dir runs/saved": "1 rank(s) on 1 node(s)",
        "python -m fleet_train train --model mlp --data digits --epochs 3 --output_dir runs/saved --resume": (
            "(epoch 2, step 90)"
        ),
        "python -m fleet_train train --model mlp --data digits --epochs 6 --checkpoint_every 2 --stop_after_epochs 4 "
        "--output_dir runs/digits": "1 rank(s) on 1 node(s)",
        "python -m fleet_train train --model mlp --data digits --epochs 6 --output_dir runs/digits --resume": (
            "(epoch 4, step 180)"
        ),
        "python -m fleet_train launch --nproc_per_node=2 --log_dir runs/two/log -m fleet_train train --model mlp "
        "--epochs 2 --output_dir runs/two": "2 rank(s) on 1 node(s)",
    },
    {  # docs/data.md; its first block of Python makes the images
        "python -m fleet_train train --model ResNet18 --data_dir ./images --image_size 32 --epochs 1 --batch_size 8 "
        "--workers 1 --output_dir runs/folder": "ResNet18 on ./images: 1 rank(s)",
        "python -m fleet_train launch --nproc_per_node=2 --log_dir runs/images/log -m fleet_train train --model "
        "ResNet18 --data_dir ./images --image_size 32 --epochs 1 --batch_size 8 --workers 1 --output_dir runs/images": (
            "ResNet18 on ./images: 2 rank(s)"
        ),
        "python -m fleet_train train --model cnn --data synthetic:3x32x32x10x640 --epochs 1 --output_dir runs/noise": (
            "cnn on synthetic:3x32x32x10x640: 1 rank(s)"
        ),
        "python -m fleet_train doctor --only data --data ./images --image_size 32": "48 images in 2 classes",
        "python -m fleet_train doctor --only data --data ./images --image_size 32 --needs 20 --workers 1": (
            "(training needs 20/s)"
        ),
    },
]
# Run by test_launch_forms.py and test_examples.py.
BY_NAME = (
    commands.FLEET_TRAIN,
    commands.OLD_RECIPE,
    commands.TODAYS_IPS,
    commands.TODAYS_MASTER,
    commands.ONE_PROCESS,
    commands.INSTALL,
)


def test_no_page_trains_into_a_folder_that_another_command_has_used() -> None:
    """It would be refused, by whoever follows the pages from the first to the last."""
    used: dict[str, str] = {}
    for page in PAGES:
        if page.name == "README_cn.md":  # the same commands as README.md
            continue
        for command in shell_commands(page.read_text()):
            words = shlex.split(command, comments=True)
            is_trainer = "fleet_train train" in command or "own_program.py" in command
            if not is_trainer or {"--resume", "--overwrite", "--dry-run"} & set(words):
                continue
            folder = re.search(r"--output_dir[ =](\S+)", command)
            where = folder[1] if folder else "runs/train"
            assert where not in used, f"{page.name}: {command}\n{used[where]}"
            used[where] = f"{page.name}: {command}"


def test_what_is_run_is_what_the_pages_print() -> None:
    run = [*BY_NAME, *(command for group in RUN for command in group)]
    assert [command for command in run if command not in PRINTED] == []


@pytest.mark.long
@pytest.mark.parametrize("group", RUN, ids=["launch", "plan", "train", "data"])
def test_commands_run_as_printed(group: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes((EXAMPLES / "train_with_fleet.py").read_bytes())
    (tmp_path / "mine.yaml").write_text(MINE)

    images = fenced_blocks((ROOT / "docs" / "data.md").read_text(), "python")[0]
    if any("./images" in command for command in group):
        output_of(python("-c", images), cwd=tmp_path)
    for command, expected in group.items():
        words = shlex.split(command)
        if "launch" in words:  # other tests may use the default port at the same time
            words.insert(words.index("launch") + 1, f"--started_port={free_ports(4)}")
        assert expected in output_of(words, cwd=tmp_path), command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_printed_command_has_flags_that_exist(page: Path) -> None:
    wrong = {command: unknown_flags(command) for command in shell_commands(page.read_text())}
    assert {command: flags for command, flags in wrong.items() if flags} == {}


def unknown_flags(command: str) -> list[str]:
    """The --flags that the help of our program before them does not know. Other programs' flags are not looked at."""
    unknown, help_text = [], None
    words = shlex.split(command)
    for before, word in pairwise(["", *words]):
        if before.startswith("tools/") and before.endswith(".py"):
            help_text = help_of_tool(before, *([] if word.startswith("-") else [word]))
        elif before == "fleet_train" and not word.startswith("-"):
            help_text = CliRunner().invoke(cli, [word, "--help"]).output
        elif word.endswith(".py") or word == "python":
            help_text = None  # a user's script
        if help_text and word.startswith("--") and word != "--":
            flag = word.split("=")[0]
            unknown += [] if re.search(rf"(?<![\w-]){flag}(?![\w-])", help_text) else [flag]
    return unknown


@cache
def help_of_tool(path: str, *subcommand: str) -> str:
    return output_of(python(str(ROOT / path), *subcommand, "--help"))


@pytest.mark.parametrize("page", ["README.md", "README_cn.md", "docs/start.md"])
def test_the_diff_is_the_one_between_the_two_scripts(page: str) -> None:
    (block,) = fenced_blocks((ROOT / page).read_text(), "diff")
    before, after = ((EXAMPLES / name).read_text().splitlines() for name in ("single_card.py", "train_with_fleet.py"))
    real = [line for line in difflib.ndiff(before, after) if line[2:].strip()]
    for sign in "-+":
        shown = [line[1:] for line in block.splitlines() if line.startswith(sign)]
        assert shown == [line[2:] for line in real if line[0] == sign]


def section(title: str) -> str:
    """What docs/installing.md says under a heading of the second level."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", INSTALLING, re.DOTALL | re.MULTILINE)
    return str(text)


@pytest.mark.long
def test_the_installation_without_a_network_runs_as_printed(tmp_path: Path) -> None:
    """Without the four largest packages, which it would download. On the second machine pip has a dead proxy."""
    with_network, without = (
        shell_commands(f"```bash\n{block}```\n") for block in fenced_blocks(section("Without a network"), "bash")[:2]
    )
    checkout, elsewhere = tmp_path / "checkout", tmp_path / "elsewhere"
    for folder in (checkout, elsewhere):
        folder.mkdir()
    for part in ("fleet_train", "strategies", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, checkout / part)  # building writes into its folder: not into this checkout
    largest = ("paddlepaddle", "visualdl", "numba", "scikit-learn")
    pins = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith(largest)]
    (checkout / "requirements.txt").write_text("\n".join(pins))

    for command in with_network:
        output_of(shlex.split(command), cwd=checkout)
    for part in ("wheels", "requirements.txt"):
        (checkout / part).rename(elsewhere / part)
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_PROXY": "http://127.0.0.1:9", "PYTHONPATH": ""}
    installed = [*without, "python -m fleet_train profiles", "command -v python"]
    printed = output_of(["bash", "-ec", "\n".join(installed)], nowhere, elsewhere).splitlines()
    assert any("multi_node" in line for line in printed)
    assert printed[-1] == str(elsewhere / ".venv" / "bin" / "python")


def test_a_mirror_is_set_and_taken_back_as_printed(tmp_path: Path) -> None:
    set_it, take_it_back = (line for line in shell_commands(section("Mirrors of PyPI in China")) if " config " in line)
    home = {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    output_of(shlex.split(set_it), home)
    (file,) = tmp_path.rglob("pip.conf")
    assert f"index-url = {set_it.split()[-1]}" in file.read_text()
    output_of(shlex.split(take_it_back), home)
    assert "index-url" not in file.read_text()


def test_the_table_of_gpu_builds_is_the_one_of_requirements_gpu() -> None:
    pinned = (ROOT / "requirements-gpu.txt").read_text()
    (folder,) = re.findall(r"^--extra-index-url \S+/(cu\d+)/$", pinned, re.MULTILINE)
    (version,) = re.findall(r"^paddlepaddle-gpu==(\S+)$", pinned, re.MULTILINE)
    rows = dict(re.findall(r"^\| `(cu\d+)` \| ([\d.]+) ", section("GPU builds"), re.MULTILINE))
    assert {name: f"cu{cuda.replace('.', '')}" for name, cuda in rows.items()} == {name: name for name in rows}
    assert folder in rows
    assert f"`paddlepaddle-gpu` {version} " in section("GPU builds")


def test_paddle_sets_the_folders_of_its_own_libraries_and_says_what_it_was_built_for() -> None:
    """Read, as no build for GPUs runs here: all builds have this file."""
    found = importlib.util.find_spec("paddle")  # not imported: it changes the environment
    source = Path(found.origin if found and found.origin else "").read_text()
    on_linux = source[source.index("is_compiled_with_cuda():") : source.index("platform.system() == 'Windows'")]
    of_pip = set(re.findall(r'\{"FLAGS_(\w+)_dir": \w+_lib_path\}', on_linux))
    assert of_pip == {"cudnn", "nccl", "cublas", "curand", "cusolver", "cusparse", "cupti"}
    for name in of_pip:
        assert name in section("GPU builds").lower(), name
    (archs,) = (line for line in shell_commands(section("GPU builds")) if "cuda_archs" in line)
    assert output_of(shlex.split(archs)).splitlines()[-1] == "[]"


def test_the_table_of_system_packages_has_each_that_is_asked_for() -> None:
    table = section("What `apt-get install` is for")
    listed = set(re.findall(r"`([^`]+)`", table))
    needed = set(re.findall(r"^need (\S+) ", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))
    asking = [*(ROOT / "fleet_train").rglob("*.py"), *(ROOT / "tools").rglob("*"), *(ROOT / "tests").rglob("*.py")]
    asking += [ROOT / "docs" / "start.md", ROOT / ".ci" / "debian13"]
    for path in asking:
        if path.suffix in (".py", ".sh", ".md", "") and path.is_file() and path != Path(__file__):
            for words in re.findall(r"\bapt-get install ((?:[a-z][a-z0-9-]+ ?)+)", path.read_text()):
                needed |= set(words.split())
    assert {"libgomp1", "openssh-client", "iproute2", "debootstrap"} <= needed
    assert needed - listed == set()
