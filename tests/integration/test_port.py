"""Scripts of Paddle 1.7 and 2.x train on two ranks once they are ported, with nothing done by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes import ROOT, Job, clean_environ, output_of, python, run_alone
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.long

SCRIPTS = ROOT / "tests" / "integration" / "port"
# Runs a ported script as ``python SCRIPT`` would, then reports this rank's parameters.
RUN = """
import runpy
import sys

import paddle

from fleet_train import fleet
from tests.support.worker import digest, report

script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
state = fleet.main_program.state_dict("param", paddle.static.global_scope())
report(fleet.worker_index(), digest=digest(state), parameters=len(state))
"""


# Fleet 1.8 as blogs show it. Between the lines are empty ones with a no-break space, which indents, too; the same
# quotation mark stands on both sides.
PUBLISHED = """
# -*- coding: utf-8 -*-
import os
import numpy as np
import paddle.fluid as fluid
from paddle.fluid.incubate.fleet.collective import fleet, DistributedStrategy
from paddle.fluid.incubate.fleet.base import role_maker
# 两层的网络
def net(x, label):
    hidden = fluid.layers.fc(input=x, size=16, act='tanh')
    return fluid.layers.mean(x=fluid.layers.cross_entropy(
        input=fluid.layers.fc(input=[hidden], size=2, act='softmax'), label=label))
def batch():
    x = np.random.random(size=(32, 4)).astype('float32')
    return {"x": x,
            "y": (x[:, :1] > 0.5).astype('int64')}
x = fluid.layers.data(name="x", shape=[4], dtype='float32')
y = fluid.layers.data(name="y", shape=[1], dtype='int64')
loss = net(x, y)
optimizer = fluid.optimizer.SGD(learning_rate=0.5)
role = role_maker.PaddleCloudRoleMaker(is_collective=True)
fleet.init(role)
{settings}
optimizer.minimize(loss, fluid.default_startup_program())
train_prog = fleet.main_program
gpu_id = int(os.getenv("FLAGS_selected_gpus", "0"))
place = fluid.CUDAPlace(gpu_id)
exe = fluid.Executor(place)
exe.run(fluid.default_startup_program())
for i in range(31):
    if i % 2 == 0:
        value = exe.run(program=train_prog, feed=batch(), fetch_list=[loss.name])
        print("step%d loss=%f" % (i, value[0]))
    else:
        value = exe.run(program=train_prog, feed=batch())
model_path = "./"
if os.path.exists(model_path):
    fleet.save_persistables(exe, model_path)
"""
PLAIN = "optimizer = fleet.distributed_optimizer(optimizer, strategy=DistributedStrategy())"
TUNED = """
strategy = DistributedStrategy()
strategy.nccl_comm_num = 2
exec_strategy = fluid.ExecutionStrategy()
exec_strategy.num_threads = 3
exec_strategy.num_iteration_per_drop_scope = 30
strategy.exec_strategy = exec_strategy
strategy.fuse_all_reduce_ops = True
optimizer = fleet.distributed_optimizer(optimizer, strategy=strategy)
"""


def figures(output: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"{name}(?:=|: )([\d.]+)", output)]


@pytest.mark.parametrize(
    ("script", "saved"),
    [
        ("fluid_resnet.py", "resnet_out"),
        ("fleet_2x_docs.py", "docs_out"),
        ("fleet_2x_slots.py", "slots_out"),
    ],
)
def test_ported_script_trains_on_two_ranks_with_equal_replicas(tmp_path: Path, script: str, saved: str) -> None:
    path = tmp_path / script
    path.write_bytes((SCRIPTS / script).read_bytes())
    port = python("-m", "fleet_train", "port")
    assert "To do by hand" not in run_alone(tmp_path / "job", [*port, "--write", str(path)]).output
    assert output_of([*port, "--check", str(path)]) == ""

    result = run_ranks(RUN, 2, folder=tmp_path, args=[str(path)])
    assert len(set(result.of_all("digest"))) == 1
    assert result.values[0]["parameters"] >= 3
    first, second = (figures(rank.output, "loss") for rank in result.ranks)
    assert first != second, "each rank has data of its own"
    assert first[-1] < first[0]
    if script == "fluid_resnet.py":
        assert (tmp_path / "resnet_inference" / "model.json").exists()
        tested = [figures(rank.output, "tested") for rank in result.ranks]
        assert [len(values) for values in tested] == [3, 2], "rank 0 tests alone, too: a clone waits for nobody"
        assert [len(set(values)) for values in tested] == [1, 1], "dropout and batch norm are in test mode"
    assert (tmp_path / saved / "persistables.safetensors").exists()
    if script == "fleet_2x_docs.py":
        fleets, ours = "import paddle.distributed.fleet as fleet", "from fleet_train import fleet"
        path.write_text((SCRIPTS / script).read_text().replace(fleets, ours))
        by_hand = run_ranks(RUN, 2, folder=tmp_path, args=[str(path)])
        assert by_hand.of_all("digest") == result.of_all("digest"), "the import is the only line that has to change"


@pytest.mark.parametrize("settings", [PLAIN, TUNED])
def test_a_program_as_a_blog_shows_it_trains_on_two_ranks(tmp_path: Path, settings: str) -> None:
    text = PUBLISHED.replace("{settings}", settings.strip()).strip() + "\n"
    script = tmp_path / "train.py"
    script.write_text(
        text.replace("    ", "\u00a0 \u00a0 ").replace("'", "\u2018").replace("\n", "\n\u00a0\n"), encoding="utf-8"
    )
    port = python("-m", "fleet_train", "port")
    said = run_alone(tmp_path / "job", [*port, "--write", str(script)]).output
    assert "no-break space (U+00A0), left single quotation mark (U+2018) in lines" in said
    assert "To do by hand" not in said
    assert output_of([*port, "--check", str(script)]) == ""

    launch = python("-m", "fleet_train", "launch", "--nproc_per_node=2", "train.py")
    with Job(tmp_path / "job") as job:
        job.start("launcher", launch, clean_environ(), tmp_path)
        (ended,) = job.wait(240.0)
    assert ended.exit_code == 0, ended.output
    first, second = (figures((tmp_path / f"log/workerlog.{rank}").read_text(), "loss") for rank in range(2))
    assert first != second, "each rank has data of its own"
    assert [len(losses) for losses in (first, second)] == [16, 16]
    assert sum(first[-4:] + second[-4:]) < 0.8 * sum(first[:4] + second[:4])
    assert (tmp_path / "persistables.safetensors").exists()
