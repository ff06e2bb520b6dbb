"""Spare processes without Paddle: what becomes of one is what a new process would be, or it is not used."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fleet_train.cluster.installed import available_memory
from fleet_train.launch import spare, spares
from fleet_train.launch.processes import kill_descendants
from fleet_train.launch.request import AUTO, OFF, ON
from fleet_train.launch.spares import Spares
from tests.support.processes import ROOT, clean_environ, until

SHOWS = '''"""A script."""
import json, multiprocessing, os, sys, threading
import heavy, neighbour
def of_child(): return __name__
if __name__ == "__main__":
    print(sorted(globals()), __name__, __doc__, __file__, __spec__ and __spec__.name, type(__builtins__).__name__)
    print(sys.argv, sys.path, sys.orig_argv, os.getsid(0) == os.getpid(), os.getcwd())
    print(os.environ["FLEET_TRAIN_ATTEMPT"], os.environ.get("GONE"), os.getpriority(os.PRIO_PROCESS, 0))
    print(open("/proc/self/oom_score_adj").read(), threading.current_thread() is threading.main_thread())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(of_child))
    print("at the end", file=sys.stderr)
'''


class Bench:
    """A job's folder with a script, and the spares of its two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        self.script = folder / "job" / "train.py"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.installed = folder / "base" / "lib" / version / "site-packages"
        for each in (folder / "job", self.installed, folder / "log"):
            each.mkdir(parents=True)
        (folder / "job" / "neighbour.py").write_text("")
        self.module("heavy", "import time")
        self.write(SHOWS)
        self.trained = folder / "log" / ".trained"
        self.environ = {**clean_environ(), "PYTHONPATH": f"{self.installed}:{ROOT}", "FLEET_TRAIN_ATTEMPT": "0"}
        self.environ["PYTHONUSERBASE"] = str(folder / "base")
        self.environ["PADDLE_TRAINER_ID"] = "0"
        self.spares = Spares(ON, [], is_module=True)

    def module(self, name: str, code: str) -> Path:
        path = self.installed / f"{name}.py"
        path.write_text(code)
        return path

    def write(self, code: str) -> None:
        self.script.write_text(code)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-u", *(words or (str(self.script), "--a", "b"))]

    def begin(self, *words: str, wanted: str = ON) -> Spares:
        """Spares of ranks that have trained."""
        self.spares.close()
        self.spares = Spares(wanted, self.command(*words), is_module=bool(words) and words[0] == "-m")
        self.spares.watch(2, lambda _: self.environ, self.trained)
        assert not self.spares.has_trained()
        self.trained.touch()
        return self.spares

    def ready(self, *words: str, **more: Any) -> Spares:
        found = self.begin(*words, **more)
        until(
            lambda: (found.tick(), len(found.pids) == 2 and all(each.is_ready for each in found._waiting.values()))[1]
        )
        return found

    def ran(self, process: subprocess.Popen[bytes] | None) -> tuple[int, str]:
        assert process is not None, self.said
        return process.wait(30), (self.folder / "log" / "workerlog.0").read_text()

    def taken(self, of: Spares, environ: dict[str, str] | None = None) -> subprocess.Popen[bytes] | None:
        with (self.folder / "log" / "workerlog.0").open("wb") as log:
            return of.take(0, environ or self.environ | {"FLEET_TRAIN_ATTEMPT": "1"}, log)

    def new_process(self, *words: str) -> tuple[int, str]:
        """What the command does without a spare."""
        with (self.folder / "log" / "alone").open("wb") as log:
            process = subprocess.Popen(
                self.command(*words),
                env=self.environ | {"FLEET_TRAIN_ATTEMPT": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return process.wait(30), (self.folder / "log" / "alone").read_text()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path)
    monkeypatch.setattr(spares.logger, "info", made.said.append)
    yield made
    pids = made.spares.pids
    made.spares.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_it_becomes_the_process_that_the_command_would_have_been(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bench.folder / "job")
    bench.module("as_module", SHOWS)
    for words in ((), ("train.py",), ("-m", "as_module", "-x"), ("../job/train.py", "c d")):
        code, output = bench.ran(bench.taken(bench.ready(*words)))
        assert (code, output) == bench.new_process(*words)
        assert (code, "at the end" in output) == (0, True)


@pytest.mark.parametrize(
    "code",
    [
        "import heavy\ndef f():\n    raise ValueError('no')\nf()\n",
        "import sys\nprint(1)\nsys.exit(7)\n",
        "raise SystemExit('a message')\n",
        "exec('x = = 1')\n",
        "import not_there\n",
        "import os\nos._exit(3)\n",
        "import sys\ndef hook(kind, *_):\n    print('hooked', kind)\nsys.excepthook = hook\nraise KeyError(1)\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise TypeError('from') from error\n",
    ],
)
def test_it_ends_as_the_process_would(bench: Bench, code: str) -> None:
    bench.write(f"import heavy\n{code}")
    assert bench.ran(bench.taken(bench.ready())) == bench.new_process()


def test_it_has_imported_what_the_script_does_first_and_nothing_behind_that(bench: Bench) -> None:
    bench.module("heavy", "import sys, os\nopen(os.environ['MARK'], 'a').write(f'{os.getpid()}\\n')")
    bench.module("user", "from patched import function\ndef call(): return function()")
    bench.module("patched", "def function(): return 'original'")
    bench.environ["MARK"] = str(bench.folder / "mark")
    bench.write(
        "import sys, heavy\nimport patched\nprint('neighbour' in sys.modules, 'user' in sys.modules)\n"
        "patched.function = lambda: 'patch'\nimport user, neighbour\nprint(user.call())\n"
    )
    found = bench.ready()
    marked = (bench.folder / "mark").read_text().split()
    assert {int(each) for each in marked} == found.pids
    assert bench.ran(bench.taken(found)) == (0, "False False\npatch\n")
    assert (bench.folder / "mark").read_text().split() == marked  # not again


@pytest.mark.parametrize(
    ("code", "imports", "end_above"),
    [
        ('"""Doc."""\nfrom __future__ import annotations\nimport os, json as j\n', ["__future__", "os", "json"], 0),
        ("import os\nos.environ['A'] = '1'\nimport json\n", ["os"], 2),
        ("import sys; sys.path.insert(0, '..'); import json\n", ["sys"], 1),
        ("import neighbour\nimport json\n", [], 1),
        ("import json\nimport neighbour, os\n", ["json"], 2),
        ("from . import json\n", [], 1),
        ("try:\n    import json\nexcept ImportError:\n    pass\n", [], 1),
        ("import not_there\n", [], 1),
        ("import json\nx = = 1\n", [], 0),
        ("from os import path\nfrom xml.dom import minidom\n", ["os", "xml.dom"], 0),
    ],
)
def test_imports_end_with_the_first_line_that_is_none_of_an_installed_package(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, code: str, imports: list[str], end_above: int
) -> None:
    monkeypatch.syspath_prepend(bench.folder / "job")
    bench.write(code)
    found, end = spare.top_imports([str(bench.script)])
    assert ([module for module, _ in found], end) == (imports, 0)
    bench.write(f"{code}import fleet_train\n")
    assert spare.top_imports([str(bench.script)])[1] == end_above


def test_the_reference_trainer_is_imported_whole_and_another_module_as_far_as_its_top() -> None:
    trainer, _ = spare.top_imports(["-m", "fleet_train", "train", "--epochs=1"])
    assert ("fleet_train.train.reference", []) in trainer
    assert {"argparse", "json", "sys"} <= dict(spare.top_imports(["-m", "json.tool"])[0]).keys()
    assert spare.top_imports(["-m", "not_there"]) == ([], 0) == spare.top_imports(["/not/there.py"])


def test_one_that_died_or_is_stale_is_not_used_and_that_is_said(bench: Bench) -> None:
    found = bench.ready()
    for pid in found.pids:
        os.kill(pid, signal.SIGKILL)
    until(lambda: all(each.process.poll() is not None for each in found._waiting.values()))
    assert bench.taken(found) is None
    assert bench.said[-1] == "local rank 0 starts in a new process: its spare was ended by SIGKILL"

    found = bench.ready()
    bench.write(SHOWS + "\n")
    assert bench.taken(found) is None
    assert bench.said[-1].endswith("the script has been changed since its spare was started")

    found = bench.ready()
    assert bench.taken(found, bench.environ | {"FLAGS_x": "1", "OTHER": "secret"}) is None
    assert bench.said[-1].endswith(": FLAGS_x, OTHER is another one than when its spare was started")

    found = bench.ready()
    for pid in found.pids:
        os.kill(pid, signal.SIGSTOP)
    process = bench.taken(found)
    if process is not None:  # what it is to become lies in its socket
        os.kill(process.pid, signal.SIGCONT)
        assert bench.ran(process)[0] == 0


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import socket\nheld = socket.socket()", "the import of bad opens a connection or a port"),
        ("import os\nos._exit(5)", "its spare ended with exit code 5"),
        ("import neighbour", "the import of bad loads neighbour, which is not installed"),
    ],
)
def test_a_module_that_must_not_be_imported_beforehand_ends_the_spares_and_not_the_job(
    bench: Bench, code: str, why: str
) -> None:
    bench.module("bad", code)
    bench.write("import heavy, bad")
    found = bench.begin()
    until(lambda: (found.tick(), bool(bench.said))[1])
    assert bench.said == [f"no more spare processes: {why}; a restart takes some seconds longer"]
    for _ in range(3):
        found.tick()
    assert (found.pids, bench.taken(found)) == (set(), None)


def test_what_python_loads_at_its_start_is_no_reason(bench: Bench) -> None:
    (bench.folder / "start").mkdir()
    (bench.folder / "start" / "sitecustomize.py").write_text("")
    bench.environ["PYTHONPATH"] += f":{bench.folder / 'start'}"
    assert bench.ran(bench.taken(bench.ready()))[0] == 0


def test_a_script_that_begins_with_something_else_gets_no_spares(bench: Bench) -> None:
    bench.write("print()\nimport heavy")
    found = bench.begin()
    until(lambda: (found.tick(), bool(bench.said))[1])
    assert "the script does not begin with imports of installed packages" in bench.said[0]
    bench.said.clear()
    bench.write("import heavy\nprint()\nimport paddle")
    found = bench.begin()
    until(lambda: (found.tick(), bool(bench.said))[1])
    assert "line 2 of the script stands above its import of Paddle: move it below its imports" in bench.said[0]


def test_a_module_that_fails_is_left_to_the_script(bench: Bench) -> None:
    bench.module("broken", "raise ImportError('as always')")
    bench.write("import heavy, broken\n")
    assert bench.ran(bench.taken(bench.ready())) == bench.new_process()


def test_one_that_still_imports_is_taken_as_well(bench: Bench) -> None:
    bench.module("slow", "import os, time\nwhile not os.path.exists(os.environ['GO']): time.sleep(0.02)")
    bench.environ["GO"] = str(bench.folder / "go")
    for problem in (False, True):
        (bench.folder / "go").unlink(missing_ok=True)
        bench.module("late", "import socket\nheld = socket.socket()" if problem else "")
        bench.write("import slow, late\nprint(1)\n")
        found = bench.begin()
        found.tick()
        process = bench.taken(found)
        (bench.folder / "go").touch()
        assert bench.ran(process) == bench.new_process()
        found.tick()
        assert found._late is None


def test_after_an_attempt_that_has_not_trained_they_are_started_in_the_pause(bench: Bench) -> None:
    found = bench.ready()
    assert bench.ran(bench.taken(found))[0] == 0
    found.drop_others()
    found.watch(2, lambda _: bench.environ, bench.trained)  # the next attempt, which ends before its second step
    found.tick()
    assert not found.pids
    until(lambda: (found.tick(idle=True), len(found.pids) == 2)[1])
    assert bench.ran(bench.taken(found))[0] == 0


def test_one_whose_imports_hang_ends_as_a_rank_that_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.module("slow", "import time\ntime.sleep(600)")
    bench.write("import slow\n")
    found = bench.begin()
    until(lambda: (found.tick(), bool(found.pids))[1])
    process = bench.taken(found)
    monkeypatch.setattr(spares, "_IMPORTS_SECONDS", 0.0)
    found.tick()
    assert bench.ran(process)[0] == -signal.SIGKILL
    assert "its imports take longer than 0 s" in bench.said[-1]


def test_auto_starts_them_where_memory_allows_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spares, "available_memory", lambda: 700_000_000)
    found = bench.begin(wanted=AUTO)
    found.tick()
    assert (found.pids, bench.said) == (
        set(),
        [
            "no more spare processes: 700 MB of memory are available (--spares 1 starts them anyway); a restart takes "
            "some seconds longer"
        ],
    )
    monkeypatch.setattr(spares, "available_memory", lambda: None)
    bench.ready(wanted=AUTO)
    assert bench.begin(wanted=OFF).tick() is None
    assert not bench.spares.pids


def test_the_end_of_an_attempt_leaves_them_and_nothing_else(bench: Bench) -> None:
    found = bench.ready()
    stray = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    kill_descendants(besides=found.pids)
    assert stray.poll() is not None
    assert bench.ran(bench.taken(found))[0] == 0
    found.drop_others()
    assert not found.pids


def test_a_context_on_a_gpu_is_seen_and_a_driver_that_is_only_initialised_is_none() -> None:
    def set_(pointer: Any, value: int) -> int:
        pointer._obj.value = value
        return 0

    class Driver:
        """Stands in for CUDA's driver with two devices."""

        active, status = (0, 0), 0

        def cuDeviceGetCount(self, count: Any) -> int:
            return self.status or set_(count, 2)

        def cuDeviceGet(self, device: Any, ordinal: int) -> int:
            return set_(device, ordinal)

        def cuDevicePrimaryCtxGetState(self, device: ctypes.c_int, _: Any, active: Any) -> int:
            return set_(active, self.active[device.value])

    driver = Driver()
    load: Callable[..., Any] = lambda *_, **__: driver  # noqa: E731
    assert not spare.has_context(load)
    driver.active = (0, 1)
    assert spare.has_context(load)
    driver.status = 3  # not initialised
    assert not spare.has_context(load)
    assert not spare.has_context()  # no driver here


def test_available_memory_is_that_of_the_control_group(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:  8000 kB\n")
    assert available_memory(tmp_path) == 8000 * 1024
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("5000000\n")
    (group / "memory.current").write_text("4500000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    assert available_memory(tmp_path) == 800_000
    assert available_memory(tmp_path / "proc") is None


def test_it_ends_with_its_launcher(bench: Bench) -> None:
    code = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from fleet_train.launch.spares import Spares
environ = dict(os.environ)
found = Spares("1", {bench.command()!r}, False)
found.watch(1, lambda _: environ, Path({str(bench.trained)!r}))
Path({str(bench.trained)!r}).touch()
while not found.pids:
    found.tick()
print(*found.pids, flush=True)
time.sleep(600)
"""
    launcher = subprocess.Popen([sys.executable, "-c", code], env=bench.environ, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
