"""Real training under the launcher: a rank that dies is named on every node, and no process hangs."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from tests.integration.launch.conftest import SECRET, Bench, send
from tests.support.processes import ROOT

_TRAIN = """
import os, signal
import numpy as np
import paddle
from fleet_train import fleet, role_maker

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
x, y = paddle.static.data("x", [8, 4]), paddle.static.data("y", [8, 1])
loss = paddle.mean((paddle.static.nn.fc(x, 1) - y) ** 2)
fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(fleet.startup_program)
feed = {"x": np.ones((8, 4), "float32"), "y": np.ones((8, 1), "float32")}
for step in range(100_000):
    if step == 5 and fleet.worker_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exe.run(fleet.main_program, feed=feed, fetch_list=[loss])
"""


def test_a_rank_that_is_killed_in_the_middle_of_training(bench: Bench) -> None:
    bench.start_two(_TRAIN)
    ended = bench.ended(90.0)
    assert [one.exit_code for one in ended] == [137, 137], bench.job.report()
    for one in ended:
        first, other = [re.split(r"\s{2,}", line) for line in one.output.splitlines()[-2:]]
        assert first[:4] == ["failed first", "1", f"127.0.0.3:{bench.first_port}", "killed by SIGKILL"], one.output
        assert other[:3] == ["secondary", "0", f"127.0.0.2:{bench.first_port}"], one.output
        # Whichever was faster: rank 0's own error, or the launcher that had heard of rank 1.
        assert other[3] in ("exit code 11 (another rank was lost)", "stopped by SIGTERM"), one.output
    assert bench.job.leftovers() == []
    assert bench.files_with(SECRET) == []


@pytest.mark.long
def test_sigterm_on_one_node_saves_the_reference_trainers_state_and_ends_with_12_everywhere(bench: Bench) -> None:
    output = bench.folder / "out"
    recipe = "--model=mlp --data=digits --epochs=10000 --log_every=1 --checkpoint_every=1000 --evaluate_every=1000"
    _, second = bench.start_two(ROOT / "tools" / "train.py", *recipe.split(), f"--output_dir={output}")
    metrics = output / "metrics.jsonl"
    bench.wait_for(lambda: metrics.exists() and len(metrics.read_bytes().splitlines()) > 5, "steps", 60.0)
    send(second, signal.SIGTERM)
    assert [one.exit_code for one in bench.ended()] == [12, 12], bench.job.report()
    (saved,) = (output / "checkpoints").glob("step-*")
    state = json.loads((saved / "complete.json").read_text())["state"]
    assert state["step"] == int(saved.name.removeprefix("step-")) > 0
    for node in (0, 1):
        assert "Preempted" in bench.log(f"node{node}/log/workerlog.0"), bench.job.report()
    assert "node 1 (127.0.0.3) was asked to stop by SIGTERM; the job has saved its state" in second.output
    assert bench.job.leftovers() == []


@pytest.mark.long
def test_an_own_script_that_resumes_from_its_own_checkpoint_makes_the_same_steps_again(bench: Bench) -> None:
    script = ROOT / "tools" / "examples" / "train_with_restarts.py"
    launcher = bench.start(script, flags=["--nproc_per_node=2", "--max_restarts=3"])
    bench.wait_for(lambda: (bench.folder / "node0" / "checkpoints" / "200").exists(), "a checkpoint", 60.0)
    os.kill(json.loads(bench.log("node0/log/workerend.1.json"))["pid"], signal.SIGKILL)
    assert launcher.process.wait(timeout=90) == 0, launcher.output
    killed, resumed = (bench.log(f"node0/log/workerlog.0{suffix}") for suffix in (".attempt0", ""))
    first = int(re.findall(r"^resumes after step (\d+)$", resumed, re.MULTILINE)[0])
    before, after = (dict(re.findall(r"^step(\d+) loss=(\S+)$", log, re.MULTILINE)) for log in (killed, resumed))
    assert 200 <= first <= len(before)
    assert list(after) == [str(step) for step in range(first + 1, 1001)]
    made_twice = before.keys() & after.keys()
    assert {step: before[step] for step in made_twice} == {step: after[step] for step in made_twice}
    assert "restart 1 of 3" in launcher.output


def train_and_flip(
    bench: Bench, *flags: str, ranks: int = 2, after: int = 0, output: str = "out", code: int = 0
) -> str:
    """The reference trainer, which saves every 5 of 45 steps; after step ``after`` rank 0 has another weight.

    Returns what the launcher and rank 0 have printed.
    """
    recipe = "--model=mlp --data=digits --batch_size=16 --epochs=1 --checkpoint_every_steps=5 --keep_checkpoints=100"
    launcher = bench.start(
        ROOT / "tests" / "support" / "train_with_a_flipped_bit.py",
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


def test_of_three_ranks_the_one_whose_weight_flips_is_named(bench: Bench) -> None:
    told = train_and_flip(bench, ranks=3, after=7, code=8)
    odd = f"rank 0 (127.0.0.1:{bench.first_port})"
    assert f"diverged at the save after step 10: 'linear_1.w_0' of {odd} differs from that of the other 2" in told
    assert re.search(r"failed first +0 ", told), told
    assert list(checkpoints(bench)) == ["05"]


@pytest.mark.long
def test_what_was_saved_without_a_comparison_is_resumed_only_when_told(bench: Bench) -> None:
    profile = bench.folder / "unchecked.yaml"
    profile.write_text("description: For a test.\nextends: single_node\ndivergence_check_steps: 0\n")
    train_and_flip(bench, f"--strategy={profile}", after=7)
    told = train_and_flip(bench, "--resume", "--epochs=2", code=9)
    assert "step-00000045 was saved with divergence_check_steps: 0: nobody has compared" in told
    assert "resumed from" in train_and_flip(bench, "--resume", "--epochs=2", "--resume_uncompared")
    assert "nothing left to train" in train_and_flip(bench, "--resume", "--epochs=2")  # these were compared
    states = [
        json.loads(path.read_text())["state"] for path in sorted(bench.folder.glob("out/checkpoints/*/complete.json"))
    ]
    assert [state["compared"] for state in states] == [False] * 9 + [True] * 9
