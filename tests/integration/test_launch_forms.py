"""Every form of the launch command starts the job it describes: two loopback "machines", or two network namespaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.ports import free_ports
from tests.support.processes import ROOT
from tests.support.ranks import LaunchersResult, run_launchers
from tools.lab import Lab

HOSTS = ("127.0.0.2", "127.0.0.3")
TRAIN = ROOT / "tests" / "support" / "train_few_steps.py"


def run_form(
    command: str,
    folder: Path,
    first_port: int,
    env_of_node: Sequence[Mapping[str, str]] = (),
) -> LaunchersResult:
    commands.put_script(folder, len(HOSTS), TRAIN)
    lines = [commands.on_node(command, node, HOSTS, first_port) for node in range(len(HOSTS))]
    return run_launchers(lines, folder=folder, env_of_node=env_of_node)


def assert_one_job(result: LaunchersResult, world_size: int) -> None:
    assert sorted(result.values) == list(range(world_size)), result.report()
    assert result.of_all("world_size") == [world_size] * world_size
    assert result.of_all("node_num") == [2] * world_size
    assert len(set(result.of_all("digest"))) == 1, "the ranks' parameters differ"


def test_old_recipe_forms_one_job_with_the_stock_launcher(tmp_path: Path) -> None:
    port = free_ports(2, HOSTS)
    result = run_form(commands.OLD_RECIPE, tmp_path, port)
    assert_one_job(result, world_size=2)
    assert result.values[0]["endpoints"] == [f"127.0.0.2:{port}", f"127.0.0.3:{port}"]
    assert [(folder / "mylog" / "workerlog.0").exists() for folder in result.folders] == [True, True]
    # What old scripts shard their data by is right from the import of fleet_train on.
    assert result.of_all("at_import") == [["0", "2"], ["1", "2"]]
    assert result.of_all("paddles") == [[0, 2], [1, 2]]
    log = (result.folders[0] / "mylog" / "workerlog.0").read_text()
    assert log.count("they were corrected when fleet_train was imported") == 1
    assert "WARNING: the stock launcher" not in log


@pytest.mark.long
@pytest.mark.root
def test_the_old_command_starts_one_job_on_two_machines(tmp_path: Path) -> None:
    """Word for word: machines of their own even leave the recipe's port as it is. The script reads its rank above the
    import of fleet_train, where it is not yet right."""
    commands.put_script(tmp_path, len(HOSTS), TRAIN)
    for node in range(len(HOSTS)):
        script = tmp_path / f"node{node}" / "train.py"
        script.write_text("import os; RANK = int(os.environ['PADDLE_TRAINER_ID'])\n" + script.read_text())
    with Lab(2, "none") as lab:
        hosts = [machine.address for machine in lab.nodes]
        lines = [commands.on_node(commands.OLD_RECIPE, node, hosts, 6170) for node in range(2)]
        result = run_launchers(lines, folder=tmp_path, prefixes=[machine.prefix for machine in lab.nodes])
    assert_one_job(result, world_size=2)
    assert result.values[1]["endpoints"] == [f"{host}:6170" for host in hosts]
    assert result.of_all("at_import") == [["0", "2"], ["1", "2"]]
    log = (result.folders[0] / "mylog" / "workerlog.0").read_text()
    assert "WARNING: the stock launcher set PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM" in log
    assert "and line 1 of the script is above that" in log


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "ports", "pod_ips"), [(commands.TODAYS_IPS, 3, False), (commands.TODAYS_MASTER, 1, True)]
)
def test_todays_forms(tmp_path: Path, form: str, ports: int, pod_ips: bool) -> None:
    # On two real machines the launcher finds its own address; on one it must be told which of the two it plays.
    env_of_node = [{"POD_IP": host} for host in HOSTS] if pod_ips else []
    assert_one_job(run_form(form, tmp_path, free_ports(ports, HOSTS), env_of_node), world_size=4)


def test_fleet_train_launch_in_paddlecloud_pods(tmp_path: Path) -> None:
    port = free_ports(3, HOSTS)
    pods = [
        {
            "POD_IP": host,
            "PADDLE_TRAINERS": ",".join(HOSTS),
            "PADDLE_TRAINER_ID": str(node),
            "PADDLE_PORT": str(port),
            "TRAINER_PORTS_NUM": "2",
        }
        for node, host in enumerate(HOSTS)
    ]
    assert_one_job(run_form(commands.PADDLECLOUD, tmp_path, port, pods), world_size=4)
