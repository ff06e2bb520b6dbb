"""Real training under the launcher: ranks that die, stops that save, states that must not or cannot be saved."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.integration.launch.conftest import Bench, send
from tests.support.processes import ROOT, clean_environ, python


@pytest.mark.long
def test_an_own_script_that_resumes_from_its_own_checkpoint_makes_the_same_steps_again(bench: Bench) -> None:
    script = ROOT / "tools" / "examples" / "train_with_restarts.py"
    launcher = bench.start(script, flags=["--nproc_per_node=2", "--max_restarts=3"])
    bench.wait_for(
        lambda: (bench.folder / "node0" / "ck" / "checkpoints" / "step-00000200").exists(), "a checkpoint", 60.0
    )
    os.kill(json.loads(bench.log("node0/log/workerend.1.json"))["pid"], signal.SIGKILL)
    assert launcher.process.wait(timeout=90) == 0, launcher.output
    killed, resumed = (bench.log(f"node0/log/workerlog.0{suffix}") for suffix in (".attempt0", ""))
    first = int(re.findall(r"resumed from .* \(step (\d+)\)$", resumed, re.MULTILINE)[0])
    before, after = (dict(re.findall(r"^step(\d+) loss=(\S+)$", log, re.MULTILINE)) for log in (killed, resumed))
    assert 200 <= first <= len(before)
    assert list(after) == [str(step) for step in range(first, 1000)]
    made_twice = before.keys() & after.keys()
    assert {step: before[step] for step in made_twice} == {step: after[step] for step in made_twice}
    assert "restart 1 of 3" in launcher.output


def test_the_trainer_as_it_is_goes_on_after_a_restart_and_loses_nothing_by_ctrl_c(bench: Bench) -> None:
    """Neither --output_dir nor a flag that asks for checkpoints."""
    recipe = "-m fleet_train train --model=mlp --data=digits --epochs=500".split()
    command = python("-m", "fleet_train", "launch", f"--started_port={bench.first_port}", "--nproc_per_node=2")
    started = bench.job.start("node0", [*command, "--max_restarts=1", *recipe], clean_environ(), bench.folder / "node0")
    saved = bench.folder / "node0" / "runs" / "train" / "checkpoints"
    bench.wait_for(lambda: len(list(saved.glob("step-*/complete.json"))) == 2, "two checkpoints", 90.0)
    first = min(saved.glob("step-*")).name
    os.kill(json.loads(bench.log("node0/log/workerend.1.json"))["pid"], signal.SIGKILL)
    bench.wait_for_output("resumed from runs/train/checkpoints/step-", "node0/log/workerlog.0")
    bench.wait_for(lambda: min(saved.glob("step-*")).name > first, "another checkpoint", 90.0)
    send(started, signal.SIGINT)
    assert started.process.wait(timeout=90) == 12, started.output
    assert (
        "saves to runs/train (--output_dir) after every epoch, and when it is asked to stop (Ctrl-C)" in started.output
    )
    assert "epoch 1/" not in bench.log("node0/log/workerlog.0"), "the restart began again"
    last = max(saved.glob("step-*")).name
    told = started.output + bench.log("node0/log/workerlog.1")
    assert re.search(rf"stopped after step \d+: .*; resume from runs/train/checkpoints/{last}", told), told
    assert (saved / last / "complete.json").exists()


# The trainer on a cluster whose rank 0 has faulty memory: after one step a bit of a weight is another one.
FLIPS = """
import os
import numpy as np
import paddle
from fleet_train import fleet
from fleet_train.cli.train import command

run, steps = paddle.static.Executor.run, 0
def run_and_flip(self, *args, **kwargs):
    global steps
    fetched = run(self, *args, **kwargs)
    steps += bool(kwargs.get("feed"))
    if fleet.worker_index() == 0 and kwargs.get("feed") and steps == int(os.environ["FLIPPED_AFTER"]):
        weight = paddle.static.global_scope().find_var("linear_1.w_0").get_tensor()
        values = np.array(weight)
        values.view("uint32").reshape(-1)[5] ^= 1 << 20
        weight.set(values, fleet.place())
    return fetched
paddle.static.Executor.run = run_and_flip
command()
"""


def train_and_flip(
    bench: Bench, *flags: str, ranks: int = 2, after: int = 0, output: str = "out", code: int = 0
) -> str:
    """The reference trainer, which saves every 5 of 45 steps; after step ``after`` rank 0 has another weight.

    Returns what the launcher and rank 0 have printed.
    """
    recipe = "--model=mlp --data=digits --batch_size=16 --epochs=1 --checkpoint_every_steps=5 --keep_checkpoints=100"
    launcher = bench.start(
        FLIPS,
        *recipe.split(),
        f"--output_dir={bench.folder / output}",
        *flags,
        flags=[f"--nproc_per_node={ranks}"],
        environ={"FLIPPED_AFTER": str(after)},
        job=f"-{len(bench.job.started)}",
    )
    assert launcher.process.wait(timeout=120) == code, bench.job.report()
    return launcher.output + bench.log(f"node0-{len(bench.job.started) - 1}/log/workerlog.0")


def checkpoints(bench: Bench, output: str = "out") -> dict[str, bytes]:
    """The tensors' files by the step's number."""
    found = sorted((bench.folder / output / "checkpoints").glob("step-*/persistables.safetensors"))
    return {path.parent.name.removeprefix("step-000000"): path.read_bytes() for path in found}


def test_a_weight_that_flips_on_one_of_two_ranks_is_not_saved_and_the_checkpoint_before_gives_the_same_run(
    bench: Bench,
) -> None:
    train_and_flip(bench, output="undisturbed")
    undisturbed = checkpoints(bench, "undisturbed")
    assert list(undisturbed) == [f"{step:02}" for step in range(5, 50, 5)]

    told = train_and_flip(bench, after=7, code=8)
    first, second = (f"rank {rank} (127.0.0.1:{bench.first_port + rank})" for rank in range(2))
    assert f"diverged at the save after step 10: 'linear_1.w_0' differs between {first} and {second}: one of" in told
    assert checkpoints(bench) == {"05": undisturbed["05"]}

    train_and_flip(bench, "--resume")
    assert checkpoints(bench) == undisturbed


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


@pytest.mark.long
@pytest.mark.parametrize(("kind", "kept"), [("background", "checkpoints/step-00000003"), ("own", "own-3")])
def test_nan_of_another_rank_is_not_published(bench: Bench, tmp_path: Path, kind: str, kept: str) -> None:
    output = tmp_path / "out"
    flags = ["--nproc_per_node=2", "--max_restarts=2", "--set", "nonfinite=ignore"]  # what a save finds by itself
    bench.start(_LAST_UPDATE, kind, str(output), flags=flags)
    (ended,) = bench.ended()
    assert ended.exit_code == 13, ended.output
    assert "'linear_0.b_0' is NaN in 1 of 1 elements" in ended.output
    assert "restart 1 of 2" not in ended.output
    for rank in range(2):
        assert "NotFinite: " in bench.log(f"node0/log/workerlog.{rank}")
    saved = [path.parent for path in output.rglob("complete.json")]
    assert saved == [output / kept]


# The trainer, whose rank 1 computes one wrong bit of a gradient in its first attempt: in the second pass of step 40.
_MISCOMPUTES = """
import os
from fleet_train.cli.train import command
from fleet_train.convert.optimizer import DistributedOptimizer
from tests.parallel.replays import flipping

backward = DistributedOptimizer.backward
def backward_and_flip(self, *args, **kwargs):
    (weight, gradient), *rest = backward(self, *args, **kwargs)
    return [(weight, flipping(gradient, "48")), *rest]
if os.environ["FLEET_TRAIN_ATTEMPT"] == "0":
    DistributedOptimizer.backward = backward_and_flip
command()
"""


def test_a_job_whose_rank_computes_a_wrong_gradient_goes_on_from_before(bench: Bench) -> None:
    settings = "--model=mlp --data=digits --epochs=3 --output_dir=out --set replay_check_steps=5".split()
    launcher = bench.start(_MISCOMPUTES, *settings, flags=["--nproc_per_node=2", "--max_restarts=1"])
    assert launcher.process.wait(timeout=90) == 0, launcher.output
    told = r"attempt 0: rank 1 .* failed first: exit code 15 \(ComputeFault\) after .*; restart 1 of 1"
    assert re.search(told, launcher.output), launcher.output
    assert "resumed from out/checkpoints/step-00000023" in bench.log("node0/log/workerlog.0")
    for rank in range(2):
        told = r"ComputeFault: the gradient of '\S+' of rank 1 .* in step 40 differs between two passes"
        assert re.search(told, bench.log(f"node0/log/workerlog.{rank}.attempt0")), bench.job.report()
