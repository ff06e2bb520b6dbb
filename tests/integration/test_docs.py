"""What users type: the commands and the diff of the README and of the pages work word for word.

Commands that name two machines are run by test_launch_forms.py and others; here they are read up to their flags.
"""

from __future__ import annotations

import difflib
import re
import shlex
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
        "python -m fleet_train profiles": "multi_node",
        "python -m fleet_train profiles multi_node": "nccl_comm_num",
        "python -m fleet_train profiles ./mine.yaml": "fuse_grad_size_in_MB",
        "python -m fleet_train profiles --compatibility": "LocalSGD",
    },
    {
        "python -m fleet_train plan --script train.py": "bucket",
        "python -m fleet_train plan --model ResNet50 --nodes 5": "97.492 MB of gradients",
        "python -m fleet_train plan --nodes 4 --ranks_per_node 2 --strategy multi_node --script train.py --lr 0.1": (
            "bucket"
        ),
        "python -m fleet_train plan --model cnn --nodes 2 --latency_us 100 --bandwidth_mbps 1000 --compute_ms 30 "
        "--batch_size 64": "samples/s",
        "python -m fleet_train plan --model mlp --nodes 2 --strategy local_sgd --simulate": "equal",
        "python -m fleet_train plan --model mlp --nodes 2 --ranks_per_node 2 --strategy local_sgd --simulate": (
            "bit-equal after updates 1, 2, 6, 10"
        ),
    },
    {
        "python -m fleet_train train --model mlp --data digits --epochs 3 --output_dir runs/mlp": "test accuracy",
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
