"""Jobs on two loopback nodes. The scripts import no Paddle: ranks start at once."""

from __future__ import annotations

import signal
import sys

from tests.integration.launch.conftest import HOSTS, SECRET, Bench, send

_SAY = """
import os, sys
print("args", sys.argv[1:])
for name in "TRAINER_ID TRAINERS_NUM TRAINER_ENDPOINTS LOCAL_RANK".split():
    print(f"PADDLE_{name}", os.environ.get(f"PADDLE_{name}"))
for name in ("FLEET_TRAIN_STORE", "OMP_NUM_THREADS"):
    print(name, os.environ.get(name))
print("token", "SECRET_TOKEN" in os.environ)
"""

_FAIL = """
import os, pathlib, sys, time
rank, here = int(os.environ["PADDLE_TRAINER_ID"]), pathlib.Path(sys.argv[1])
print("rank", rank, "began", flush=True)
here.joinpath(str(rank)).touch()
if rank == 1:
    while not here.joinpath("0").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    raise ValueError("the data of rank 1 is bad")
time.sleep(120)
"""

_SLEEP = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print("began", flush=True)
time.sleep(120)
"""


def test_one_job_over_two_nodes(bench: Bench) -> None:
    # What an outer job has left in the environment; both nodes write into one folder, as on a network file system.
    outer = {"PADDLE_MASTER": "10.9.9.9:1", "PADDLE_NNODES": "5", "PADDLE_TRAINER_ID": "3", "POD_IP": "10.9.9.9"}
    outer["OMP_NUM_THREADS"] = "1"  # the user's own, which stays
    folder = bench.folder / "mylog"
    for node in (0, 1):
        flags = ["--nproc_per_node", "2", f"--log_dir={folder}"]
        bench.start(_SAY, "--nnodes=9", "--", "x y", flags=flags, environ=outer, node=node)
    ended = bench.ended()
    assert [one.exit_code for one in ended] == [0, 0], bench.job.report()
    port = bench.first_port
    endpoints = ",".join(f"{host}:{port + local}" for host in HOSTS for local in (0, 1))
    for rank, log in enumerate(["workerlog.0", "workerlog.1", "127.0.0.3/workerlog.0", "127.0.0.3/workerlog.1"]):
        assert (folder / log).read_text().splitlines() == [
            "args ['--nnodes=9', '--', 'x y']",
            f"PADDLE_TRAINER_ID {rank}",
            "PADDLE_TRAINERS_NUM 4",
            f"PADDLE_TRAINER_ENDPOINTS {endpoints}",
            f"PADDLE_LOCAL_RANK {rank % 2}",
            f"FLEET_TRAIN_STORE 127.0.0.2:{port + 2}/0",
            "OMP_NUM_THREADS 1",
            "token True",
        ]
    assert "PADDLE_TRAINER_ID 0" in ended[0].output  # rank 0 is live on the terminal, and nobody else
    assert "PADDLE_TRAINER_ID" not in ended[1].output
    assert bench.files_with(SECRET) == []
    assert bench.files_with("10.9.9.9") == []
    assert list(bench.temporary.iterdir()) == []


def test_every_node_shows_the_same_root_cause(bench: Bench) -> None:
    (bench.folder / "here").mkdir()
    bench.start_two(_FAIL, str(bench.folder / "here"))
    ended = bench.ended()
    assert [one.exit_code for one in ended] == [1, 1], bench.job.report()
    log = bench.folder / "node1" / "log" / "workerlog.0"
    for one in ended:
        lines = one.output.splitlines()
        assert "  | ValueError: the data of rank 1 is bad" in lines
        assert lines[-2].startswith(f"failed first  1     127.0.0.3:{bench.first_port}  exit code 1")
        assert lines[-2].endswith(str(log))
        assert lines[-1].startswith(f"secondary     0     127.0.0.2:{bench.first_port}  stopped by SIGTERM")
    assert "rank 0 began" in ended[0].output
    assert bench.files_with(SECRET) == []
    bench.no_orphans_within(1.0)


def test_a_killed_launcher_leaves_no_process_and_the_others_get_an_error(bench: Bench) -> None:
    first, second = bench.start_two(_SLEEP)
    bench.wait_for_output("began", "node0/log/workerlog.0", "node1/log/workerlog.0")
    assert bench.files_with(SECRET) == []
    send(first, signal.SIGKILL)
    bench.no_orphans_within(10.0)
    assert second.process.wait() == 11
    assert "the launcher of node 0 (127.0.0.2), which hosts the job store" in second.output
    assert "was lost" in second.output.splitlines()[-1]
    assert "Traceback" not in second.output
    assert list(bench.temporary.iterdir()) == []


def test_kill_of_one_launcher_ends_the_job_on_all_nodes(bench: Bench) -> None:
    first, second = bench.start_two(_SLEEP)
    bench.wait_for_output("began", "node0/log/workerlog.0", "node1/log/workerlog.0")
    send(second, signal.SIGTERM)
    assert [one.exit_code for one in bench.ended()] == [143, 143], bench.job.report()
    assert second.output.splitlines()[-1] == (
        "fleet_train: node 1 (127.0.0.3) was stopped by SIGTERM; 1 rank ended with it"
    )
    assert "node 1 (127.0.0.3) was stopped by SIGTERM" in first.output.splitlines()[-1]
    bench.no_orphans_within(1.0)


def test_nodes_that_were_started_differently_are_refused_before_a_rank_starts(bench: Bench) -> None:
    script = "print('a rank ran')"
    bench.start(script, node=0, flags=["--nproc_per_node=1"])
    bench.start(script, node=1, flags=["--nproc_per_node=1", "--strategy=multi_node"])
    ended = bench.ended()
    assert [one.exit_code for one in ended] == [8, 8], bench.job.report()
    for one in ended:
        *before, last = one.output.splitlines()
        assert "--strategy is" in last
        assert all("waiting for node" in line for line in before), one.output  # the other one started late
    assert "a rank ran" not in bench.job.report()


def test_a_node_that_does_not_come_is_named(bench: Bench) -> None:
    bench.start("", node=0, flags=["--join_timeout=1.5"])
    (ended,) = bench.ended()
    assert ended.exit_code == 6
    assert ended.output.splitlines()[-1].startswith(
        "fleet_train: JoinTimeout: node 1 (127.0.0.3) did not connect within 1.5 s (--join_timeout)"
    )
    assert sys.executable not in ended.output
