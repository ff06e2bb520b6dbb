"""What `monitor` shows of runs: VisualDL's server as a child process, or a table with small curves in the terminal.

The server answers on this machine only by default, and runs without internet access.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import IO

from fleet_train.cluster import network
from fleet_train.errors import FleetTrainError, printable_line
from fleet_train.files import lines_of, parse_json
from fleet_train.log import logger
from fleet_train.train import dashboard_server

_VISUALDL_START_SECONDS = 30.0
"""How long VisualDL may take until its page answers; importing it reads much from the disk."""
_VISUALDL_ANSWER_SECONDS = 5.0
"""How long one answer of VisualDL's page may take while its start is awaited."""
_VISUALDL_POLL_SECONDS = 0.1
"""Pause between two looks at whether VisualDL's page answers."""
_VISUALDL_STOP_SECONDS = 5.0
"""How long VisualDL's processes may take to end after SIGTERM."""

_EVERY_ADDRESS = ("0.0.0.0", "::")
_MOST = 1e300
_MOST_BYTES = 1 << 30
_LEVELS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 32

Curves = dict[str, list[float]]


class DashboardUnusable(FleetTrainError):
    """VisualDL is not installed, does not start, or has ended."""


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """The runs below the folders: each folder with a `metrics.jsonl`, in order. Raises FleetTrainError for none."""
    for folder in folders:
        if not folder.is_dir():
            raise FleetTrainError(
                f"--logdir {folder}: there is no such folder; give a run's --output_dir or one above it"
            )
    # A run's visualdl/ is the folder for VisualDL itself.
    above = [folder.parent if folder.name == "visualdl" else folder for folder in folders]
    runs = sorted({path.parent for folder in above for path in folder.rglob("metrics.jsonl")})
    if not runs:
        named = ", ".join(map(str, folders))
        raise FleetTrainError(
            f"--logdir {named}: no run below it; a run's --output_dir has a metrics.jsonl once it trains"
        )
    return runs


def choose_port(host: str, port: int, is_asked_for: bool) -> int:
    """`port`, or the next free one if it is in use and was not requested. Raises FleetTrainError if it was."""
    if network.port_is_free(host, port):
        return port
    owner = network.port_owner(port, host)
    by = f" by {owner.program} (process {owner.pid})" if owner.pid else ""
    free = next((other for other in range(port + 1, port + 100) if network.port_is_free(host, other)), None)
    if is_asked_for or free is None:
        hint = f"; --port {free} is free" if free else f"; is {host} an address of this machine?"
        raise FleetTrainError(f"--port {port}: in use on {host}{by}{hint}")
    logger.info("port %s is in use%s; taking %s", port, by, free)
    return free


def names_of(host: str, allowed_hosts: Sequence[str] = ()) -> list[str]:
    """Names and addresses under which readers may request the page; ``allowed_hosts``: those that only the user
    knows."""
    own = [*network.local_addresses(), socket.gethostname()] if host in _EVERY_ADDRESS else []
    return sorted({"127.0.0.1", "localhost", "::1", host, *own, *map(dashboard_server.name_in, allowed_hosts)})


class Dashboard:
    """VisualDL's server, as a context manager: on exit, the server and its children are ended."""

    def __init__(
        self,
        folders: Sequence[Path],
        host: str,
        port: int,
        in_child: Callable[[], None] | None = None,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        """`in_child` is called in the new process, before it becomes the server. `allowed_hosts`: see `names_of`."""
        self.address = f"http://{host}:{port}"
        # Without --disable-telemetry it reports to Baidu at each start, and overwrites its own code on request.
        self._command = [
            *(sys.executable, dashboard_server.__file__, json.dumps(names_of(host, allowed_hosts))),
            *("--logdir", *map(str, folders)),
            *("--host", host, "--port", str(port), "--disable-telemetry"),
        ]
        self._in_child = in_child
        self._output: IO[bytes] | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Dashboard:
        """Start the server. Raises DashboardUnusable if the page does not answer."""
        if importlib.util.find_spec("visualdl") is None:
            raise DashboardUnusable("VisualDL is not installed: python -m pip install visualdl")
        self._output = tempfile.TemporaryFile()
        self._server = subprocess.Popen(
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=self._in_child,
        )
        try:
            self._wait_until_the_page_answers()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self) -> None:
        """Wait forever; raises DashboardUnusable when the server has ended."""
        assert self._server is not None
        self._server.wait()
        raise DashboardUnusable(f"VisualDL's server has ended: {self._last_line()}")

    def stop(self) -> None:
        """End the server and its child processes."""
        if self._server is not None:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._server.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._server.wait(_VISUALDL_STOP_SECONDS)
        if self._output is not None:
            self._output.close()

    def _wait_until_the_page_answers(self) -> None:
        assert self._server is not None
        deadline = time.monotonic() + _VISUALDL_START_SECONDS
        while not self._answers():
            if self._server.poll() is not None:
                raise DashboardUnusable(f"VisualDL does not start: {self._last_line()}")
            if time.monotonic() > deadline:
                raise DashboardUnusable(f"VisualDL's page does not answer within {_VISUALDL_START_SECONDS:g} s")
            time.sleep(_VISUALDL_POLL_SECONDS)

    def _answers(self) -> bool:
        # It answers 500 to a client that sends no language; every browser sends one.
        request = urllib.request.Request(f"{self.address}/app/index", headers={"Accept-Language": "en"})
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(request, timeout=_VISUALDL_ANSWER_SECONDS) as answer:
                return b"VisualDL" in answer.read()
        except (urllib.error.URLError, OSError):
            return False

    def _last_line(self) -> str:
        assert self._output is not None
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def read_curves(path: Path) -> tuple[int, Curves]:
    """The last step and the values of each curve of a `metrics.jsonl`, in order; an incomplete last line is ignored.
    Raises OSError."""
    step, curves = 0, Curves()
    for line in lines_of(path, _MOST_BYTES):
        try:
            record = parse_json(line)
        except ValueError:
            continue
        if not isinstance(record, dict) or "kind" in record or type(record.get("step")) is not int:
            continue
        step = record["step"] if abs(record["step"]) < _MOST else step
        for tag, value in record.items():
            if "/" in tag and isinstance(value, (int, float)) and abs(value) < _MOST:
                curves.setdefault(printable_line(tag), []).append(float(value))
    return step, curves


def sparkline(values: list[float], width: int = _CURVE_WIDTH) -> str:
    """`values` as at most `width` blocks, the lowest as the lowest block; each block is a mean of its share."""
    count = min(width, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(_LEVELS[min(len(_LEVELS) - 1, int((mean - low) / span * len(_LEVELS)))] for mean in means)


def table(run: Path) -> str:
    """One line per curve: its name, the newest, lowest and highest value, and a sparkline."""
    try:
        step, curves = read_curves(run / "metrics.jsonl")
    except OSError as error:
        return f"{run}: its metrics.jsonl cannot be read: {error.strerror or error}"
    if not curves:
        return f"{run}: no record yet"
    width = max(map(len, curves))
    lines = [f"{run}, step {step}", f"{'':{width}}  {'newest':>10}  {'lowest':>10}  {'highest':>10}"]
    for tag, values in sorted(curves.items()):
        numbers = "  ".join(f"{value:>10.4g}" for value in (values[-1], min(values), max(values)))
        lines.append(f"{tag:{width}}  {numbers}  {sparkline(values)}")
    return "\n".join(lines)
