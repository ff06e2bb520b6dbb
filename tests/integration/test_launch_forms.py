"""Every form of the launch command starts the job it describes: two loopback "machines", or two network namespaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import commands
from tests.support.ports import free_ports
from tests.support.processes import ROOT
from tests.support.ranks import LaunchersResult, run_launchers

HOSTS = ("127.0.0.2", "127.0.0.3")
TRAIN = ROOT / "tests" / "support" / "train_few_steps.py"


def run_form(
    command: str,
    folder: Path,
    first_port: int,
    env_of_node: Sequence[Mapping[str, str]] = (),
    check: bool = True,
    first_line: str = "",
) -> LaunchersResult:
    commands.put_script(folder, len(HOSTS), TRAIN)
    for node in range(len(HOSTS)):
        script = folder / f"node{node}" / "train.py"
        script.write_text(first_line + script.read_text())
    lines = [commands.on_node(command, node, HOSTS, first_port) for node in range(len(HOSTS))]
    return run_launchers(lines, folder=folder, env_of_node=env_of_node, check=check)


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
def test_script_that_reads_its_rank_before_the_import_is_warned(tmp_path: Path) -> None:
    early = "import os; RANK = int(os.environ['PADDLE_TRAINER_ID'])\n"
    result = run_form(commands.OLD_RECIPE, tmp_path, free_ports(2, HOSTS), first_line=early)
    log = (result.folders[0] / "mylog" / "workerlog.0").read_text()
    assert "WARNING: the stock launcher set PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM" in log
    assert "and line 1 of the script is above that" in log


@pytest.mark.long
def test_stock_launcher_that_starts_fewer_processes_than_asked_is_an_error(tmp_path: Path) -> None:
    asked = commands.OLD_RECIPE.replace("--selected_gpus=0", "--selected_gpus=0,1")
    result = run_form(asked, tmp_path, free_ports(2, HOSTS), check=False)
    assert 0 not in result.exit_codes
    # The command that works is printed, so that it can be pasted.
    assert "python -m fleet_train launch --cluster_node_ips=127.0.0.2,127.0.0.3" in result.report()
    assert result.values == {}


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


def test_the_guides_four_scripts_train_with_their_strategies_and_equal_parameters(tmp_path: Path) -> None:
    commands.put_script(tmp_path, len(HOSTS), ROOT / "tests" / "support" / "old_scripts.py")
    port = free_ports(3, HOSTS)
    command = commands.FLEET_TRAIN.replace(" --strategy multi_node", "")  # a flag would win over the scripts
    lines = [commands.on_node(command, node, HOSTS, port) for node in range(len(HOSTS))]
    result = run_launchers(lines, folder=tmp_path)
    assert sorted(result.values) == [0, 1, 2, 3], result.report()
    for script in ("performance_tuned", "local_sgd", "hierarchical", "fused_16_megabytes"):
        assert len({rank["digest"] for rank in result.of_all(script)}) == 1, script
    first = result.values[0]
    assert first["performance_tuned"]["communicators"] == 2
    assert first["local_sgd"]["period"] == 2
    assert first["hierarchical"]["group_size"] == 2
    assert first["fused_16_megabytes"]["bucket_MB"] == 16.0
    assert "num_threads" in result.report(), "a mapped setting is said"
