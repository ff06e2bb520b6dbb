"""A job whose state cannot be saved, or must not, says so with an exit code; also when it was asked to stop."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.launch.conftest import Bench, send

pytestmark = pytest.mark.long

# Files of more than 100 kB cannot be written, as with a quota: records of metrics can, checkpoints cannot.
_LIMITED = """
import resource, sys
if sys.argv[1] == "limited":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from fleet_train.cli import cli
cli(["train", *sys.argv[2:]])
"""
_FLAGS = "--model=mlp --data=digits --epochs=1000 --checkpoint_every_steps=20 --log_every=1".split()


def test_a_graceful_stop_that_saved_nothing_is_no_graceful_stop(bench: Bench, tmp_path: Path) -> None:
    output = tmp_path / "out"
    flags = [*_FLAGS, f"--output_dir={output}"]
    launcher = bench.start(_LIMITED, "limited", *flags, flags=["--nproc_per_node=2", "--max_restarts=2"])
    bench.wait_for_output("the checkpoint of step 20 could not be written: ", "node0/log/workerlog.0")
    send(launcher, signal.SIGTERM)
    (ended,) = bench.ended()
    assert ended.exit_code == 14, ended.output
    for rank in range(2):
        said = bench.log(f"node0/log/workerlog.{rank}")
        last = said.strip().splitlines()[-1]
        assert "stopped after step " in last, said
        assert "File too large, and nothing was saved after it; there is no other one of this run" in last
    assert "File too large" in ended.output
    assert "restart 1 of 2" not in ended.output
    assert not list(output.glob("checkpoints/*step-*"))


# Rank 1's last update before the save makes NaN of its weights: no rank has seen a loss of them, rank 0 has good ones.
_LAST_UPDATE = """
import sys
from pathlib import Path

import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.profile import Profile
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState

kind, folder = sys.argv[1], Path(sys.argv[2])
paddle.enable_static()
fleet.init()
loss = paddle.mean(paddle.nn.Linear(4, 1)(paddle.static.data("features", [None, 4], "float32")) ** 2)
profile = Profile(use_local_sgd=True, local_sgd_is_warm_steps=0, local_sgd_steps=4)
fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1), profile).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(fleet.startup_program)
checkpoints = Checkpoints(folder, background=kind == "background")
for step in range(1, 8):
    features = np.ones((8, 4), "float32")
    if step == 6 and fleet.worker_index() == 1:
        features[0, 0] = np.nan
    exe.run(fleet.main_program, feed={"features": features}, fetch_list=[])
    if kind != "own" and step % 3 == 0:
        checkpoints.save(exe, TrainState(0, step, 7, 2, {}, {}, {}, {}))
    elif step % 3 == 0:
        fleet.save_persistables(exe, str(folder / f"own-{step}"))
checkpoints.finish()
"""


@pytest.mark.parametrize(("kind", "kept"), [("background", "checkpoints/step-00000003"), ("own", "own-3")])
def test_nan_of_another_rank_is_not_published(bench: Bench, tmp_path: Path, kind: str, kept: str) -> None:
    output = tmp_path / "out"
    bench.start(_LAST_UPDATE, kind, str(output), flags=["--nproc_per_node=2", "--max_restarts=2"])
    (ended,) = bench.ended()
    assert ended.exit_code == 13, ended.output
    assert "'linear_0.b_0' is NaN in 1 of 1 elements" in ended.output
    assert "restart 1 of 2" not in ended.output
    for rank in range(2):
        assert "NotFinite: " in bench.log(f"node0/log/workerlog.{rank}")
    saved = [path.parent for path in output.rglob("complete.json")]
    assert saved == [output / kept]
