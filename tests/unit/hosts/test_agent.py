"""The agent, as a process of its own: what a connection to a host starts there."""

from __future__ import annotations

import base64
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet_train.cluster.flight.process import ProcessState
from fleet_train.hosts import agent
from fleet_train.launch.terminal import REPORT_TO
from tests.support.processes import clean_environ, until


class Far:
    """The other end of an agent's connection."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", agent.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=clean_environ(),
            bufsize=0,
        )

    def send(self, **message: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")

    def until(self, key: str) -> list[dict[str, Any]]:
        """Messages up to the first one with this key."""
        found: list[dict[str, Any]] = []
        while not found or key not in found[-1]:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, found
            found.append(json.loads(line))
        return found

    def run(self, code: str, marker: str = "", stop_seconds: float = 5.0) -> None:
        self.send(run={"command": [sys.executable, "-c", code], "stop_seconds": stop_seconds, "marker": marker})


@pytest.fixture
def far() -> Iterator[Far]:
    each = Far()
    try:
        assert each.until("hello") == [{"hello": agent.HELLO}]
        yield each
    finally:
        each.process.kill()
        each.process.wait()
        for stream in (each.process.stdin, each.process.stdout):
            assert stream is not None
            stream.close()


def test_it_says_what_a_command_would_find(far: Far, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x")
    far.send(look={"folder": str(tmp_path), "files": ["train.py", "other.py"], "environ": {"MINE": "1"}})
    found = far.until("found")[-1]["found"]
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert found["files"] == {"train.py": digest, "other.py": ""}
    assert (found["folder"], found["works"]) == ("", True)
    assert found["version"].startswith("fleet_train ")
    far.run("import os; print(os.environ['MINE'], os.getcwd())")
    assert "".join(each.get("out", "") for each in far.until("exit")) == f"1 {tmp_path}\n"


def test_a_folder_that_is_not_there_is_told(far: Far, tmp_path: Path) -> None:
    far.send(look={"folder": str(tmp_path / "no"), "files": [], "environ": {}})
    assert far.until("found")[-1]["found"]["folder"] == "No such file or directory"


def test_output_reports_logs_and_exit_code_come_back(far: Far, tmp_path: Path) -> None:
    far.run(
        f"""
import os, sys
from fleet_train.launch.terminal import told
open({str(tmp_path / "workerlog.0")!r}, "w").write("a line")
assert told(logs={str(tmp_path)!r})
assert told(report="it failed")
print("said", file=sys.stderr)
sys.exit(3)
""",
        marker=str(tmp_path / "not here"),
    )
    messages = far.until("exit")
    assert messages[-1] == {"exit": 3}
    assert {"report": "it failed"} in messages
    assert "".join(each.get("err", "") for each in messages) == "said\n"
    assert {"log": "workerlog.0", "at": 0, "data": base64.b64encode(b"a line").decode()} in messages


def test_logs_are_not_sent_where_the_folder_is_shared(far: Far, tmp_path: Path) -> None:
    (tmp_path / "workerlog.0").write_text("a line")
    code = f"from fleet_train.launch.terminal import told; told(logs={str(tmp_path)!r})"
    far.run(code, marker=str(tmp_path))
    assert not any("log" in message for message in far.until("exit"))


_STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid, flush=True)
time.sleep(100)
"""


def test_the_end_of_the_connection_ends_the_command_and_its_group(far: Far) -> None:
    far.run(_STUBBORN, stop_seconds=0.3)
    pid = int(far.until("out")[-1]["out"])
    assert far.process.stdin is not None
    far.process.stdin.close()
    assert far.process.wait(20) == 0
    until(lambda: ProcessState.of(pid).has_ended)


def test_the_end_of_the_agent_ends_the_command(far: Far) -> None:
    far.run("import os, time; print(os.getpid(), flush=True); time.sleep(100)")
    pid = int(far.until("out")[-1]["out"])
    far.process.kill()
    until(lambda: ProcessState.of(pid).has_ended)


def test_a_signal_reaches_the_command(far: Far) -> None:
    far.run("import time; print(1, flush=True); time.sleep(100)")
    far.until("out")
    far.send(signal=int(signal.SIGTERM))
    assert far.until("exit")[-1] == {"exit": -15}


def test_a_silent_connection_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "SILENCE_SECONDS", 0.1)
    began = time.monotonic()
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as silent:
        assert silent.stdout is not None
        assert list(agent.messages_from(silent.stdout.fileno())) == []
        silent.kill()
    assert time.monotonic() - began < 50


def test_a_changed_file_is_sent_again_and_a_grown_one_goes_on(tmp_path: Path) -> None:
    sent: list[tuple[int, bytes]] = []
    logs = agent.Logs(lambda at, data, **_: sent.append((at, base64.b64decode(data))))
    logs.folder = str(tmp_path)
    path = tmp_path / "workerlog.0"
    for text in ("", "one", "one two"):
        with path.open("a") as file:
            file.write(text.removeprefix(path.read_text()))
        logs.send()
        logs.send()
    path.unlink()
    path.write_text("new")
    logs.send()
    assert sent == [(0, b""), (0, b"one"), (3, b" two"), (0, b"new")]


def test_the_descriptor_of_reports_is_not_for_ranks() -> None:
    from fleet_train.launch.node import SCRUBBED

    assert agent.REPORT_TO == REPORT_TO
    assert REPORT_TO in SCRUBBED
