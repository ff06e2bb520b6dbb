"""``fleet_train selftest`` as a user runs it, nothing left behind; and its checks on streams."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from fleet_train.errors import WorkerFailed
from fleet_train.profile import profile_names
from fleet_train.selftest.check_collectives import KINDS as ALL_KINDS
from fleet_train.selftest.ladder import STEPS
from fleet_train.selftest.options import SelftestOptions, chosen
from tests.support.ports import free_ports
from tests.support.processes import ROOT, Ended, Job, clean_environ, every_python_runs, output_of, python, run_alone
from tests.support.ranks import run_ranks

KINDS = ("all_reduce sum", "all_reduce max", "all_reduce min", "reduce", "broadcast", "all_gather", "gather", "scatter")
pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]  # a whole one takes many minutes on a busy machine
FAULTS = ("a rank skips a collective", "a rank is stopped", "a rank is killed")


def selftest(*arguments: str) -> list[str]:
    return python("-m", "fleet_train", "selftest", "--started_port", str(free_ports(3)), *arguments)


def run(folder: Path, *arguments: str, environ: dict[str, str] | None = None) -> Ended:
    return run_alone(folder, selftest(*arguments), environ, timeout_seconds=170)


def test_every_check_is_there_and_nothing_has_failed(tmp_path: Path) -> None:
    """A whole selftest of two ranks; its JSON is on stdout alone."""
    command = ["sh", "-c", '"$@" > printed.json', "sh", *selftest("--json", "--quick")]
    ended = run_alone(tmp_path, command, timeout_seconds=500)
    output, record = ended.output, json.loads((tmp_path / "printed.json").read_text())
    assert ended.exit_code == 0, output
    names = [check["name"] for check in record["checks"]]
    profiles = [f"profile {name}" for name in profile_names()]
    assert names == ["backend", "devices", *KINDS, *profiles, *FAULTS]
    statuses = {check["name"]: check["status"] for check in record["checks"]}
    assert statuses.pop("devices") == "skip"
    assert set(statuses.values()) == {"ok"}
    assert (record["failures"], record["exit_code"]) == ([], 0)
    assert record["verdict"].startswith("PASSED: ")
    lines = [line for line in output.splitlines() if re.match(r"(ok|skip|FAIL) ", line)]
    assert [line[6:].partition(":")[0] for line in lines] == names
    assert "named rank 1 (127.0.0.1:" in lines[-1]
    verdict, where = output.splitlines()[-2:]
    assert verdict == record["verdict"]
    assert where.startswith("record: ")
    (path,) = (tmp_path / "runs/selftest").glob("*.json")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-selftest-gloo-1x2\.json", path.name)
    assert json.loads(path.read_text()) == record
    assert socket.gethostname() not in path.read_text() + path.with_suffix(".md").read_text()

    # The figures say what was done.
    figures = {check["name"]: check["figures"] for check in record["checks"]}
    dtypes = {"float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8"}
    for kind in KINDS:
        assert {*figures[kind]["dtypes"], *figures[kind]["unsupported"]} == dtypes
    assert figures["all_reduce sum"]["unsupported"] == ["float16"]
    for name in profile_names():
        profile = figures[f"profile {name}"]
        assert profile["steps"] == 20
        assert profile["difference"] < profile["tolerance"] / 4, name
    assert figures["profile multi_node"]["buckets"] > 2
    assert figures["profile diloco"]["changed"].keys() == {"local_sgd_is_warm_steps", "local_sgd_steps"}
    for fault in FAULTS:
        assert figures[fault]["exit_codes"] == {"0": WorkerFailed.exit_code}
        assert 0 <= figures[fault]["seconds"]["0"] < figures[fault]["bound_seconds"] == 14
    assert figures["a rank is stopped"]["seconds"]["0"] > 2  # it was waited for


def sabotaged(kind: str, folder: Path) -> dict[str, str]:
    code = (ROOT / "tests/integration/sabotaged_selftest.py").read_text()
    return every_python_runs(code, folder / "shim") | {"FLEET_TRAIN_TEST_SABOTAGE": kind}


LADDER = (
    *("backend", "devices", "place", "all_reduce sum"),
    *("calc with gloo", "own with gloo"),
    *("a rank is killed in the probe", "a rank is killed in a step", "a rank is killed in a save"),
    "memory of own",
)


def test_the_ladder_passes_and_says_how_to_send_in_its_record(tmp_path: Path) -> None:
    ended = run(tmp_path, "--ladder", "--quick", "--record", "here")
    assert ended.exit_code == 0, ended.output
    (path,) = (tmp_path / "here").glob("*-ladder-gloo-1x2.json")
    record = json.loads(path.read_text())
    assert record["circumstances"]["command"] == "fleet_train selftest --ladder --quick"
    statuses = {check["name"]: check["status"] for check in record["checks"]}
    assert tuple(statuses) == LADDER
    skipped = {name for name, status in statuses.items() if status == "skip"}
    assert skipped == {"devices", "memory of own"}
    assert set(statuses.values()) == {"ok", "skip"}
    figures = {check["name"]: check["figures"] for check in record["checks"]}
    for name in LADDER[4:6]:
        assert figures[name]["steps"] == 20
        assert figures[name]["carried_out"] == name.partition(" ")[0]
        assert figures[name]["difference"] <= figures[name]["tolerance"] / 4, name
    assert figures["own with gloo"]["tolerance"] == 0.0
    for name in LADDER[6:9]:
        assert figures[name]["exit_codes"] == {"0": WorkerFailed.exit_code}
    of_save, of_step = ((tmp_path / f"here/log/is_killed_in_a_{where}.0.log").read_text() for where in ("save", "step"))
    assert "measuring the ranks: rank 1" in (tmp_path / "here/log/is_killed_in_the_probe.0.log").read_text()
    assert re.search(r"WorkerFailed: step 4\b.*: rank 1 \(", of_step)  # in a bucket, or still at the step's barrier
    assert re.search(r"WorkerFailed: all_reduce 0\b.*: rank 1 \(", of_save)  # of statistics, which a save averages
    assert ended.output.splitlines()[-1] == (
        f"send it in, whatever it says: attach {path} and {path.stem}.md to an issue on the project's page"
    )


def test_own_streams_that_read_early_end_the_ladder_with_what_to_do(tmp_path: Path) -> None:
    ended = run(tmp_path, "--ladder", "--quick", environ=sabotaged("early reads", tmp_path))
    assert ended.exit_code == 1, ended.output
    lines = [line for line in ended.output.splitlines() if re.match(r"(ok|skip|FAIL) ", line)]
    assert [line[6:].partition(":")[0] for line in lines[:6]] == list(LADDER[:6])
    assert lines[5] == (  # and nothing wrong was used: the parameters are those of calc
        "FAIL  own with gloo: the proof has found results that differ: all ranks went on with calc; what to "
        "do: set collective_stream: calc"
    )
    assert lines[6:] == [f"skip  {step.name}: not run: 'own' has failed" for step in STEPS[4:]]
    assert "\nFAILED: own with gloo; 4 ok, 5 skip" in ended.output
    assert list((tmp_path / "runs/selftest/log").glob("*killed*")) == []


@pytest.mark.parametrize(
    ("sabotage", "groups", "told"),
    [
        (
            "one value",
            ("--only", "collectives", "--only", "profiles"),
            [
                r"FAIL  all_reduce sum: rank 1 \(127\.0\.0\.1:\d+\): float32: 1 of 1031 values",
                r"FAIL  profile single_node: after 20 steps rank 1 \(\S+\) holds other parameters",
            ],
        ),
        (
            "every average",
            ("--only", "profiles"),
            [r"FAIL  profile single_node: after 20 steps \S+ from the simulator, 1e-05 is"],
        ),
    ],
)
def test_wrong_communication_fails_and_is_named(
    tmp_path: Path, sabotage: str, groups: tuple[str, ...], told: list[str]
) -> None:
    ended = run(tmp_path, "--quick", *groups, environ=sabotaged(sabotage, tmp_path))
    assert ended.exit_code == 1, ended.output
    assert [words for words in told if not re.search(words, ended.output)] == [], ended.output
    assert "\nFAILED: " in ended.output
    assert "ok    profile" not in ended.output  # also of those that round


def subjects_below(process: psutil.Process) -> list[psutil.Process]:
    """Without what they have forked, which looks like them until it has become its command."""
    found: dict[int, psutil.Process] = {}
    for each in process.children(recursive=True):  # parents first
        with contextlib.suppress(psutil.NoSuchProcess):
            if "fleet_train.selftest.subject" in each.cmdline() and each.ppid() not in found:
                found[each.pid] = each
    return list(found.values())


def test_ctrl_c_and_a_killed_launcher_leave_no_process_behind(tmp_path: Path) -> None:
    log = Path("runs/selftest/log/together.1.log")
    with Job(tmp_path) as job:
        both = [
            job.start(name, selftest("--only", "profiles"), clean_environ(), cwd=tmp_path / name)
            for name in ("interrupted", "killed")
        ]
        logs = [tmp_path / name / log for name in ("interrupted", "killed")]
        job.wait_until(lambda: all(each.exists() and each.stat().st_size > 0 for each in logs), 90, "subjects run")
        subjects = subjects_below(psutil.Process(both[1].process.pid))
        assert len(subjects) == 2
        for subject in subjects:
            subject.suspend()
        both[1].process.kill()
        both[0].process.send_signal(signal.SIGINT)
        interrupted, _ = job.wait(timeout_seconds=60)
        assert interrupted.exit_code == 130, interrupted.output
        assert job.orphans() == []


def test_two_machines(tmp_path: Path) -> None:
    hosts, port = ("127.0.0.2", "127.0.0.3"), free_ports(3, ["127.0.0.2", "127.0.0.3"])
    with Job(tmp_path) as job:
        for node, host in enumerate(hosts):
            command = python("-m", "fleet_train", "selftest", "--ips", ",".join(hosts), "--node_ip", host)
            command += ["--nproc", "1", "--started_port", str(port), "--only", "collectives", "--only", "devices"]
            job.start(f"node{node}", [*command, "--json"], clean_environ(), cwd=tmp_path / f"machine{node}")
        first, second = job.wait(timeout_seconds=90)
        assert (first.exit_code, second.exit_code) == (0, 0), job.report()
        assert job.orphans() == []
    assert "ok    backend: gloo, 2 rank(s) on 2 node(s)" in first.output
    assert "ok    backend" not in second.output  # rank 0 prints
    for output in (first.output, second.output):  # both have the same record
        made = json.loads(output[output.index("\n{\n") :])
        assert (made["nodes"], made["ranks"]) == (2, [1, 1])
        assert len(made["circumstances"]["machines"]) == 2
    assert len(list(tmp_path.glob("machine0/runs/selftest/*-selftest-gloo-2x1.json"))) == 1
    assert list(tmp_path.glob("machine1/runs/selftest/*.json")) == []


def test_below_our_launcher_it_is_one_rank(tmp_path: Path) -> None:
    launch = ["launch", f"--started_port={free_ports(3)}", "--nproc_per_node=2", "-m", "fleet_train"]
    ended = run_alone(
        tmp_path, python("-m", "fleet_train", *launch, "selftest", "--only", "devices", "--record", "here")
    )
    assert ended.exit_code == 0, ended.output
    assert "ok    backend: gloo, 2 rank(s) on 1 node(s)" in ended.output
    assert len(list((tmp_path / "here").glob("*-selftest-gloo-1x2.json"))) == 1


def test_the_script_for_other_launchers_is_the_one_that_the_help_names(tmp_path: Path) -> None:
    helped = output_of(python("-m", "fleet_train", "selftest", "--help"))
    (script,) = re.findall(r"^\s+(\S+/fleet_train/__main__\.py) selftest$", helped, re.MULTILINE)
    stock = python("-m", "paddle.distributed.launch", "--nproc_per_node", "2", script, "selftest", "--only", "devices")
    ended = run_alone(tmp_path, stock, {"PYTHONPATH": ""})  # as where the package is found beside the script alone
    assert ended.exit_code == 0, ended.output
    assert "ok    backend: gloo, 2 rank(s) on 1 node(s)" in (tmp_path / "log/workerlog.0").read_text()


SUBJECT = ROOT / "fleet_train/selftest/subject.py"


def results_of(step: str, options: SelftestOptions, folder: Path, late_streams: bool) -> list[dict[str, Any]]:
    """What a job of two subjects reports; ``late_streams``: collectives end late, as on a GPU."""
    reports = folder / f"{step}.jsonl"
    arguments = [step, str(reports), json.dumps(options.to_json())]
    ended = run_ranks(SUBJECT, 2, folder=folder / step, args=arguments, late_streams=late_streams)
    assert ("on streams of their own gave on every rank" in ended.ranks[0].output) == (step == "own")
    read = [json.loads(line) for line in reports.read_text().splitlines()]
    return [report["result"] for report in read if "result" in report]


def test_collectives_on_streams_are_exact(tmp_path: Path) -> None:
    results = results_of("together", SelftestOptions(("collectives",)), tmp_path, late_streams=True)
    assert [(one["name"], one["status"]) for one in results] == [(name, "ok") for name in ALL_KINDS]


def test_own_on_streams_has_the_bits_of_calc_without(tmp_path: Path) -> None:
    quick = chosen([], [], quick=True, ladder=True)
    steps = [results_of(step, quick, tmp_path, step == "own") for step in ("calc", "own")]
    for step, (one,) in zip(("calc", "own"), steps, strict=True):
        assert (one["name"], one["status"]) == (f"{step} with gloo", "ok"), one
        assert one["figures"]["carried_out"] == step
    assert steps[1][0]["figures"]["difference"] == 0.0
