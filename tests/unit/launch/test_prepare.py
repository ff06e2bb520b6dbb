from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleet_train.cluster.store.access import Access
from fleet_train.errors import ClusterError, PaddleUnusable, ProfileError
from fleet_train.launch import prepare
from fleet_train.launch.node import LaunchEnvironment, Machine, Node, visible_gpus
from fleet_train.launch.request import FaultPolicy, LaunchRequest


def request(*command: str, is_module: bool = False, strategy: str | None = None) -> LaunchRequest:
    return LaunchRequest(command=command, is_module=is_module, strategy=strategy)


def machine(paddle: str = "3.3.1 (paddlepaddle)") -> Machine:
    versions = {"python": "3.11.2", "fleet_train": "0.1.0", "paddle": paddle}
    return Machine({"lo": ("127.0.0.1",)}, 4, False, None, versions)


@pytest.mark.parametrize("name", ["a" * 300, "a\0b"])
def test_invalid_file_names_are_errors(name: str) -> None:
    with pytest.raises(ClusterError, match=r"the training script .* cannot be used: "):
        prepare.check_program(LaunchRequest((name,)))
    with pytest.raises(ClusterError, match=r"--log_dir=.* cannot be used: "):
        prepare.check_log_dir(Path(name))


def test_a_script_must_exist(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    prepare.check_program(request(str(tmp_path / "train.py")))
    with pytest.raises(ClusterError, match=r"trian.py does not exist; did you mean .*/train.py\?"):
        prepare.check_program(request(str(tmp_path / "trian.py")))
    with pytest.raises(ClusterError, match="is a folder"):
        prepare.check_program(request(str(tmp_path)))


def test_a_module_must_exist() -> None:
    prepare.check_program(request("json.tool", is_module=True))
    with pytest.raises(ClusterError, match="-m no_such_thing: there is no such module"):
        prepare.check_program(request("no_such_thing", is_module=True))


def launch_of(node: Node, visible_gpus: tuple[str, ...] | None = None, *, is_module: bool = False) -> prepare.Launch:
    environment = LaunchEnvironment({"X": "y"}, frozenset(), ())
    access = Access("job", None, "10.0.0.2")
    asked = request("train.py", "--a", "--", "x y", is_module=is_module)
    return prepare.Launch(asked, node, Path("/logs"), None, environment, {}, access, visible_gpus=visible_gpus)


def test_every_rank_runs_the_script_with_its_own_environment() -> None:
    launch = launch_of(Node(("10.0.0.1", "10.0.0.2"), 1, 6170, 2, None, "eth0"))
    assert launch.command() == [sys.executable, "-u", "train.py", "--a", "--", "x y"]
    environ = launch.environ_of("10.0.0.1:6172/1", 1, "abc", {"HOME": "/root"})
    assert [launch.variables_of(local)["PADDLE_TRAINER_ID"] for local in (0, 1)] == ["2", "3"]
    assert launch.variables_of(0)["PADDLE_LOG_DIR"] == "/logs"
    told = {"FLEET_TRAIN_STORE": "10.0.0.1:6172/1", "FLEET_TRAIN_ATTEMPT": "1", "FLEET_TRAIN_LAUNCHED": "abc"}
    assert environ == {**told, "HOME": "/root", "X": "y"}


def test_a_module_is_run_as_a_module() -> None:
    launch = launch_of(Node(("10.0.0.1",), 0, 6170, 1, None, None), is_module=True)
    assert launch.command()[:4] == [sys.executable, "-u", "-m", "train.py"]


def test_a_device_is_selected_by_its_position_among_the_visible_ones() -> None:
    launch = launch_of(Node(("10.0.0.1",), 0, 6170, 2, ("0", "5"), "eth0"), ("5", "2", "0"))
    assert [launch.variables_of(local)["FLAGS_selected_gpus"] for local in (0, 1)] == ["2", "0"]


def test_a_strategy_file_is_passed_on_with_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\ndescription: for a test\n")
    monkeypatch.chdir(tmp_path)
    assert prepare.load_strategy("./mine.yaml")[0] == str(tmp_path / "mine.yaml")
    assert prepare.load_strategy("multi_node")[0] == "multi_node"
    assert prepare.load_strategy(None) == (None, None)
    with pytest.raises(ProfileError):
        prepare.load_strategy("no_such_profile")


def test_a_missing_paddle_is_one_clear_line() -> None:
    with pytest.raises(PaddleUnusable, match=r"Paddle is not installed for .*pip install paddlepaddle"):
        prepare.check_paddle(machine("not installed"), None)


def test_facts_are_what_must_be_equal_everywhere() -> None:
    node = Node(("10.0.0.1", "10.0.0.2"), 1, 6170, 2, None, "eth0")
    assert prepare.facts_of(node, machine(), None, request("train.py")) == {
        "the node list": "10.0.0.1,10.0.0.2",
        "the number of processes per node": 2,
        "--started_port": 6170,
        "--strategy": "none",
        "--set": "none",
        "--max_restarts": 0,
        "--min_nodes": 2,
        "--direct_ranks": 32,
        "--strict": False,
        "the kind of device": "CPU",
        "the Python version": "3.11",
        "the fleet_train version": "0.1.0",
        "the Paddle version": "3.3.1 (paddlepaddle)",
    }


def test_a_log_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    prepare.check_log_dir(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    with pytest.raises(ClusterError, match="file is not a writable folder"):
        prepare.check_log_dir(tmp_path / "file" / "log")


def test_gpus_are_those_that_are_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "2", "10")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, 0"}, tmp_path) == ("2", "0")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == ()


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (FaultPolicy(3, min_nodes=3), "--min_nodes=3: the job has 2 nodes"),
        (FaultPolicy(3, min_nodes=0), "--min_nodes=0: the job has 2 nodes"),
        (FaultPolicy(0, min_nodes=1), "--min_nodes has no effect without restarts"),
        (FaultPolicy(0, rejoin_timeout_seconds=5.0), "--rejoin_timeout has no effect without restarts"),
    ],
)
def test_flags_about_faults_that_make_no_sense_are_refused(faults: FaultPolicy, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        prepare.check_faults(faults, Node(("10.0.0.1", "10.0.0.2"), 0, 6170, 1, None, "eth0"))
