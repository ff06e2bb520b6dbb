"""Checkpoints on several nodes, through the real launcher: nodes with their own folders lose one of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.checkpoints import change
from tests.support.ports import free_ports
from tests.support.processes import Ended, Job, clean_environ, python, write_script

HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
# 45 steps in an epoch; dropout, momentum and a decaying rate are what a resume could get wrong.
RECIPE = ("--model=mlp", "--data=digits", "--epochs=4", "--batch_size=16", "--seed=3", "--checkpoint_every_steps=20")
COPIES = "--checkpoint_copies=2"


# The trainer on nodes whose receivers of copies write their port into node<i>/port, and whose disk takes no copy while
# node<i>/full exists.
_TELLING_TRAINER = """
from pathlib import Path
from fleet_train.cli.train import command
from fleet_train.train.checkpoint import transfer as receiving

begin, write = receiving.Receiver.__init__, receiving._write_file

def begin_and_tell(self, *arguments):
    begin(self, *arguments)
    Path("port.new").write_text(str(self.address.port))
    Path("port.new").rename("port")

def write_or_fail(*arguments):
    if Path("full").exists():
        raise OSError(28, "No space left on device")
    write(*arguments)

receiving.Receiver.__init__, receiving._write_file = begin_and_tell, write_or_fail
command()
"""


class Nodes:
    """Three machines; ``node<i>`` below ``folder`` is the disk of machine i."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._jobs = 0
        self._profile = folder / "profile.yaml"  # each rank has errors of its own, which a resume needs
        self._profile.write_text("description: For a test.\nextends: powersgd\npowersgd_start_step: 3\n")

    def start(
        self,
        job: Job,
        nodes: Sequence[int],
        *flags: str,
        output: str = "run",
        launch: Sequence[str] = (),
        program: Sequence[str] = ("-m", "fleet_train", "train"),
    ) -> None:
        """One rank on each of these nodes, in this order; ``output`` is relative to the node's own folder."""
        hosts = [HOSTS[node] for node in nodes]
        flags_of_launch = [f"--cluster_node_ips={','.join(hosts)}", f"--started_port={free_ports(6, hosts)}", *launch]
        train = [*program, *RECIPE, f"--strategy={self._profile}", f"--output_dir={output}", *flags]
        for node, host in zip(nodes, hosts, strict=True):
            command = python("-m", "fleet_train", "launch", *flags_of_launch, f"--node_ip={host}", *train)
            job.start(f"node{node}", command, clean_environ(), cwd=self.folder / f"node{node}")

    def train(self, nodes: Sequence[int], *flags: str, output: str = "run", check: bool = True) -> list[Ended]:
        self._jobs += 1
        with Job(self.folder / f"job{self._jobs}") as job:
            self.start(job, nodes, *flags, output=output)
            ended = job.wait(120.0, 40.0)
            assert not check or [one.exit_code for one in ended] == [0] * len(nodes), job.report()
        return ended

    def wait_for_copy(self, job: Job) -> None:
        there = self.run(1) / "checkpoints"
        job.wait_until(lambda: any(there.glob("step-*")), 60.0, "a copy on the other node")

    def run(self, node: int) -> Path:
        return self.folder / f"node{node}" / "run"

    def kept(self, node: int) -> list[str]:
        return sorted(path.name for path in (self.run(node) / "checkpoints").glob("*step-*"))

    def files(self, node: int) -> dict[str, bytes]:
        checkpoints = self.run(node) / "checkpoints"
        return {str(path.relative_to(checkpoints)): path.read_bytes() for path in checkpoints.glob("*step-*/*")}

    def lose(self, node: int) -> None:
        shutil.rmtree(self.folder / f"node{node}")


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of two ranks that nothing happens to, and that keeps no copies."""
    nodes = Nodes(tmp_path_factory.mktemp("undisturbed"))
    nodes.train([0, 1])
    assert nodes.kept(0) == ["step-00000160", "step-00000180"]
    assert not nodes.run(1).exists(), "without copies, nothing is on the other node"
    assert not any("checkpoint/" in line for line in (nodes.run(0) / "metrics.jsonl").read_text().splitlines())
    return nodes.run(0)


def tensors(run: Path) -> dict[str, np.ndarray]:
    return load_file(run / "checkpoints" / "step-00000180" / "persistables.safetensors")


def assert_same_parameters(found: Path, expected: Path) -> None:
    ours, theirs = tensors(found), tensors(expected)
    assert sorted(ours) == sorted(theirs)
    assert [name for name in theirs if ours[name].tobytes() != theirs[name].tobytes()] == []


def copies_made(run: Path) -> float:
    """What the last record says of them."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return float([record["checkpoint/copies"] for record in records if "checkpoint/copies" in record][-1])


@pytest.mark.long
def test_a_killed_job_resumes_without_the_disk_of_its_first_node(nodes: Nodes, undisturbed: Path) -> None:
    with Job(nodes.folder / "killed") as job:
        nodes.start(job, [0, 1], COPIES, "--background_checkpoints")
        nodes.wait_for_copy(job)
        job.kill_leftovers()
    nodes.lose(0)
    first, _ = nodes.train([0, 1], COPIES, "--resume")
    assert f"comes from rank 1 ({HOSTS[1]}:" in first.output
    assert "resumed from run/checkpoints/step-" in first.output
    assert_same_parameters(nodes.run(0), undisturbed)
    assert nodes.files(0) == nodes.files(1)
    assert copies_made(nodes.run(0)) >= 2


@pytest.mark.long
def test_others_continue_without_the_first_node_and_it_rejoins_with_an_empty_disk(
    nodes: Nodes, undisturbed: Path
) -> None:
    nodes.train([0, 1], COPIES, "--stop_after_epochs=1")
    assert any(name.endswith("/ranks.safetensors") for name in nodes.files(1)), "what each rank has of its own"
    nodes.lose(0)
    nodes.train([1, 2], COPIES, "--stop_after_epochs=2", "--resume")
    assert nodes.kept(1) == nodes.kept(2) == ["step-00000120", "step-00000135"]
    first, *_ = nodes.train([0, 1], "--checkpoint_copies=3", "--resume")
    assert "resumed from run/checkpoints/step-00000135" in first.output
    assert ", as many as there are" in first.output
    assert_same_parameters(nodes.run(0), undisturbed)
    assert nodes.files(0) == nodes.files(1)


@pytest.mark.long
def test_a_restart_of_the_launcher_takes_the_copy_by_itself(nodes: Nodes) -> None:
    with Job(nodes.folder / "restarted") as job:
        nodes.start(job, [0, 1], COPIES, "--epochs=10", launch=("--max_restarts=2",))
        nodes.wait_for_copy(job)
        shutil.rmtree(nodes.run(0) / "checkpoints", ignore_errors=True)
        os.kill(json.loads((nodes.folder / "node1/log/workerend.0.json").read_text())["pid"], signal.SIGKILL)
        ended = job.wait(120.0)
        assert [one.exit_code for one in ended] == [0, 0], job.report()
    assert "restart 1 of 2" in ended[0].output
    assert "resumed from run/checkpoints/step-" in ended[0].output
    assert nodes.files(0) == nodes.files(1) != {}


def test_a_job_that_is_stopped_in_good_order_leaves_its_last_checkpoint_on_both_nodes(nodes: Nodes) -> None:
    with Job(nodes.folder / "stopped") as job:
        nodes.start(job, [0, 1], COPIES, "--epochs=1000", "--background_checkpoints")
        nodes.wait_for_copy(job)
        job.started[1].process.send_signal(signal.SIGTERM)
        ended = job.wait(60.0)
        assert [one.exit_code for one in ended] == [12, 12], job.report()
    last = nodes.kept(0)[-1]
    assert f"resume from run/checkpoints/{last}" in (nodes.folder / "node0/log/workerlog.0").read_text()
    assert nodes.files(0) == nodes.files(1) != {}


@pytest.mark.long
def test_three_nodes_keep_what_three_are_asked_for(nodes: Nodes) -> None:
    nodes.train([0, 1, 2], "--checkpoint_copies=3", "--stop_after_epochs=1")
    assert nodes.files(0) == nodes.files(1) == nodes.files(2) != {}


@pytest.mark.long
def test_an_older_run_that_a_node_has_kept_is_not_resumed(nodes: Nodes) -> None:
    nodes.train([0, 1], COPIES)
    older = nodes.files(1)
    shutil.copytree(nodes.run(1), nodes.folder / "kept")
    refused = nodes.train([0, 1], COPIES, check=False)
    assert [one.exit_code for one in refused] == [9, 9]
    nodes.lose(0)
    refused = nodes.train([0, 1], COPIES, check=False)
    assert [one.exit_code for one in refused] == [9, 9]
    assert "run holds checkpoints of an earlier run on rank 1 (127.0.0.3:" in refused[0].output
    assert nodes.files(1) == older

    nodes.train([0, 1], COPIES, "--overwrite", "--stop_after_epochs=1")
    assert nodes.kept(0) == nodes.kept(1) == ["step-00000040", "step-00000045"]

    shutil.rmtree(nodes.run(1))  # as if it had been away when the run began anew
    shutil.copytree(nodes.folder / "kept", nodes.run(1))
    first, _ = nodes.train([0, 1], COPIES, "--resume", "--stop_after_epochs=1")
    assert "resumed from run/checkpoints/step-00000045" in first.output
    (aside,) = (nodes.run(1) / "checkpoints").glob("of-run-*")
    assert f"checkpoints of another run were moved to run/checkpoints/{aside.name}" in first.output
    assert {str(path.relative_to(aside)): path.read_bytes() for path in aside.glob("*/*")} == older
    assert nodes.kept(0) == nodes.kept(1) == ["step-00000080", "step-00000090"]


@pytest.mark.long
def test_nothing_is_sent_where_all_nodes_see_one_folder(nodes: Nodes, undisturbed: Path) -> None:
    shared = nodes.folder / "shared"
    first, _ = nodes.train([0, 1], COPIES, output=str(shared))
    assert first.output.count("all nodes see rank 0's checkpoints in one shared folder; nothing is sent") == 1
    assert_same_parameters(shared, undisturbed)
    assert "checkpoint/copies" not in (shared / "metrics.jsonl").read_text()
    assert not nodes.run(1).exists()
    kept = sorted(path.name for path in (shared / "checkpoints").glob("[!.]*"))
    assert kept == ["run.json", "step-00000160", "step-00000180"]


def set_clock_ahead(run: Path) -> None:
    """As if the clock of rank 0 had been a year ahead when this run began."""
    record = run / "checkpoints" / "run.json"
    ahead = json.loads(record.read_text())
    ahead["began"] += 365 * 86400.0
    record.write_text(json.dumps(ahead))
    for folder in (run / "checkpoints").glob("step-*"):
        change(folder, run=ahead)


@pytest.mark.long
def test_a_run_begun_by_a_clock_ahead_is_not_resumed_after_a_later_one(nodes: Nodes) -> None:
    nodes.train([0, 1], COPIES, "--stop_after_epochs=1")
    for node in (0, 1):
        set_clock_ahead(nodes.run(node))
    nodes.train([0, 2], COPIES, "--overwrite", "--stop_after_epochs=2")  # node 1 is away
    later = nodes.files(0)
    first, *_ = nodes.train([0, 1, 2], "--checkpoint_copies=3", "--resume", "--stop_after_epochs=2")
    assert "resumed from run/checkpoints/step-00000090" in first.output
    (aside,) = (nodes.run(1) / "checkpoints").glob("of-run-*")
    assert f"checkpoints of another run were moved to run/checkpoints/{aside.name}" in first.output
    assert not list((nodes.run(0) / "checkpoints").glob("of-run-*"))
    assert any("step-00000090/" in name for name in later)


@contextlib.contextmanager
def silent_connections(port: int, sources: Sequence[str], number: int) -> Iterator[None]:
    """Hold so many connections from each address, and open them again when they are closed."""
    ended = threading.Event()

    def hold(source: str) -> None:
        held: list[socket.socket] = []
        while not ended.wait(0.05):
            open_ = []
            for connection in held:
                try:
                    is_closed = connection.recv(1) == b""
                except BlockingIOError:
                    is_closed = False
                except OSError:
                    is_closed = True
                connection.close() if is_closed else open_.append(connection)
            held = open_
            with contextlib.suppress(OSError):
                while len(held) < number:
                    held.append(socket.create_connection((HOSTS[1], port), 5.0, (source, 0)))
                    held[-1].setblocking(False)
        for connection in held:
            connection.close()

    threads = [threading.Thread(target=hold, args=(source,)) for source in sources]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_silent_connections_keep_no_copy_away(nodes: Nodes) -> None:
    script = str(write_script(_TELLING_TRAINER, nodes.folder))
    with Job(nodes.folder / "besieged") as job:
        nodes.start(job, [0, 1], COPIES, "--epochs=2", program=[script])
        port = nodes.folder / "node1" / "port"
        job.wait_until(port.exists, 60.0, "the receiver's port")
        with silent_connections(int(port.read_text()), ["127.0.0.9", HOSTS[0]], 160):
            ended = job.wait(120.0)
        assert [one.exit_code for one in ended] == [0, 0], job.report()
    assert "no copy on" not in job.report()
    assert nodes.files(0) == nodes.files(1) != {}


def test_a_copy_that_stays_behind_is_in_the_last_line_and_the_exit_code_and_a_resume_sends_it(nodes: Nodes) -> None:
    script = str(write_script(_TELLING_TRAINER, nodes.folder))
    full = nodes.folder / "node1" / "full"
    full.parent.mkdir()
    full.touch()
    with Job(nodes.folder / "behind") as job:
        nodes.start(job, [0, 1], COPIES, "--epochs=1", program=[script])
        ended = job.wait(120.0)
        assert [one.exit_code for one in ended] == [14, 14], job.report()
    told = (nodes.folder / "node0/log/workerlog.0").read_text().splitlines()[-1]
    assert "NotSaved: step-00000045 is whole on rank 0 (127.0.0.2:" in told
    assert "asks for more, and there is no copy on rank 1 (127.0.0.3:" in told
    assert "No space left on device" in told
    full.unlink()
    with Job(nodes.folder / "sent") as job:
        nodes.start(job, [0, 1], COPIES, "--epochs=1", "--resume", program=[script])
        ended = job.wait(120.0)
        assert [one.exit_code for one in ended] == [0, 0], job.report()
    assert nodes.files(0) == nodes.files(1) != {}
