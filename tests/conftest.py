"""Rules for every test: leave no environment variable, thread, process or file behind.

Each test runs in an empty working directory of its own; paths into the checkout start at ``ROOT``
(``tests.support.processes``). At the end the checkout must have no more files than at the start.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from fleet_train.cluster.flight.ring import recorder
from tests.support import ports
from tests.support.browser import why_no_browser
from tests.support.namespaces import why_no_namespaces
from tests.support.processes import ROOT
from tests.support.slurm import why_no_slurm
from tests.support.ssh import why_no_sshd

_GRACE_SECONDS = 10.0
# Set by pytest itself, or by importing Paddle and scikit-learn into the test process.
_TOLERATED_VARIABLES = {
    "PYTEST_CURRENT_TEST",
    "PYTEST_VERSION",
    "COLUMNS",
    "LINES",
    "runtime_include_dir",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "CUSTOM_DEVICE_ROOT",
}
# Threads that libraries keep for the life of the process; a dummy is one of Paddle's executor that has logged.
_TOLERATED_THREADS = ("_DummyThread", "tqdm", "TMonitor", "pytest_timeout", "asyncio_", "QueueFeederThread")
_KERNEL_LISTS_CHILDREN = Path(f"/proc/self/task/{threading.get_native_id()}/children").exists()
_TOLERATED_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "loky")
_UNTRACKED_AT_START = pytest.StashKey[frozenset[str] | None]()


@pytest.fixture
def free_ports() -> Callable[..., int]:
    """``free_ports(count, [addresses])``: the first of that many consecutive ports, free on every address."""
    return ports.free_ports


@pytest.fixture(autouse=True)
def no_leaked_variables() -> Iterator[None]:
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)} - _TOLERATED_VARIABLES
    for name in changed:  # so that one offender does not fail every test after it
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    assert not changed, f"this test leaked changes of environment variables: {sorted(changed)}"


@pytest.fixture(autouse=True, scope="session")
def no_recorder() -> None:
    """This process is no rank: its recorder would see the doubles of many tests. Theirs are started by themselves."""
    recorder.start = lambda *_: None  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    before = set(threading.enumerate())

    def leaked() -> list[str]:
        new = [t for t in threading.enumerate() if t not in before and t.is_alive()]
        return [t.name for t in new if not any(word in f"{t.name} {type(t).__name__}" for word in _TOLERATED_THREADS)]

    yield
    assert _gone(leaked), f"this test leaked threads: {leaked()}"


@pytest.fixture(autouse=True)
def no_leaked_processes() -> Iterator[None]:
    before = _descendants()

    def new() -> list[psutil.Process]:
        return [p for p in map(_process, _descendants() - before) if p is not None and not _tolerated(p)]

    yield
    if not _gone(new):
        found = [(process.pid, _command(process)) for process in new()]
        for process in new():
            process.kill()
        pytest.fail(f"this test leaked processes: {found}")


@pytest.fixture(autouse=True)
def no_leaked_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    was = Path.cwd()
    empty = tmp_path_factory.mktemp("cwd", numbered=True)
    os.chdir(empty)
    yield
    os.chdir(was)
    found = sorted(path.name for path in empty.iterdir())
    shutil.rmtree(empty)
    assert not found, f"this test left files in its working directory: {found}; write to tmp_path"


def _gone(leaked: Callable[[], Sequence[object]]) -> bool:
    deadline = time.monotonic() + _GRACE_SECONDS
    while leaked():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _descendants() -> set[int]:
    """Ids of all processes below this one, which psutil reads every process of the machine for."""
    found: set[int] = set()
    parents = [os.getpid()]
    while parents:
        children = _children(parents.pop())
        found |= children
        parents.extend(children)
    return found


def _children(pid: int) -> set[int]:
    children: set[int] = set()
    if not _KERNEL_LISTS_CHILDREN:
        process = _process(pid)
        return {child.pid for child in process.children()} if process else children
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            children.update(map(int, thread.read_text().split()))
    return children


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _tolerated(process: psutil.Process) -> bool:
    return any(word in _command(process) for word in _TOLERATED_PROCESSES)


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() in {"1", "true", "yes"}


def why_no_ray() -> str | None:
    return None if importlib.util.find_spec("ray") else 'Ray is not installed: pip install "ray[train]"'


def why_no_mpi() -> str | None:
    """Debian's packages of the two can be installed side by side."""
    missing = [name for name in ("mpirun.openmpi", "mpirun.mpich") if shutil.which(name) is None]
    return f"{', '.join(missing)} not found: apt-get install openmpi-bin libpmix2 mpich" if missing else None


def why_no_site() -> str | None:
    is_there = (ROOT / ".venv-docs" / "bin" / "python").is_file()
    return None if is_there else "there is no .venv-docs, in which the site is built: make docs"


# Markers of tests that need something of the machine: why it cannot run them, or None.
_NEEDS: dict[str, Callable[[], str | None]] = {
    "root": why_no_namespaces,
    "sshd": why_no_sshd,
    "browser": why_no_browser,
    "slurm": why_no_slurm,
    "mpi": why_no_mpi,
    "ray": why_no_ray,
    "site": why_no_site,
}


# Starting what they need takes long enough: `make test` leaves them to `make test-long`.
_LONG = ("browser", "slurm", "mpi", "ray", "site")


def _untracked_files(checkout: Path) -> frozenset[str] | None:
    """Files below a folder that git neither tracks nor ignores; None where there is no git or no repository."""
    command = ["git", "--no-optional-locks", "status", "--porcelain", "-z", "--untracked-files=all", "--", "."]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    entries = os.fsdecode(done.stdout).split("\0")
    return frozenset(entry.removeprefix("?? ") for entry in entries if entry.startswith("?? "))


def pytest_configure(config: pytest.Config) -> None:
    if not _is_worker(config):
        config.stash[_UNTRACKED_AT_START] = _untracked_files(ROOT)
    # A shell's background job ignores Ctrl-C, and so would all processes that tests start and interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What is told of the reader's window, by pytest-xdist too: tables are as wide in tests as where there is none.
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)


def _is_worker(config: pytest.Config) -> bool:
    """Of pytest-xdist. Workers share the checkout; the process that started them looks at it when all have ended."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    before = session.config.stash.get(_UNTRACKED_AT_START, None)
    after = None if before is None else _untracked_files(ROOT)
    if before is None or after is None or after <= before:
        return
    print(f"\nnew files in the checkout, tests write to tmp_path: {sorted(after - before)}", file=sys.stderr)
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.get_closest_marker(name) for name in _LONG):
            item.add_marker("long")


def _needs(item: pytest.Item) -> list[str]:
    return [name for name in _NEEDS if item.get_closest_marker(name)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for name in _needs(item):
        if reason := _NEEDS[name]():
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and _needs(item) and _in_ci():
        report.outcome = "failed"
        marker = " and ".join(map(repr, _needs(item)))
        report.longrepr = f"a test marked {marker} was skipped in CI, where it must run: {report.longrepr}"
    return report
