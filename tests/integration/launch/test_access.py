"""Who may connect to a job of real launchers: its own nodes, by address, job and secret."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import psutil
import pytest

from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.wire import encode
from fleet_train.errors import ClusterError
from tests.integration.launch.conftest import HOSTS, Bench

JOB_SECRET = "a secret of this test, 0123456789"

# In the first attempt rank 0 is late at four groups of three ranks. Of two ranks, the one whose port has the lower
# number waits for the other: at each group strangers find a port that the late rank has to call with a chance of 3/4.
_TRAIN = """
import os, time, types
import paddle
from fleet_train import fleet
from fleet_train.convert.session import current
create, made = paddle.base.core.ProcessGroupGloo.create, []
def slow(*arguments):
    if made and os.environ["PADDLE_TRAINER_ID"] == os.environ["FLEET_TRAIN_ATTEMPT"] == "0":
        time.sleep(2.5)
    made.append(create(*arguments))
    return made[-1]
paddle.base.core.ProcessGroupGloo = types.SimpleNamespace(create=slow)
fleet.init(is_collective=True)
current().job.communicators(4)
total = fleet.all_reduce(fleet.worker_index())
print("attempt", os.environ["FLEET_TRAIN_ATTEMPT"], "has", len(made), "groups; the sum is", total, flush=True)
"""


def secret_file(folder: Path, text: str = JOB_SECRET) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "secret"
    path.write_text(text + "\n")
    path.chmod(0o600)
    return path


_FAIL = """
import os, sys, time
from fleet_train import fleet, role_maker
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
print("ranks", fleet.gather(fleet.worker_index()), os.environ["FLEET_TRAIN_JOB_ID"], flush=True)
while not os.path.exists("../go"):
    time.sleep(0.05)
if fleet.worker_index() == 1:
    os.write(1, b"\\x1b]0;owned\\x07\\x1b[2J\\xc2\\x9b31m\\n")
    sys.exit(3)
time.sleep(60)
"""


def test_a_jobs_secret_is_written_nowhere_and_strangers_neither_end_it_nor_write_on_the_terminal(
    bench: Bench, tmp_path: Path
) -> None:
    """Texts that no encoding can hold, sent to a job with a secret; and the last lines of a rank of another machine."""
    path = secret_file(tmp_path.with_name(f"{tmp_path.name}-secret"))
    path.chmod(0o644)
    first, _ = bench.start_two(_FAIL, flags=[f"--job_secret_file={path}", "--job_id=mine"])
    bench.wait_for_output("ranks [0, 1] mine\n", "node0/log/workerlog.0", "node1/log/workerlog.0")
    hello = {"do": "hello", "job": "mine", "namespace": "0", "group": "node", "member": 0}
    frames = [encode(hello | {"nonce": nonce, "proof": proof}) for nonce, proof in (("\ud800", "00"), ("n", "\ud800"))]
    for host in HOSTS:
        for frame in (*frames, b'{"do": "fail", "value": {"exit_code": 0}}\n'):
            with socket.create_connection((host, bench.first_port + 1), timeout=10) as stranger:
                stranger.sendall(frame)
                with contextlib.suppress(ConnectionResetError):
                    while stranger.recv(4096):
                        pass
    for access, why in (
        (Access("mine"), "it requires this job's secret"),
        (Access("", JOB_SECRET.encode()), "it belongs to another job, 'mine'"),
    ):
        with pytest.raises(ClusterError, match=why):
            StoreClient.connect(f"{HOSTS[0]}:{bench.first_port + 1}/0", 0, group="node", access=access)
    (bench.folder / "go").touch()
    ended = bench.ended()
    assert [one.exit_code for one in ended] == [3, 3], bench.job.report()
    for one in ended:
        assert "\\x1b]0;owned\\x07\\x1b[2J\\x9b31m" in one.output, one.output
        assert not {"\x1b", "\a", "\x9b"} & set(one.output)
        assert "UnicodeEncodeError" not in one.output
        assert one.output.count(f"every user here can read the job's secret in {path} (mode 0644)") == 1
    assert first.process.poll() == 3
    assert bench.files_with(JOB_SECRET) == []


def test_a_stranger_at_every_port_of_the_ranks_while_groups_form_costs_a_restart_and_not_the_job(
    bench: Bench, tmp_path: Path
) -> None:
    """Gloo takes the first caller for a rank, also in a job with a secret."""
    path = secret_file(tmp_path.with_name(f"{tmp_path.name}-secret"))
    launcher = bench.start(
        _TRAIN, flags=["--nproc_per_node=3", "--max_restarts=2", f"--job_secret_file={path}", "--job_id=digits-7"]
    )
    called: dict[int, socket.socket] = {}
    while launcher.process.poll() is None and "restart 1 of 2" not in launcher.output:
        for port in listening(bench) - called.keys():
            called[port] = socket.socket()
            called[port].bind(("127.0.0.9", 0))
            with contextlib.suppress(OSError):
                called[port].connect(("127.0.0.1", port))
    (ended,) = bench.ended(120.0)
    for stranger in called.values():
        stranger.close()
    assert ended.exit_code == 0, bench.job.report()
    (line,) = [line for line in ended.output.splitlines() if "restart 1 of 2" in line]
    assert line.startswith("fleet_train: attempt 0: the group of ranks [0, 1, 2] could not be formed: "), line
    assert "strangers" in line
    assert "failed first" not in ended.output
    assert bench.log().splitlines()[-1] == "attempt 1 has 5 groups; the sum is 3"


def listening(bench: Bench) -> set[int]:
    """The ports at which processes of the job listen."""
    found = set()
    for process in bench.job.leftovers():
        with contextlib.suppress(psutil.Error):
            found |= {one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
    return found
