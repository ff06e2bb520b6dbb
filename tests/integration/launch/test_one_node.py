"""Jobs on one machine: how ranks end, and the launcher's exit code and report."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from tests.integration.launch.conftest import HOSTS, SECRET, Bench, send

_TWO = ["--nproc_per_node=2"]

# Arguments: how rank 0 ends, how rank 1 ends. Both wait until the other one is there too.
_ENDINGS = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["PADDLE_TRAINER_ID"])
Path(f"{sys.argv[3]}/{rank}").touch()
while len(os.listdir(sys.argv[3])) < 2:
    time.sleep(0.01)
print("began", flush=True)
how = sys.argv[1 + rank]
if how == "segv":
    os.kill(os.getpid(), signal.SIGSEGV)
elif how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif how == "echo":
    sys.exit(11)
elif how == "late":
    time.sleep(0.3)
    sys.exit(7)
elif how == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif how == "fail":
    time.sleep(0.5)
    sys.exit(5)
time.sleep(120)
"""


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "exit_code", "root_cause", "how"),
    [
        ("wait", "segv", 139, 1, "killed by SIGSEGV"),
        ("echo", "late", 7, 1, "exit code 7"),
        ("fail", "stubborn", 5, 0, "exit code 5"),
        ("wait", "kill", 137, 1, "killed by SIGKILL"),
    ],
)
def test_the_root_cause_decides_the_exit_code_and_no_process_is_left(
    bench: Bench, rank_0: str, rank_1: str, exit_code: int, root_cause: int, how: str
) -> None:
    (bench.folder / "here").mkdir()
    launcher = bench.start(_ENDINGS, rank_0, rank_1, str(bench.folder / "here"), flags=_TWO)
    bench.wait_for_output("began", "node0/log/workerlog.0", "node0/log/workerlog.1")
    began = time.monotonic()
    assert launcher.process.wait(timeout=120) == exit_code, launcher.output
    assert time.monotonic() - began < 60.0
    first = next(line for line in launcher.output.splitlines() if line.startswith("failed first"))
    assert re.split(r"\s{2,}", first)[1:4] == [str(root_cause), f"127.0.0.1:{bench.first_port + root_cause}", how]
    assert bench.job.leftovers() == []
    assert bench.files_with(SECRET) == []


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """A shell starts what it puts into the background with SIGINT ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_ends_everything_with_one_message(bench: Bench) -> None:
    (bench.folder / "here").mkdir()
    launcher = bench.start(_ENDINGS, "wait", "wait", str(bench.folder / "here"), flags=_TWO)
    bench.wait_for_output("began", "node0/log/workerlog.0", "node0/log/workerlog.1")
    send(launcher, signal.SIGINT)
    assert launcher.process.wait(timeout=120) == 130
    assert launcher.output.splitlines()[1:] == [
        "began",
        "fleet_train: node 0 (127.0.0.1) was stopped by Ctrl-C; 2 ranks ended with it",
    ]
    assert bench.job.leftovers() == []


def test_a_module_under_paddlecloud_variables(bench: Bench) -> None:
    pod = {"PADDLE_TRAINERS": "127.0.0.1", "POD_IP": "127.0.0.1", "PADDLE_PORT": str(bench.first_port)}
    module = "import os, sys\nprint(os.environ['PADDLE_CURRENT_ENDPOINT'], sys.argv[1:], os.environ.get('PADDLE_PORT'))"
    (bench.folder / "node0").mkdir()
    (bench.folder / "node0" / "my_module.py").write_text(module)
    launcher = bench.start("", flags=["--use_paddlecloud", "-m", "my_module"], environ=pod)
    assert launcher.process.wait(timeout=120) == 0, launcher.output
    # The bench's own script name comes behind the module: an argument like any other.
    expected = f"127.0.0.1:{bench.first_port} ['{bench.folder / 'script.py'}'] None\n"
    assert bench.log() == expected
    assert launcher.output.endswith(expected)


def test_a_port_in_use_is_an_error_that_names_its_owner(bench: Bench) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", bench.first_port + 1))
        taken.listen()
        bench.start("", flags=_TWO)
        (ended,) = bench.ended()
    assert ended.exit_code == 5
    assert f"port {bench.first_port + 1} on 127.0.0.1, which rank 1 needs" in ended.output
    assert "is in use by process" in ended.output
    assert len(ended.output.splitlines()) == 1


def test_an_address_that_is_not_ours_is_an_error_that_lists_ours(bench: Bench) -> None:
    bench.start("", flags=["--ips=192.0.2.200,192.0.2.201", "--host=192.0.2.201"])
    (ended,) = bench.ended()
    assert ended.exit_code == 5
    assert "--node_ip=192.0.2.201 is not an address of this machine: this machine has 127.0.0.1" in ended.output
    assert len(ended.output.splitlines()) == 1


def test_dry_run_prints_the_command_and_starts_nothing(bench: Bench) -> None:
    flags = [f"--ips={','.join(HOSTS)}", f"--host={HOSTS[1]}", "--dry-run", "--strategy", "multi_node"]
    bench.start("print('a rank ran')", flags=flags, environ={"PADDLE_MASTER": "outer:1", "PYTHONPATH_NOTE": SECRET})
    (ended,) = bench.ended()
    assert ended.exit_code == 0
    assert ended.output.splitlines()[-1] == f"  {sys.executable} -u {bench.folder / 'script.py'}"
    endpoints = ",".join(f"{host}:{bench.first_port}" for host in HOSTS)
    assert f"  PADDLE_TRAINER_ENDPOINTS={endpoints}" in ended.output.splitlines()
    assert "  FLEET_TRAIN_STRATEGY=multi_node" in ended.output.splitlines()
    assert "removed from the environment: PADDLE_MASTER" in ended.output.splitlines()
    assert "outer:1" not in ended.output
    assert SECRET not in ended.output
    assert "a rank ran" not in ended.output
    assert not (bench.folder / "node0" / "log").exists()
    assert list(bench.temporary.iterdir()) == []


def test_help_answers_in_less_than_half_a_second(bench: Bench) -> None:
    seconds = []
    for _ in range(3):  # processor time, since the machine may be busy with something else; the best one counts
        before = os.times()
        assert bench.start("", flags=["--help"]).process.wait(timeout=120) == 0
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.5


_ONE_OF_TWO_JOBS = """
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
here.joinpath(sys.argv[2]).touch()
while len(os.listdir(here)) < 2:
    time.sleep(0.01)
print("rank of", sys.argv[2], flush=True)
"""


def test_two_jobs_from_one_folder_keep_their_logs_apart(bench: Bench) -> None:
    here = bench.folder / "here"
    here.mkdir()
    first = bench.start(_ONE_OF_TWO_JOBS, str(here), "first")
    bench.wait_for((here / "first").exists, "the first job is at work")
    other_ports = [f"--started_port={bench.first_port + 2}"]
    second = bench.start(_ONE_OF_TWO_JOBS, str(here), "second", flags=other_ports, job=" second")
    assert [each.process.wait(timeout=120) for each in (first, second)] == [0, 0], bench.job.report()
    assert bench.log("node0/log/workerlog.0") == "rank of first\n"
    assert bench.log("node0/log.2/workerlog.0") == "rank of second\n"
    said = next(line for line in second.output.splitlines() if "is in use" in line)
    assert f"{bench.folder}/node0/log is in use by another job (process {first.process.pid} of " in said
    assert f"logs in {bench.folder}/node0/log.2" in second.output


def test_many_arguments_reach_the_ranks(bench: Bench) -> None:
    bench.start("import sys\nprint(len(sys.argv))", *["x" * 1000] * 172)
    (ended,) = bench.ended()
    assert ended.exit_code == 0, ended.output
    assert bench.log() == "173\n"


# The launcher's own environment fits; with what it adds for its ranks it does not.
_HUGE = """export HUGE=$(head -c 100000 /dev/zero | tr '\\0' x)
python -c '
import os
from fleet_train.launch import prepare
from fleet_train.cli import main
before = prepare.Launch.variables_of
prepare.Launch.variables_of = lambda self, local: before(self, local) | {"HUGE": 2 * os.environ["HUGE"]}
main()
' "${@:4}" """


def test_an_environment_that_the_kernel_does_not_take_is_one_error_and_leaves_nothing(bench: Bench) -> None:
    bench.start("print('a rank ran')", flags=["--max_restarts=2"], shell=_HUGE)
    (ended,) = bench.ended()
    assert ended.exit_code == 5, ended.output
    assert "Traceback" not in ended.output
    assert re.search(r"the environment has 2\d{5} bytes .*\b131072 in one word", ended.output.splitlines()[-1])
    assert "restart" not in ended.output
    assert bench.job.leftovers() == []
