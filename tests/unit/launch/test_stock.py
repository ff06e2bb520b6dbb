from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fleet_train.launch import paddle_launch_main, worker_main
from fleet_train.launch.node import Node
from fleet_train.launch.processes import PrivateFolder, stock_command
from tests.support.processes import clean_environ, python

PRIVATE = Path("/tmp/private")


def command(node: Node, *program: str, is_module: bool = False) -> list[str]:
    return stock_command(node, program, is_module=is_module, log_dir=Path("/logs"), token="1-ab", private=PRIVATE)


def test_the_stock_launcher_starts_our_wrapper_for_every_process() -> None:
    node = Node(("10.0.0.1", "10.0.0.2"), 1, 6170, 2, None, "eth0")
    assert command(node, "train.py", "--a", "--", "x y") == [
        sys.executable,
        paddle_launch_main.__file__,
        "-m",
        "paddle.distributed.launch",
        "--ips=10.0.0.1,10.0.0.2",
        "--host=10.0.0.2",
        "--start_port=6170",
        "--nproc_per_node=2",
        "--log_dir=/tmp/private",
        "--job_id=/dev/null/fleet_train",
        "--enable_gpu_log=False",
        worker_main.__file__,
        "/logs",
        "1-ab",
        '["train.py", "--a", "--", "x y"]',
    ]


def test_devices_are_named_where_there_are_any() -> None:
    started = command(Node(("10.0.0.1",), 0, 6170, 2, ("2", "3"), "eth0"), "train.py")
    assert "--devices=2,3" in started
    assert started[:3] == [sys.executable, "-m", "paddle.distributed.launch"]  # it asks Paddle's core for the devices


def test_a_module_is_run_as_a_module() -> None:
    assert command(Node(("10.0.0.1",), 0, 6170, 1, None, None), "a.b", is_module=True)[-1] == '["-m", "a.b"]'


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_what_the_stock_launcher_writes_about_the_environment_goes_nowhere() -> None:
    private = PrivateFolder(range(2, 4))
    try:
        names = ["backup_env.2.json", "backup_env.3.json", "envlog.0", "envlog.1"]
        assert sorted(entry.name for entry in private.path.iterdir()) == [".lock", *names]
        assert all((private.path / name).resolve() == Path("/dev/null") for name in names)
        assert private.path.stat().st_mode & 0o077 == 0
    finally:
        private.remove()
    assert not private.path.exists()


def test_only_folders_of_dead_launchers_are_removed(temporary: Path) -> None:
    made_by_another = "from fleet_train.launch.processes import PrivateFolder; print(PrivateFolder(range(1)).path)"
    environ = clean_environ({"TMPDIR": str(temporary)})
    ended = subprocess.run(python("-c", made_by_another), env=environ, capture_output=True, text=True, check=True)
    abandoned = Path(ended.stdout.strip())
    (temporary / "fleet_train-launch-unheld").mkdir()
    (temporary / "fleet_train-launch-link").symlink_to(abandoned)
    assert abandoned.is_dir()
    first, second = PrivateFolder(range(1)), PrivateFolder(range(1))
    try:
        assert not abandoned.exists()
        assert first.path.is_dir()
        names = ["fleet_train-launch-link", "fleet_train-launch-unheld", first.path.name, second.path.name]
        assert sorted(path.name for path in temporary.iterdir()) == sorted(names)
    finally:
        first.remove()
        second.remove()
