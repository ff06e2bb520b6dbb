"""The old recipe's command, word for word, on two machines: network namespaces joined by a veth pair."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.launchers import run_launchers
from tests.support.namespaces import two_machines
from tests.support.processes import ROOT

TRAIN = ROOT / "tests" / "support" / "train_few_steps.py"


@pytest.mark.long
@pytest.mark.root
def test_the_old_command_starts_one_job_on_two_machines(tmp_path: Path) -> None:
    commands.put_script(tmp_path, 2, TRAIN)
    with two_machines() as machines:
        hosts = [machine.address for machine in machines]
        # Whole machines of their own: even the recipe's port can stay as it is.
        lines = [commands.on_node(commands.OLD_RECIPE, node, hosts, 6170) for node in range(2)]
        result = run_launchers(lines, folder=tmp_path, prefixes=[machine.prefix for machine in machines])
    assert lines[1] == (
        "python -m paddle.distributed.launch --cluster_node_ips=10.77.0.1,10.77.0.2 --node_ip=10.77.0.2 "
        "--started_port=6170 --selected_gpus=0 --log_dir mylog train.py"
    ).split(" ")
    assert sorted(result.values) == [0, 1], result.report()
    assert result.of_all("world_size") == [2, 2]
    assert result.of_all("node_num") == [2, 2]
    assert result.values[1]["endpoints"] == ["10.77.0.1:6170", "10.77.0.2:6170"]
    assert result.of_all("at_import") == [["0", "2"], ["1", "2"]]
    assert result.of_all("paddles") == [[0, 2], [1, 2]]
    assert len(set(result.of_all("digest"))) == 1


@pytest.mark.root
def test_namespaces_are_removed_when_the_job_fails() -> None:
    with pytest.raises(RuntimeError, match="the job failed"), two_machines() as machines:
        raise RuntimeError("the job failed")
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(machine.name in left for machine in machines)
