"""What README shows of a run: the demo's last line, and the report of a job in which a rank waits for ever."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.processes import ROOT, Job, clean_environ, python
from tools.demo import Folders, say_results

README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXTS = re.findall(r"```text\n(.*?)\n```", README, re.DOTALL)
LOOP = '    samples = random.standard_normal((128, 32), dtype="float32")\n'
WAITS = """    while step == 7 and fleet.worker_index() == 1 and not os.path.exists("ready"):
        time.sleep(1)
"""


def told(line: str) -> str:
    """A line without what differs from run to run: numbers, folders, the widths of columns."""
    line = re.sub(r"/\S+/log/", "log/", line)
    return " ".join(re.sub(r"[\d.]+", "0", line).split())


def test_the_demo_ends_as_readme_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = re.findall(r"[\d.]*\d", TEXTS[0])
    names = ("test_accuracy", "steps", "world_size", "samples_per_second")
    summary = dict(zip(names, map(float, found), strict=False)) | {"checkpoint": "x"}
    say_results(Folders(tmp_path), summary | {"steps": int(found[1]), "world_size": int(found[2])}, float(found[4]))
    assert TEXTS[0] in capsys.readouterr().out


def test_a_rank_that_waits_for_ever_is_reported_as_readme_shows(tmp_path: Path) -> None:
    text = (ROOT / "tools" / "examples" / "train_with_fleet.py").read_text(encoding="utf-8")
    assert LOOP in text
    (tmp_path / "train.py").write_text("import os\nimport time\n" + text.replace(LOOP, LOOP + WAITS))
    flags = ["--nproc_per_node=2", f"--started_port={free_ports(4)}", "--set=collective_timeout_seconds=8"]
    command = python("-m", "fleet_train", "launch", *flags, "--strategy=multi_node", "train.py")
    with Job(tmp_path / "job") as job:
        job.start("launcher", command, clean_environ(), cwd=tmp_path)
        (ended,) = job.wait(120)
    assert ended.exit_code == 11, ended.output
    lines = {told(line) for line in ended.output.splitlines()}
    assert {told(line) for line in TEXTS[1].splitlines()} - lines == set(), ended.output


def test_the_command_that_make_leaves_is_the_module_from_any_folder(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("fleet_train")
    if not script.exists():
        message = f"{script.parent} has no fleet_train: it was not made by make"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    environ = {name: value for name, value in clean_environ().items() if name != "PYTHONPATH"}
    shown = [
        subprocess.run([*command, "--version"], cwd=folder, env=environ, capture_output=True, text=True, check=True)
        for command, folder in (([str(script)], tmp_path), ([sys.executable, "-m", "fleet_train"], ROOT))
    ]
    assert shown[0].stdout == shown[1].stdout != ""
