"""Two machines with their own images, not equally many: the trainer takes the steps that both can take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.images import write_image_folder
from tests.support.launchers import run_launchers
from tests.support.ports import free_ports
from tests.support.processes import python

pytestmark = pytest.mark.long

HOSTS = ["127.0.0.2", "127.0.0.3"]
FLAGS = (
    "--model=cnn --data_dir=images --image_size=16 --shard_by=folder --batch_size=2 --workers=1 --epochs=2 --lr=0.01"
)


def test_both_machines_end_after_the_same_steps(tmp_path: Path) -> None:
    for node, (train, val) in enumerate([(5, 4), (3, 1)]):
        write_image_folder(tmp_path / f"node{node}" / "images", per_class=train, val_per_class=val)
    port = free_ports(2, HOSTS)
    commands = [
        python(
            *("-m", "fleet_train", "launch", f"--cluster_node_ips={','.join(HOSTS)}", f"--node_ip={host}"),
            *(f"--started_port={port}", "--nproc_per_node=1", "--log_dir=log", "-m", "fleet_train", "train"),
            *(*FLAGS.split(), "--output_dir=run"),
        )
        for host in HOSTS
    ]
    ended = run_launchers(commands, folder=tmp_path)
    summary = json.loads((tmp_path / "node0" / "run" / "summary.json").read_text())
    # 10 and 6 images in batches of 2: five and three steps; 8 and 2 images to evaluate.
    assert (summary["world_size"], summary["steps"], summary["corrupt_images"]) == (2, 6, 0), ended.report()
    correct = 10 * summary["test_accuracy"]
    assert abs(correct - round(correct)) < 1e-6, ended.report()
