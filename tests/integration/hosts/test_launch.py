"""``launch --hosts``: three machines, one command."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.integration.hosts.conftest import Desk
from tests.support.processes import Job, clean_environ, python
from tests.support.ssh import machines

pytestmark = pytest.mark.sshd

_TRAIN = """
import os
import numpy as np
import paddle
from fleet_train import fleet

paddle.enable_static()
paddle.seed(1)
fleet.init(is_collective=True)
x = paddle.static.data("x", [None, 1])
loss = (paddle.nn.Linear(1, 1)(x) - 1).square().mean()
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
exe = paddle.static.Executor()
exe.run(fleet.startup_program)
rank = fleet.worker_index()
feed = {"x": np.full((4, 1), rank + 1.0, "float32")}
losses = [float(exe.run(fleet.main_program, feed=feed, fetch_list=[loss])[0]) for _ in range(3)]
print(f"rank {rank} of {fleet.worker_num()} has {os.environ['MY_DATA']}: {len(losses)} steps", flush=True)
"""
_WAIT = """
import os, time
print("rank", os.environ["PADDLE_TRAINER_ID"], "waits", flush=True)
time.sleep(120)
"""
_WAITS = ["rank 0 waits", "rank 1 waits", "rank 2 waits"]
_TOKEN = "abc123-must-not-be-seen"
_FAIL = """
import os, time
if os.environ["PADDLE_TRAINER_ID"] == "1":
    raise ValueError("bad thing")
time.sleep(60)
"""


def all_wait(desk: Desk) -> bool:
    logs = [desk.read(disk, f"log/pc{disk + 1}/workerlog.0") for disk in range(3)]
    return [log.strip() for log in logs] == _WAITS


def test_a_job_trains_on_three_machines_and_its_logs_come_here(desk: Desk) -> None:
    desk.write(_TRAIN)
    code, output = desk.run("launch", "--log_dir=mylog", "train.py", MY_DATA="given-here")
    assert code == 0, output
    assert "pc1: rank 0 of 3 has given-here: 3 steps\n" in output
    logs = [desk.read(0, f"mylog/pc{number}/workerlog.0").splitlines()[-1] for number in (1, 2, 3)]
    assert logs == [f"rank {rank} of 3 has given-here: 3 steps" for rank in range(3)]
    assert not desk.has(1, "mylog/pc1")
    assert not list((desk.machines.disks[0] / "mylog").glob(".hosts-*"))


@pytest.mark.long
def test_the_user_may_sit_at_a_machine_that_is_not_listed(desk: Desk) -> None:
    desk.write(_TRAIN)
    code, output = desk.run("launch", "train.py", hosts="pc3:2,pc1:2", at=1, MY_DATA="x")
    assert code == 0, output
    assert "pc3: rank 0 of 4 has x: 3 steps\n" in output
    assert "2 nodes x 2 = 4 ranks; this is node 0 (10.78.0.3)" in output
    assert desk.read(1, "log/pc1/workerlog.1").endswith("rank 3 of 4 has x: 3 steps\n")


def test_what_differs_is_named_for_every_host_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    hidden = f"mount --bind {tmp_path / 'nothing'} {Path(sys.executable).parent}"
    with Job(tmp_path / "job") as job, machines(tmp_path, 3, ["true", hidden]) as these:
        desk = Desk(tmp_path, these, job)
        desk.write(_WAIT, 0, 1)
        desk.write(_FAIL, 2)
        with these.config.open("r+") as config:
            rest = config.read()
            config.seek(0)
            config.write("Host unknown\n  HostName 10.78.0.3\n  User root\n  UserKnownHostsFile none\n")
            config.write("Host closed\n  HostName 10.78.0.1\n  User nobody\n" + rest)
        code, output = desk.run("launch", "train.py", hosts="pc1,pc2,pc3,10.78.0.99,unknown,closed", at=0)
    assert code == 5
    assert "5 of 6 hosts cannot take part, and nothing was started:\n" in output
    assert f"  pc2: there is no {sys.executable}: install the same Python environment" in output
    assert "  pc3: train.py is another file there; every host has the same files: rsync -a " in output
    ssh = f"ssh -F {these.config}"
    assert f"  unknown: its key is not known here, or has changed: connect once with {ssh} unknown, and" in output
    assert "  closed: ssh cannot log in without a password (nobody@10.78.0.1: Permission denied (publickey" in output
    assert "  10.78.0.99: ssh cannot connect: ssh: connect to host 10.78.0.99 port 22: " in output


@pytest.mark.long
def test_a_folder_that_is_not_there_is_named(desk: Desk) -> None:
    for disk in desk.machines.disks[:2]:
        (disk / "sub").mkdir()
        (disk / "sub" / "train.py").touch()
    typed = python(
        "-m", "fleet_train", "launch", "--hosts=pc1,pc2,pc3", f"--ssh_config={desk.machines.config}", "train.py"
    )
    command = desk.machines.on(0, ["sh", "-c", 'cd sub && exec "$@"', "sh", *typed])
    desk.job.start("launch", command, clean_environ())
    (ended,) = desk.job.wait(30)
    assert ended.exit_code == 5
    folder = desk.machines.work / "sub"
    assert f"  pc3: the folder {folder} cannot be entered there (No such file or directory); " in ended.output
    assert f"rsync -a {folder}/ pc3:{folder}/" in ended.output
    assert "pc2" not in ended.output


def test_a_failure_is_reported_once_with_its_exit_code(desk: Desk) -> None:
    desk.write(_FAIL)
    code, output = desk.run("launch", "train.py")
    assert code == 1, output
    assert output.count("the job has failed: rank 1 (10.78.0.2:6170) failed first: exit code 1") == 1
    assert output.count("ValueError: bad thing") == 1
    assert output.count("failed first  1     10.78.0.2:6170  exit code 1") == 1


def test_ctrl_c_ends_the_job_everywhere(desk: Desk) -> None:
    desk.write(_WAIT)
    started = desk.type("launch", "train.py", MY_TOKEN=_TOKEN)
    desk.job.wait_until(lambda: all_wait(desk), 30, "ranks run")
    assert len(desk.others()) > 9  # commands, connections, agents, launchers, ranks
    assert not any(_TOKEN in command for command in desk.others()), "values are in the list of processes"
    started.process.send_signal(signal.SIGINT)
    (ended,) = desk.job.wait(60)
    assert ended.exit_code == 130, ended.output
    desk.all_end_within(5)
    written = [path for disk in desk.machines.disks for path in disk.rglob("*") if path.is_file()]
    assert not any(_TOKEN.encode() in path.read_bytes() for path in written), "values are in a file"


@pytest.mark.long
def test_kill_of_the_command_ends_the_job_everywhere(desk: Desk) -> None:
    desk.write(_WAIT)
    started = desk.type("launch", "train.py", at=1)
    desk.job.wait_until(lambda: all_wait(desk), 30, "ranks run")
    assert desk.others()
    started.process.kill()
    desk.all_end_within(15)


@pytest.mark.long
def test_a_cut_link_ends_the_job_everywhere(desk: Desk) -> None:
    desk.write(_WAIT)
    started = desk.type("launch", "train.py")
    desk.job.wait_until(lambda: all_wait(desk), 30, "ranks run")
    desk.lab.set_link(2, "down")
    (ended,) = desk.job.wait(90)
    assert ended.exit_code == 11, ended.output
    assert "pc3 is lost: " in started.output
    desk.all_end_within(30)


@pytest.mark.long
def test_a_command_that_sleeps_ends_the_job_everywhere(desk: Desk) -> None:
    desk.write(_WAIT)
    started = desk.type("launch", "train.py")
    desk.job.wait_until(lambda: all_wait(desk), 30, "ranks run")
    started.process.send_signal(signal.SIGSTOP)
    desk.job.wait_until(lambda: not any("--node_ip" in each for each in desk.others()), 40, "ranks have ended")
    started.process.send_signal(signal.SIGCONT)
    (ended,) = desk.job.wait(60)
    assert ended.exit_code != 0
    desk.all_end_within(5)


_AGAIN = """
import os, time
attempt = os.environ["FLEET_TRAIN_ATTEMPT"]
print("rank", os.environ["PADDLE_TRAINER_ID"], "waits" if attempt == "0" else "goes on", flush=True)
time.sleep(120 if attempt == "0" else 0)
"""


@pytest.mark.long
def test_with_min_nodes_the_job_goes_on_without_a_host(desk: Desk) -> None:
    desk.write(_AGAIN)
    flags = "--max_restarts=1 --min_nodes=2 --lost_node_timeout=3 --rejoin_timeout=2".split()
    started = desk.type("launch", *flags, "train.py")
    desk.job.wait_until(lambda: all_wait(desk), 30, "ranks run")
    desk.lab.set_link(2, "down")
    (ended,) = desk.job.wait(90)
    assert ended.exit_code == 0, ended.output
    assert "pc1: rank 0 goes on\n" in started.output
    assert "fleet_train: pc3 is lost: " in started.output
    assert desk.read(0, "log/pc2/workerlog.0") == "rank 1 goes on\n"
    desk.all_end_within(30)
