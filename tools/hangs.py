"""Make trainings hang, and see whether the report says which rank stands where; or watch trainings that do not hang.

    sudo .venv/bin/python tools/hangs.py run --seed 1 --cases 100 --record docs/benchmarks --name DATE-hangs
    sudo .venv/bin/python tools/hangs.py run --case 17 --keep_files /tmp/hang
    sudo .venv/bin/python tools/hangs.py clean --runs 1000 --per_launch 50 --record docs/benchmarks --name DATE-clean

`run` starts the scripts of tools/soaking/hanging.py, which says what is right for each, on 2 to 4 ranks in network
namespaces (tools/lab.py) under the real launcher. `clean` trains without a fault while ranks are asked for their stacks
at random moments: nothing may be said, and every parameter has to be the same as in trainings without questions.
Exit code 1: a case failed, or something was said.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fleet_train.cluster.flight import witness
from fleet_train.cluster.flight.stands import Stand
from tools.benchmarks.record import Keep, circumstances, recorded, table, told_circumstances
from tools.lab import Lab
from tools.processes import ROOT, Process, start, stop
from tools.soaking.hanging import BEGAN, CLEAN, CROSSED, KINDS, READY, SCRIPT_NAME, Case, case, cases
from tools.soaking.stuck_disk import StuckDisk

TIMEOUT_SECONDS, LOST_SECONDS, GLOO_SECONDS, BOUND_SECONDS = 3.0, 5.0, 30.0, 5.0
_CASE_SECONDS, _LAUNCH_SECONDS, _STOP_SECONDS, _POLL_SECONDS = 90.0, 300.0, 10.0, 0.01
_MOST_NODES, _TABLE_BYTES = 3, 1 << 26
_PROCESS_MADVISE, _MADV_PAGEOUT = 440, 21
_STANDS = re.compile(r"rank (\d+) (?:stands|(?:is|computes|waits|sleeps) (?:(?!rank \d).)*stands) in (\S+?):(\d+)")
_WAITS = re.compile(r"ranks? ([\d, -]+) waits? in [^;`]*, at (\S+?):(\d+)")
_ACCUSED = re.compile(r"((?:rank \d+ \([^)]*\)(?:, )?)+) (?:did not arrive|was lost)|^failed first +(\d+) ")
_NODE = re.compile(
    r"launcher of node (\d+) \(\S+\)(?:, which hosts the job store at \S+,)? was lost|"
    r"store at 10\.78\.0\.(\d+):\d+ no longer answers"
)
_SAYS = {"stopped": "is stopped by a signal", "lock": "keeps Python's lock"}
_CROSSED = "wait for each other at different points"
_ALARM = re.compile(r"fleet_train: (?:[A-Z]\w+: |.* failed)|stands in|did not arrive|was lost|different points")
_RUN = re.compile(r"run (\d+) (\w+)")


@dataclass(frozen=True)
class Heard:
    """A line that a launcher or a rank has written; ``seconds``: Unix time."""

    seconds: float
    source: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """``seconds``: from the end of the ``timeout`` to the sentence that is right."""

    is_rank: bool
    is_line: bool
    seconds: float | None
    timeout: str
    said: str

    @property
    def is_right(self) -> bool:
        return self.is_rank and self.is_line and self.seconds is not None and self.seconds <= BOUND_SECONDS


class Launched:
    """The launchers of a script, one for each node, and what they and the ranks have written so far."""

    def __init__(self, lab: Lab, each: Case, folder: Path) -> None:
        self.case, self.folder = each, folder
        self.heard: list[Heard] = []
        self._read: Counter[Path] = Counter()
        nodes = lab.nodes[: each.nodes]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_minloglevel": "2", "OMP_NUM_THREADS": "1"}
        flags = ["--cluster_node_ips", ",".join(node.address for node in nodes), "--join_timeout=60"]
        flags += [f"--nproc_per_node={each.ranks_per_node}", f"--lost_node_timeout={LOST_SECONDS:g}"]
        flags += [f"--set=collective_timeout_seconds={TIMEOUT_SECONDS:g}", *each.flags]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / SCRIPT_NAME).write_text(each.script)
        self.launchers: list[Process] = []
        for node in nodes:
            own = ["--node_ip", node.address, f"--log_dir=log{node.index}", SCRIPT_NAME]
            command = [*node.prefix, sys.executable, "-m", "fleet_train", "launch", *flags, *own]
            self.launchers.append(start(command, folder / f"launcher{node.index}.log", environ, folder))

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.launchers, _STOP_SECONDS)

    def listen(self) -> None:
        """Read what was written since the last call."""
        now = time.time()
        for path in [*self.folder.glob("launcher*.log"), *self.folder.glob("log*/workerlog.*")]:
            with path.open("rb") as log:
                log.seek(self._read[path])
                words, is_whole, _ = log.read().rpartition(b"\n")
            if is_whole:
                self._read[path] += len(words) + 1
                source = str(path.relative_to(self.folder))
                self.heard += [Heard(now, source, line) for line in words.decode(errors="replace").split("\n")]

    def pid(self) -> int:
        """Of the rank with the fault."""
        node, local = divmod(self.case.rank, self.case.ranks_per_node)
        return int(json.loads((self.folder / f"log{node}/workerend.{local}.json").read_text())["pid"])

    def is_ready(self) -> bool:
        """All ranks have made their first steps."""
        return len(list(self.folder.glob(f"{READY}*"))) == self.case.world_size

    def began(self) -> float | None:
        with contextlib.suppress(OSError, ValueError):
            return float((self.folder / BEGAN).read_text())
        return None

    def has_ended(self) -> bool:
        return all(launcher.poll() is not None for launcher in self.launchers)

    def stands(self) -> list[Stand]:
        """Where the ranks stand that run now."""
        pids: set[int] = set()
        for launcher in self.launchers:
            with contextlib.suppress(psutil.Error):
                pids |= {child.pid for child in psutil.Process(launcher.pid).children(recursive=True)}
        with contextlib.ExitStack() as stack:
            ranks = witness.one_of_each(witness.ranks_here(lambda pid: pid in pids))
            for seen in ranks:
                stack.callback(seen.close)
            return witness.look(ranks)


def judge(each: Case, heard: Sequence[Heard], began: float) -> Verdict:
    """What was said about a case, by the table in tools/soaking/hanging.py."""
    stands = [(line, *found) for line in heard for found in _STANDS.findall(line.text)]
    if each.kind in CROSSED:
        waits = [(line, *found) for line in heard for found in _WAITS.findall(line.text)]
        stands += [(line, rank, file, n) for line, ranks, file, n in waits for rank in _ranks_in(ranks)]
    own = [
        (line, file == SCRIPT_NAME and int(n) in each.lines) for line, rank, file, n in stands if int(rank) == each.rank
    ]
    right, is_line = [line for line, is_right in own if is_right], bool(own) and all(is_right for _, is_right in own)
    accused = {rank for line in heard for rank in _accused(line.text)}
    seconds, knob = TIMEOUT_SECONDS, "collective_timeout_seconds"
    if each.kind == "network":
        named = [(line, node) for line in heard for node in _lost_nodes(each, line)]
        is_rank, is_line, right = {node for _, node in named} == {each.node}, True, [line for line, _ in named]
        seconds, knob = LOST_SECONDS, "--lost_node_timeout"
    elif each.kind in CROSSED:
        right, seconds = [line for line in right if _CROSSED in line.text], 0.0  # it is known at once
        is_rank = bool(right) and not any("did not arrive" in line.text for line in heard)
    else:
        is_rank = accused | {int(rank) for _, rank, *_ in stands} == {each.rank}
        is_rank = is_rank and any(_SAYS.get(each.kind, "") in line.text for line in heard)
    by_gloo = any("the collective ended with" in line.text for line in heard)
    if right and by_gloo and right[0].seconds > began + GLOO_SECONDS:
        seconds, knob = GLOO_SECONDS, "Gloo's own"
    said = next((line.text for line in [*right, *heard] if line.text.startswith("fleet_train: ")), "")
    return Verdict(
        is_rank, is_line, round(right[0].seconds - began - seconds, 2) if right else None, f"{knob}={seconds:g}", said
    )


def _ranks_in(spans: str) -> list[str]:
    """``0-2, 4`` -> 0, 1, 2, 4."""
    ends = [(span.strip().partition("-")[0], span.strip().rpartition("-")[2]) for span in spans.split(",")]
    return [str(rank) for first, last in ends for rank in range(int(first), int(last) + 1)]


def _accused(text: str) -> list[int]:
    """The ranks that a line says are missing, lost, or the first that failed."""
    return [
        int(number) for names, first in _ACCUSED.findall(text) for number in re.findall(r"rank (\d+)", names) or [first]
    ]


def _lost_nodes(each: Case, line: Heard) -> list[int]:
    """The nodes that a line of another node accuses: the one that hears nothing cannot know that it is the one."""
    if line.source.startswith((f"launcher{each.node}.", f"log{each.node}/")):
        return []
    named = [int(node) if node else int(host) - 1 for node, host in _NODE.findall(line.text)]
    return named + [rank // each.ranks_per_node for rank in _accused(line.text)]


def tried(lab: Lab, each: Case, folder: Path) -> Verdict:
    """Run a case, disturb it from outside where it needs that, and judge it."""
    folder.mkdir(parents=True)
    draw, disturb_at, deadline = random.Random(each.number), 0.0, time.monotonic() + _CASE_SECONDS
    with contextlib.ExitStack() as stack:
        if each.kind == "disk":
            stack.enter_context(StuckDisk(folder / "disk"))
        if each.kind == "swap":
            (folder / "table.bin").write_bytes(os.urandom(_TABLE_BYTES))
        job = stack.enter_context(Launched(lab, each, folder))
        while not job.has_ended() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            job.listen()
            began = job.began()
            if began is None and each.kind in ("stopped", "network") and job.is_ready():
                disturb_at = disturb_at or time.monotonic() + draw.uniform(0, 1)
                if time.monotonic() > disturb_at:
                    if each.kind == "network":
                        stack.callback(lab.set_hearing, each.node, True)
                        lab.set_hearing(each.node, False)
                    else:
                        os.kill(job.pid(), signal.SIGSTOP)
                    (folder / BEGAN).write_text(str(time.time()))
            if began is not None and each.kind == "swap":
                _forget_pages(job.pid(), folder / "table.bin")
            if began is not None and each.kind == "crawl":
                return crawled(lab, job, began)
        job.listen()
        return judge(each, job.heard, job.began() or time.time())


def _forget_pages(pid: int, path: Path) -> None:
    """Have the kernel take back the pages of a mapped file, and forget them."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        low, high = next(line for line in lines if line.endswith(path.name)).split()[0].split("-")
        process = os.pidfd_open(pid)
        pages = ctypes.create_string_buffer(struct.pack("QQ", int(low, 16), int(high, 16) - int(low, 16)))
        ctypes.CDLL(None).syscall(_PROCESS_MADVISE, process, pages, ctypes.c_size_t(1), _MADV_PAGEOUT, 0)
        os.close(process)
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def crawled(lab: Lab, job: Launched, began: float) -> Verdict:
    """No message exists for a script's own loop: the rank that `stacks` most often shows outside of runs and waits, and
    the line at which it shows it most often."""
    asking = [*lab.nodes[0].prefix, sys.executable, "-m", "fleet_train", "stacks", "--log_dir=log0", "--json"]
    asked = subprocess.run([*asking, "--samples=3", "--every=0.1"], cwd=job.folder, capture_output=True, text=True)
    seconds = round(time.time() - began, 2)
    places: Counter[tuple[int, str, int]] = Counter()
    stands = [one for look in json.loads(asked.stdout or "[]") for ranks in look for one in ranks]
    for stand in map(Stand.from_json, stands):
        if stand.place is not None and not stand.doing:
            places[stand.rank, os.path.basename(stand.place.file), stand.place.line] += 1
    job.listen()
    if not places:
        return Verdict(False, False, None, "none", asked.stderr)
    (rank, file, line), _ = places.most_common(1)[0]
    is_quiet = not any(_accused(line.text) for line in job.heard)
    is_line = file == SCRIPT_NAME and line in job.case.lines
    return Verdict(is_quiet and rank == job.case.rank, is_line, seconds, "none=0", str(dict(places)))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
def main() -> None:
    """Make trainings hang, or watch trainings that do not. Needs root."""


_keep_option = click.option(
    "--keep_files", type=click.Path(path_type=Path), help="Run here, and keep scripts and logs."
)


@main.command("run")
@click.option("--seed", default=1, help="Seed of the corpus.")
@click.option("--cases", "number", default=100, help="So many, all kinds in turn.")
@click.option("--only", type=click.Choice(KINDS), help="Only those of this kind.")
@click.option("--case", "chosen", type=int, help="Only this one.")
@_keep_option
@recorded()
def run_command(
    seed: int, number: int, only: str | None, chosen: int | None, keep_files: Path | None, keep: Keep
) -> None:
    """Run cases, and judge what is said about each."""
    folder = (keep_files or Path(tempfile.mkdtemp(prefix="fleet_train-hangs-"))).absolute()
    record: dict[str, Any] = {"circumstances": circumstances(), "seed": seed, "cases": []}
    with Lab(_MOST_NODES, "none") as lab:
        for each in cases(seed, number):
            if only in (None, each.kind) and chosen in (None, each.number):
                files = folder / f"{each.number:03}-{each.kind}"
                verdict = tried(lab, each, files)
                lab.end_processes()
                described = {key: value for key, value in asdict(each).items() if key not in ("script", "lines")}
                entry = described | asdict(verdict) | {"lines": sorted(each.lines), "is_right": verdict.is_right}
                entry["said"] = verdict.said.replace(f"{files}/", "")
                click.echo("  ".join(str(entry[key]) for key in ("number", "kind", "rank", "lines", *asdict(verdict))))
                record["cases"].append(entry)
                if verdict.is_right and keep_files is None:
                    shutil.rmtree(files)
    wrong = [entry["number"] for entry in record["cases"] if not entry["is_right"]]
    headings = ("kind", "cases", "right rank", "right line", f"both, within {BOUND_SECONDS:g} s", "median, longest s")
    told = f"{len(record['cases']) - len(wrong)} of {len(record['cases'])}{f'; wrong: {wrong}' if wrong else ''}"
    says = "what is right is settled there for each kind; seconds: from the end of the timeout to the sentence"
    _keep_page(
        keep,
        record,
        f"right reports of trainings that hang or slow down: {told}",
        says,
        headings,
        list(_by_kind(record["cases"])),
    )
    if wrong:
        raise click.ClickException(f"see {folder}")
    if keep_files is None:
        shutil.rmtree(folder, ignore_errors=True)


def _by_kind(entries: Sequence[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for kind in (*KINDS, "all"):
        some = [entry for entry in entries if kind in (entry["kind"], "all")]
        seconds = [entry["seconds"] for entry in some if entry["seconds"] is not None] or [math.nan]
        ranks, lines, right = (sum(entry[key] for entry in some) for key in ("is_rank", "is_line", "is_right"))
        if some:
            lines = "-" if kind == "network" else lines
            yield kind, len(some), ranks, lines, right, f"{statistics.median(seconds):.2f}, {max(seconds):.2f}"


def _keep_page(
    keep: Keep, record: dict[str, Any], title: str, says: str, headings: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    lines = [
        f"# Hangs, {record['circumstances']['date'][:10]}: {title}",
        "",
        f"- Scripts of `tools/soaking/hanging.py` on 2 to 4 real ranks, 1 to 3 network namespaces as nodes; {says}.",
        *told_circumstances(record["circumstances"]),
        "",
        *table(headings, rows),
    ]
    keep(record, lines)
    click.echo("\n".join(lines))


@main.command("clean")
@click.option("--seed", default=1, help="Seed of the scripts.")
@click.option("--runs", default=1000, help="Trainings in all.")
@click.option("--per_launch", default=50, help="Trainings one after the other in the same ranks.")
@click.option("--compare_every", default=5, help="Repeat every n-th launch without questions, and compare.")
@_keep_option
@recorded()
def clean_command(
    seed: int, runs: int, per_launch: int, compare_every: int, keep_files: Path | None, keep: Keep
) -> None:
    """Train without a fault, and ask healthy ranks where they stand."""
    folder = (keep_files or Path(tempfile.mkdtemp(prefix="fleet_train-hangs-"))).absolute()
    record: dict[str, Any] = {"circumstances": circumstances(), "seed": seed, "launches": []}
    totals: Counter[str] = Counter()
    with Lab(_MOST_NODES, "none") as lab:
        for number in range(-(-runs // per_launch)):
            each = case(seed, number, CLEAN, min(per_launch, runs - number * per_launch))
            entry, digests = watched(lab, each, folder / f"{number:03}", asks=True)
            if number % compare_every == 0:
                again, others = watched(lab, each, folder / f"{number:03}-unasked", asks=False)
                entry |= {"alarms": entry["alarms"] + again["alarms"], "parameters compared": len(others)}
                entry["parameters that differ"] = sum(digests.get(key) != digest for key, digest in others.items())
            totals.update({key: value for key, value in entry.items() if isinstance(value, int | float)})
            totals["alarms"] += len(entry["alarms"])
            record["launches"].append(entry)
            click.echo(json.dumps(entry))
            lab.end_processes()
    totals.pop("launch")
    is_clean = totals["trainings"] == runs and not totals["alarms"] and not totals["parameters that differ"]
    title = f"{totals['trainings']} trainings that do not hang, {totals['alarms']} alarms"
    says = "the scripts have no fault, and the ranks' stacks are asked for at random moments"
    _keep_page(keep, record, title, says, ("what", "value"), [(key, round(value)) for key, value in totals.items()])
    if not is_clean:
        raise click.ClickException(f"see {folder}")
    if keep_files is None:
        shutil.rmtree(folder)


def watched(lab: Lab, each: Case, folder: Path, *, asks: bool) -> tuple[dict[str, Any], dict[str, str]]:
    """A launch without a fault: what came of it, and the digest of each rank's parameters after each training."""
    draw, began, states = random.Random(each.number), time.monotonic(), Counter[str]()
    with Launched(lab, each, folder) as job:
        while not job.has_ended() and time.monotonic() - began < _LAUNCH_SECONDS:
            time.sleep(draw.uniform(0, 0.2))
            states.update(re.sub(r"\d+", "N", stand.state) or "answers" for stand in (job.stands() if asks else []))
        job.listen()
        codes = [launcher.poll() for launcher in job.launchers]
    found = [(line.source, _RUN.match(line.text)) for line in job.heard if line.source.startswith("log")]
    digests = {f"{source} {match[1]}": match[2] for source, match in found if match}
    said = [line.text for line in job.heard if _ALARM.search(line.text)]
    entry = {
        "launch": each.number, "nodes": [each.nodes, each.ranks_per_node], "flags": each.flags, "exit_codes": codes,
        "alarms": said + [f"exit code {code}" for code in codes if code], "trainings": len(digests) // each.world_size,
        "seconds": round(time.monotonic() - began, 1), "looks at a rank": states.total(), "states": states,
    }  # fmt: skip
    return entry, digests


if __name__ == "__main__":
    main()
