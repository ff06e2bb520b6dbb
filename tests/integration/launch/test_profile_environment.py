"""What a profile sets for the workers is there before Paddle starts."""

from __future__ import annotations

import json

from tests.integration.launch.conftest import Bench

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
