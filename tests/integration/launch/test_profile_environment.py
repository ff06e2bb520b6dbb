"""Environment variables that a profile sets for the workers are set before Paddle starts."""

from __future__ import annotations

import json

import pytest

from fleet_train.convert.planning import apply_environment
from fleet_train.errors import ProfileError
from fleet_train.profile import Profile
from tests.integration.launch.conftest import Bench
from tests.support.processes import ROOT, clean_environ, python

Folders = pytest.TempPathFactory

PROFILE = """
num_threads: 4
environment:
  NCCL_DEBUG: INFO
  FLAGS_fraction_of_gpu_memory_to_use: "0.25"
"""
SCRIPT = """
import json, os, sys
early = {
    "started": "paddle" in sys.modules,
    "variable": os.environ.get("NCCL_DEBUG"),
    "flag": os.environ.get("FLAGS_fraction_of_gpu_memory_to_use"),
}
import paddle
names = ["FLAGS_fraction_of_gpu_memory_to_use", "FLAGS_new_executor_serial_run"]
print("seen", json.dumps({**early, **paddle.get_flags(names)}), flush=True)
"""


def test_workers_start_with_the_profiles_variables_and_paddle_reads_its_flags_from_them(bench: Bench) -> None:
    profile = bench.folder / "mine.yaml"
    profile.write_text(PROFILE)
    bench.start(SCRIPT, flags=["--nproc_per_node=1", f"--strategy={profile}"])
    [ended] = bench.ended()
    assert ended.exit_code == 0, ended.output
    [line] = [line for line in bench.log().splitlines() if line.startswith("seen ")]
    assert json.loads(line.removeprefix("seen ")) == {
        "started": False,
        "variable": "INFO",
        "flag": "0.25",
        "FLAGS_fraction_of_gpu_memory_to_use": 0.25,
        "FLAGS_new_executor_serial_run": False,
    }


CANARY = "canary-7f3a9c-must-not-be-seen"


@pytest.mark.long
def test_no_value_of_the_profiles_environment_is_written_anywhere(bench: Bench, tmp_path_factory: Folders) -> None:
    profile = tmp_path_factory.mktemp("profiles") / "mine.yaml"
    profile.write_text(f"local_sgd_steps: 2\nuse_local_sgd: true\nenvironment:\n  MY_TOKEN: {CANARY}\n")
    output, script = bench.folder / "out", ROOT / "tools" / "train.py"
    recipe = f"--model=mlp --data=digits --epochs=1 --checkpoint_every=1 --strategy={profile} --output_dir={output}"
    bench.start(script, *recipe.split(), flags=["--nproc_per_node=2", f"--strategy={profile}"])
    others = {
        "dry": f"launch --dry-run --started_port={bench.first_port + 3} --strategy={profile} {script}",
        "profile": f"profiles {profile}",
        "json": f"profiles --json {profile}",
        "plan": f"plan --model=mlp --strategy={profile}",
    }
    for name, command in others.items():
        line = python("-m", "fleet_train", *command.split())
        bench.job.start(name, line, clean_environ(), cwd=bench.folder / name)
    ended = {one.name: one for one in bench.ended(120.0)}
    assert {name: one.exit_code for name, one in ended.items()} == dict.fromkeys(["node0", *others], 0), (
        bench.job.report()
    )
    assert "MY_TOKEN=(set)" in ended["dry"].output
    assert "MY_TOKEN: (set)" in ended["profile"].output
    assert '"MY_TOKEN": "(set)"' in ended["json"].output
    assert "MY_TOKEN: (set)" in (output / "metrics.jsonl").read_text()
    written = {path.name for path in output.rglob("*") if path.is_file()}
    assert {"vdlrecords.train.log", "metrics.jsonl", "complete.json", "summary.json"} <= written
    assert bench.files_with(CANARY) == []


def test_a_value_of_the_wrong_type_is_not_repeated() -> None:
    with pytest.raises(ProfileError) as caught:
        apply_environment(Profile(environment={"FLAGS_gpu_memory_limit_mb": CANARY}))
    assert str(caught.value) == ("environment.FLAGS_gpu_memory_limit_mb: its value is not of Paddle's type int")
