"""The stock launcher's legacy mode tells every node that it is alone; importing fleet_train corrects that."""

from __future__ import annotations

import os

import pytest

from fleet_train.cluster import Cluster, at_import
from fleet_train.cluster.at_import import correct, read_before_import, warning_of
from fleet_train.cluster.environment import rank_variables

RECIPE = (
    "python -u -m paddle.distributed.launch --cluster_node_ips=10.0.0.1,10.0.0.2 --node_ip=10.0.0.2 "
    "--started_port=6170 --selected_gpus=0,1 --log_dir mylog train.py"
).split()
LEGACY = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_RANK_IN_NODE": "1",
    "PADDLE_TRAINER_ENDPOINTS": "127.0.0.1:6170,127.0.0.1:6171",
    "PADDLE_CURRENT_ENDPOINT": "127.0.0.1:6171",
}


def test_old_command_on_the_second_node_makes_local_process_1_rank_3_of_4() -> None:
    environ = dict(LEGACY)
    before = correct(environ, RECIPE)
    assert environ["PADDLE_TRAINER_ID"] == "3"
    assert environ["PADDLE_TRAINERS_NUM"] == "4"
    assert environ["PADDLE_TRAINER_ENDPOINTS"] == "10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170,10.0.0.2:6171"
    assert environ["PADDLE_CURRENT_ENDPOINT"] == "10.0.0.2:6171"
    assert environ["PADDLE_RANK_IN_NODE"] == "1"
    assert before == {name: value for name, value in LEGACY.items() if name != "PADDLE_RANK_IN_NODE"}


@pytest.mark.parametrize(
    ("environ", "command"),
    [
        (LEGACY, ["bash", "run.sh"]),
        (LEGACY, "python -m paddle.distributed.launch --nproc_per_node=2 train.py".split()),
        (LEGACY, "python -m paddle.distributed.launch --ips=10.0.0.1,10.0.0.2 --host=10.0.0.2 train.py".split()),
        (LEGACY | {"FLEET_TRAIN_STORE": "10.0.0.1:6172"}, RECIPE),
        ({}, RECIPE),
        # Three processes were asked for and two were started: fleet.init says what to do.
        (LEGACY, [word.replace("=0,1", "=0,1,2") for word in RECIPE]),
        (LEGACY, [word.replace("--node_ip=10.0.0.2", "--node_ip=10.0.0.9") for word in RECIPE]),
    ],
)
def test_nothing_else_is_touched(environ: dict[str, str], command: list[str]) -> None:
    after = dict(environ)
    assert correct(after, command) == {}
    assert after == environ


def test_a_script_that_reads_its_rank_below_the_import_is_fine() -> None:
    script = "import os\nfrom fleet_train import fleet\nRANK = int(os.environ['PADDLE_TRAINER_ID'])\n"
    assert read_before_import(script) is None
    assert warning_of(script, {"PADDLE_TRAINER_ID": "0"}).startswith("the stock launcher set PADDLE_TRAINER_ID and")


@pytest.mark.parametrize(
    "line",
    [
        "RANK = int(os.environ['PADDLE_TRAINER_ID'])",
        "NUMBER = os.getenv('PADDLE_TRAINERS_NUM', '1')",
        "rank = paddle.distributed.get_rank()",
        "env = paddle.distributed.ParallelEnv()",
    ],
)
def test_a_script_that_reads_its_rank_above_the_import_is_warned_with_the_line(line: str) -> None:
    script = f"import os\n# PADDLE_TRAINER_ID is read below\n{line}\nimport fleet_train.fleet as fleet\n"
    assert read_before_import(script) == 3
    warning = warning_of(script, {"PADDLE_TRAINER_ID": "0"})
    assert warning.startswith("WARNING: ")
    assert "line 3 of the script is above that: move `import fleet_train` to its first line" in warning
    assert line not in warning


def test_without_a_correction_nothing_is_logged() -> None:
    assert warning_of("RANK = os.environ['PADDLE_TRAINER_ID']", {}) == ""


@pytest.fixture
def uncorrected(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """This process as if nothing had been corrected yet; what is corrected is put there."""
    before: dict[str, str | None] = {}
    monkeypatch.setattr(at_import, "_launched", before)
    for name in rank_variables(Cluster.single()):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("FLEET_TRAIN_STORE", raising=False)
    return before


def test_a_process_is_corrected_once_and_its_launchers_values_are_kept(
    uncorrected: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_import, "parent_command", lambda: RECIPE)
    legacy = {name: value for name, value in LEGACY.items() if name != "PADDLE_CURRENT_ENDPOINT"}
    for name, value in legacy.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PADDLE_CURRENT_ENDPOINT", "")
    monkeypatch.delenv("PADDLE_CURRENT_ENDPOINT")
    for _ in range(2):
        at_import.correct_this_process()
        assert os.environ["PADDLE_TRAINER_ID"] == "3"
        assert os.environ["PADDLE_CURRENT_ENDPOINT"] == "10.0.0.2:6171"
    assert uncorrected["PADDLE_TRAINER_ID"] == "1"
    assert uncorrected["PADDLE_CURRENT_ENDPOINT"] is None
    launched = at_import.launch_environment()
    assert {name: launched[name] for name in legacy} == legacy
    assert "PADDLE_CURRENT_ENDPOINT" not in launched
    assert warning_of(None).startswith("the stock launcher set PADDLE_TRAINER_ID")


def test_without_a_correction_the_launchers_values_are_the_environment(
    uncorrected: dict[str, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(at_import, "parent_command", lambda: ["bash"])
    at_import.correct_this_process()
    assert uncorrected == {}
    assert at_import.launch_environment() == dict(os.environ)
    assert warning_of("RANK = os.environ['PADDLE_TRAINER_ID']") == ""


def test_fleetrun_is_the_stock_launcher_under_another_name() -> None:
    environ = dict(LEGACY)
    assert correct(environ, ["python", "/usr/bin/fleetrun", *RECIPE[4:]]) != {}
    assert environ["PADDLE_TRAINER_ID"] == "3"
