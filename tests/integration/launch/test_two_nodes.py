"""Jobs on two loopback nodes: how they begin, end, and continue after a fault. The scripts import no Paddle."""

from __future__ import annotations

import signal
import time

import pytest

from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.client import StoreClient
from fleet_train.errors import ClusterError
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


def test_kill_of_one_launcher_ends_the_job_on_all_nodes_and_a_stranger_does_not(bench: Bench) -> None:
    first, second = bench.start_two(_SLEEP)
    bench.wait_for_output("began", "node0/log/workerlog.0", "node1/log/workerlog.0")
    access = Access(source="127.0.0.9")
    with pytest.raises(ClusterError, match="it accepts the addresses of the node list only"):
        StoreClient.connect(f"{HOSTS[0]}:{bench.first_port + 1}/0", 0, group="node", timeout_seconds=5, access=access)
    bench.wait_for_output("refused a connection from 127.0.0.9, which is not in the node list", "node0.log")
    send(second, signal.SIGTERM)
    assert [one.exit_code for one in bench.ended()] == [143, 143], bench.job.report()
    assert second.output.splitlines()[-1] == (
        "fleet_train: node 1 (127.0.0.3) was stopped by SIGTERM; 1 rank ended with it"
    )
    assert "node 1 (127.0.0.3) was stopped by SIGTERM" in first.output.splitlines()[-1]
    bench.no_orphans_within(1.0)


@pytest.mark.parametrize(
    ("flags", "there", "here"),
    [
        pytest.param([("--nproc_per_node=2",), ()], "the number of processes per node (--nproc_per_node) is {}", "12"),
        pytest.param([(), ("--max_restarts=3",)], "--max_restarts is {}", "30", marks=pytest.mark.long),
        pytest.param([(), ("port",)], "--started_port is {}", "", marks=pytest.mark.long),
        pytest.param([(), ("order",)], "the node list is {}", "", marks=pytest.mark.long),
    ],
    ids=["processes", "restarts", "port", "order"],
)
def test_nodes_with_different_flags_learn_at_once_in_what_they_differ(
    bench: Bench, flags: list[tuple[str, ...]], there: str, here: str
) -> None:
    port, nodes = f"--started_port={bench.first_port + 3}", ",".join(HOSTS)
    words = {"port": (port,), "order": (f"--cluster_node_ips={','.join(reversed(HOSTS))}",)}
    values = {"port": (str(bench.first_port + 3), str(bench.first_port)), "order": (",".join(reversed(HOSTS)), nodes)}
    name = next((word for word in words if (word,) in flags), "")
    began = time.monotonic()
    for index, own in enumerate(flags):
        bench.start(_SLEEP, flags=words.get(name, ()) if own == (name,) else own, node=index)
    first, second = bench.ended(60.0)
    assert time.monotonic() - began < 45.0  # of the 300 s of --join_timeout
    assert [first.exit_code, second.exit_code] == [8, 8], bench.job.report()
    one, other = values.get(name, tuple(here))
    assert f"{there.format(one)} there and {other} here" in first.output
    assert f"{there.format(other)} there and {one} here" in second.output
    bench.no_orphans_within(1.0)


# What each attempt does: `sys.argv[1]` has one word per attempt, the last one counts for all further ones. Rank 1 fails
# once rank 0 has begun.
_ATTEMPTS = """
import os, pathlib, signal, sys, time
attempt, rank = int(os.environ["FLEET_TRAIN_ATTEMPT"]), int(os.environ["PADDLE_TRAINER_ID"])
words = sys.argv[1].split(",")
print("attempt", attempt, "rank", rank, "of", os.environ["PADDLE_TRAINERS_NUM"], flush=True)
pathlib.Path(f"{sys.argv[2]}/{attempt}.{rank}").touch()
how = words[min(attempt, len(words) - 1)]
if how == "done":
    sys.exit(0)
if rank == 1:
    while not os.path.exists(f"{sys.argv[2]}/{attempt}.0"):
        time.sleep(0.01)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError(f"bad row {attempt}")
time.sleep(120)
"""


def start_two(bench: Bench, words: str) -> None:
    (bench.folder / "here").mkdir()
    bench.start_two(_ATTEMPTS, words, str(bench.folder / "here"), flags=["--max_restarts=3"])


def test_a_rank_that_is_killed_takes_the_job_to_another_attempt(bench: Bench) -> None:
    start_two(bench, "kill,done")
    first, second = bench.ended()
    assert (first.exit_code, second.exit_code) == (0, 0), bench.job.report()
    for attempt, name in enumerate(("workerlog.0.attempt0", "workerlog.0")):
        for rank in (0, 1):
            assert bench.log(f"node{rank}/log/{name}") == f"attempt {attempt} rank {rank} of 2\n"
    rank_1 = f"rank 1 (127.0.0.3:{bench.first_port}) failed first: killed by SIGKILL"
    (told,) = [line for line in first.output.splitlines() if "restart " in line]
    assert told.startswith(f"fleet_train: attempt 0: {rank_1}")
    assert told.endswith("; restart 1 of 3 in 1 s")
    assert rank_1 in second.output  # each node hears of it, in one line
    assert "failed first  1" not in first.output  # the table is for the end of a job
    bench.no_orphans_within(1.0)
    assert list(bench.temporary.iterdir()) == []


def test_an_exception_that_comes_again_ends_the_job_with_the_full_report(bench: Bench) -> None:
    start_two(bench, "raise")
    ended = bench.ended()
    assert [one.exit_code for one in ended] == [1, 1], bench.job.report()
    for one in ended:
        assert "  | ValueError: bad row 1" in one.output.splitlines()
        assert one.output.splitlines()[-2].startswith(f"failed first  1     127.0.0.3:{bench.first_port}  exit code 1")
    assert "not restarted: it failed twice in the same way" in ended[0].output
    assert bench.job.leftovers() == []


# The first rank that hears SIGTERM tells the others through a file, as fleet.request_stop does through the barriers.
_SAVES = """
import os, pathlib, signal, sys, time
stop, seconds = pathlib.Path(sys.argv[1]), float(sys.argv[2])
def on_sigterm(number, frame):
    signal.signal(number, signal.SIG_IGN)
    stop.touch()
signal.signal(signal.SIGTERM, on_sigterm)
print("began", flush=True)
while not stop.exists():
    time.sleep(0.01)
time.sleep(seconds)
print("saved", flush=True)
sys.exit(12)
"""


def test_sigterm_lets_the_ranks_of_all_nodes_save_their_state(bench: Bench) -> None:
    stop = bench.folder / "stop"
    _, second = bench.start_two(_SAVES, str(stop), "4.5", flags=["--max_restarts=3"])  # longer than a failed rank gets
    bench.wait_for_output("began", "node0/log/workerlog.0", "node1/log/workerlog.0")
    send(second, signal.SIGTERM)
    ended = bench.ended()
    assert [one.exit_code for one in ended] == [12, 12], bench.job.report()
    for node, one in enumerate(ended):
        assert bench.log(f"node{node}/log/workerlog.0") == "began\nsaved\n"
        assert one.output.splitlines()[-1] == (
            "fleet_train: node 1 (127.0.0.3) was asked to stop by SIGTERM; the job has saved its state and stopped: "
            "start it again to continue"
        )
    bench.no_orphans_within(1.0)


def test_the_grace_has_an_end(bench: Bench) -> None:
    launcher = bench.start(_SAVES, str(bench.folder / "stop"), "300", flags=["--grace_seconds=1"])
    bench.wait_for_output("began", "node0/log/workerlog.0")
    began = time.monotonic()
    send(launcher, signal.SIGUSR1)
    assert launcher.process.wait(timeout=250) == 128 + signal.SIGUSR1
    assert time.monotonic() - began < 200.0
    assert "(1 rank did not end within 1 s: rank 0 " in launcher.output.splitlines()[-1]
    assert bench.job.leftovers() == []
