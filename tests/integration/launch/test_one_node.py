"""Jobs on one machine: how ranks end, the launcher's exit code and report, and logs that cannot be written."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import socket
import sys
import time

import pytest

from tests.integration.launch.conftest import HOSTS, SECRET, Bench, send
from tests.support.processes import RESULTS_VARIABLE, ROOT, clean_environ, python
from tests.support.ranks import read_results

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
if how == "kill":
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


def test_ctrl_c_ends_everything_with_one_message(bench: Bench) -> None:
    (bench.folder / "here").mkdir()
    launcher = bench.start(_ENDINGS, "wait", "wait", str(bench.folder / "here"), flags=_TWO)
    bench.wait_for_output("began", "node0/log/workerlog.0", "node0/log/workerlog.1")
    send(launcher, signal.SIGINT)
    assert launcher.process.wait(timeout=120) == 130
    lines = launcher.output.splitlines()[1:]
    assert lines.count("began") == 1  # before or after, as the launcher's look falls
    assert [line for line in lines if line != "began"] == [
        "fleet_train: Ctrl-C: the ranks have up to 30 s to save their state (--grace_seconds); a second one ends them "
        "at once",
        "fleet_train: node 0 (127.0.0.1) was stopped by Ctrl-C; 2 ranks ended with it",
    ]
    assert bench.job.leftovers() == []


def test_a_port_that_is_taken_is_an_error_of_one_line(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", bench.first_port + 1)):
        bench.start("", flags=_TWO)
        (ended,) = bench.ended()
    assert ended.exit_code == 5
    told = r"port \d+ on 127\.0\.0\.1, which rank 1 needs.* is in use by process"
    assert re.search(told, ended.output), ended.output
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


def test_each_launch_has_an_identifier_of_its_own_for_all_its_ranks(bench: Bench) -> None:
    for name in "ab":
        bench.start(
            "import os; print(os.environ['FLEET_TRAIN_LAUNCHED'])", flags=[*_TWO, f"--log_dir={name}"], job=name
        )
        assert [ended.exit_code for ended in bench.ended()][-1] == 0
    (one, other), (next_one, next_other) = (
        [bench.log(f"node0/{name}/workerlog.{rank}").split()[-1] for rank in range(2)] for name in "ab"
    )
    assert one == other
    assert next_one == next_other
    assert len(one) == len(next_one) == 16
    assert one != next_one


def test_jobs_of_one_machine_without_a_port_do_not_meet(bench: Bench) -> None:
    """Three at once, while another program listens at the default port."""
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # then some other program listens there
            other.bind(("127.0.0.1", 6170))
            other.listen(1)
        for job in ("a", "b", "c"):
            where = bench.folder / job
            command = python(
                "-m", "fleet_train", "launch", "--nproc_per_node=2", str(ROOT / "tests/support/train_few_steps.py")
            )
            bench.job.start(job, command, clean_environ({RESULTS_VARIABLE: str(where)}), where)
        stores = [f"{job}/log/job.json" for job in ("a", "b", "c")]
        bench.wait_for(lambda: all(map(bench.log, stores)), "three jobs run", 60.0)
        assert all("6170 is in use by" in bench.log(f"{job}.log") for job in ("a", "b", "c"))
        assert [one.exit_code for one in bench.ended(100.0)] == [0, 0, 0], bench.job.report()
    ports = [int(json.loads(bench.log(each))["store"].partition("/")[0].rpartition(":")[2]) for each in stores]
    assert all(abs(one - other) > 2 for one, other in itertools.combinations(ports, 2)), ports
    for job in ("a", "b", "c"):
        assert [each["world_size"] for each in read_results(bench.folder / job).values()] == [2, 2]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "\nx = f\uff08\u2018a\u2018\uff09\n",
            "{} has characters of web pages in its code: left single quotation mark",
        ),
        (
            "import paddle.fluid as fluid\n",
            "{} is written for Paddle 1.x or 2.x, which had paddle.fluid; fleet_train port",
        ),
        (
            "import os\nos.environ['LOCAL_RANK']\n",
            "LOCAL_RANK is not set by this launcher: a rank's numbers are fleet.",
        ),
        ("try:\n    import paddle.fluid\nexcept ImportError:\n    raise OSError('no data') from None\n", ""),
        ("try:\n    import paddle.fluid\nexcept ImportError:\n    print('works')\n", 0),
        (
            "import traceback\ntry:\n    import paddle.fluid\nexcept ImportError:\n    traceback.print_exc()\n"
            "raise SystemExit(3)\n",
            3,
        ),
    ],
)
def test_the_last_words_about_a_script_that_was_found_on_the_web(bench: Bench, script: str, said: str | int) -> None:
    """``said``: the end's own words, or an exit code with none."""
    bench.start(script, flags=_TWO)
    (ended,) = bench.ended()
    assert ended.exit_code == (said if isinstance(said, int) else 1), ended.output
    last = ended.output.splitlines()[-1]
    path = bench.folder / "script.py"
    if not isinstance(said, str) or not said:
        assert "fleet_train port" not in ended.output
    else:
        assert last.startswith(f"fleet_train: {said.format(path)}")
        assert "LOCAL_RANK" in said or f"fleet_train port {path} shows" in last


def test_both_machines_say_what_port_would_mend(bench: Bench) -> None:
    bench.start_two("x = 5 \u2013 3\n")
    for ended in bench.ended():
        assert ended.exit_code == 1
        assert "in its code: en dash (U+2013) in line 1; fleet_train port" in ended.output.splitlines()[-1]
