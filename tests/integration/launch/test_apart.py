"""Ranks that train without each other, or on the same samples, are told so; with --strict the job fails."""

from __future__ import annotations

import re

import pytest

from tests.integration.launch.conftest import Bench

# Programs that each rank trains alone, and innocent ones. argv: their names, in order.
SCRIPT = """
import sys

import numpy as np
import paddle

from fleet_train import fleet

class Samples(paddle.io.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return np.full(4, index, "float32"), np.ones(1, "float32")

def a_model(optimizer=None):
    inputs = [paddle.static.InputSpec([None, 4], "float32", "x")]
    labels = [paddle.static.InputSpec([None, 1], "float32", "y")]
    model = paddle.Model(paddle.nn.Linear(4, 1), inputs, labels)
    model.prepare(optimizer, paddle.nn.MSELoss())
    if optimizer is None:
        model.evaluate(Samples(), batch_size=4, verbose=0)
    else:
        model.fit(Samples(), batch_size=4, epochs=1, verbose=0)

def program(minimize, same_samples=False, dropout=0.0, shuffled=False):
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.static.scope_guard(paddle.static.Scope()):
        x = paddle.static.data("x", [None, 4], "float32")
        hidden = paddle.nn.BatchNorm1D(4)(paddle.static.nn.fc(x, 4))
        hidden = paddle.nn.functional.dropout(hidden, dropout)
        seen = paddle.static.nn.cond(x.mean() > 0, lambda: x.sum(), lambda: x.mean())
        minimize(hidden.square().mean(), (paddle.static.nn.fc(hidden, 1) - 1).square().mean())
        exe = paddle.static.Executor()
        exe.run(startup)
        random = np.random.default_rng(0 if same_samples else fleet.worker_index())
        samples = random.standard_normal((64, 4)).astype("float32")
        order = np.random.default_rng(fleet.worker_index()).permutation(64) if shuffled else np.arange(64)
        for step in range(8):
            exe.run(main, feed={"x": samples[order[8 * step : 8 * step + 8]]}, fetch_list=[seen])

def sgd():
    return paddle.optimizer.SGD(0.01)

def wrapped(strategy=None):
    return fleet.distributed_optimizer(sgd(), strategy)

def minimized_before(_, loss):
    optimizer = sgd()
    optimizer.minimize(loss)  # minimized before
    fleet.distributed_optimizer(optimizer)

def the_old_variable(_, loss):
    optimizer = sgd()
    fleet.distributed_optimizer(optimizer)
    optimizer.minimize(loss)  # the old variable

def evaluated_before(_, loss):
    exe = paddle.static.Executor()
    exe.run(paddle.static.default_startup_program())
    exe.run(feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])
    sgd().minimize(loss)  # evaluated before

def one_of_two(first, second):
    wrapped().minimize(first)
    sgd().minimize(second)  # one of two

CASES = {
    "evaluation": lambda: program(lambda *_: None),
    "converted": lambda: program(lambda _, loss: wrapped().minimize(loss)),
    "two converted": lambda: program(lambda first, second: [wrapped().minimize(loss) for loss in (first, second)]),
    "merged": lambda: program(lambda _, loss: wrapped("gradient_merge").minimize(loss)),
    "evaluated model": a_model,
    "forgotten": lambda: program(lambda _, loss: sgd().minimize(loss)),  # forgotten
    "a model": lambda: a_model(paddle.optimizer.Adam()),
    "minimized before": lambda: program(minimized_before),
    "the old variable": lambda: program(the_old_variable),
    "evaluated before": lambda: program(evaluated_before),
    "one of two": lambda: program(one_of_two),
    "in another order": lambda: program(lambda _, loss: wrapped().minimize(loss), same_samples=True, shuffled=True),
    "under dropout": lambda: program(lambda _, loss: wrapped().minimize(loss), same_samples=True, dropout=0.5),
    "own samples": lambda: program(lambda _, loss: wrapped().minimize(loss), dropout=0.5, shuffled=True),
    "same samples": lambda: program(lambda _, loss: wrapped().minimize(loss), same_samples=True),
}

paddle.enable_static()
fleet.init(is_collective=True)
for name in sys.argv[1:]:
    print(f"begin {name}", file=sys.stderr, flush=True)
    with paddle.utils.unique_name.guard():
        CASES[name]()
"""
INNOCENT = ("evaluation", "converted", "two converted", "merged", "own samples", "evaluated model")
FED_ALIKE = ("in another order", "under dropout")
ALONE = ("forgotten", "minimized before", "the old variable", "evaluated before", "one of two")
SIDE_BY_SIDE = "ranks ran side by side: none called fleet.init, and none was seen to connect to another"

# A script that knows nothing of fleet_train, and one of the dynamic graph.
NEVER_JOINED = """
import numpy as np
import paddle

paddle.enable_static()
loss = paddle.static.nn.fc(paddle.static.data("x", [None, 4], "float32"), 1).mean()
paddle.optimizer.SGD(0.1).minimize(loss)
exe = paddle.static.Executor()
exe.run(paddle.static.default_startup_program())
exe.run(feed={"x": np.ones((2, 4), "float32")})
"""
DATA_PARALLEL = """
import paddle

paddle.distributed.init_parallel_env()
network = paddle.DataParallel(paddle.nn.Linear(4, 1))
optimizer = paddle.optimizer.SGD(0.1, parameters=network.parameters())
network(paddle.ones([2, 4])).mean().backward()
optimizer.step()
"""


# Scripts that stay in dynamic mode. argv: their names; each says what it was told.
DYNAMIC = """
import sys

import paddle

from fleet_train import fleet
from fleet_train.errors import FleetTrainError

def network():
    return paddle.nn.Linear(8, 1)

def optimizer_of(layers):
    return paddle.optimizer.AdamW(0.1, parameters=layers.parameters())

def trained(layers, optimizer):
    layers(paddle.ones([2, 8])).mean().backward()
    optimizer.step()
    optimizer.clear_grad()

def wrapped(layers):
    trained(layers, fleet.distributed_optimizer(optimizer_of(layers)))

def scaled():
    layers = network()
    optimizer = fleet.distributed_optimizer(optimizer_of(layers))
    paddle.amp.GradScaler().step(optimizer)

def switched(method):
    paddle.enable_static()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=[]))
    paddle.disable_static()
    getattr(optimizer, method)(None)

def executed():
    paddle.static.Executor().run(paddle.static.default_startup_program())

def in_static_mode():
    paddle.enable_static()
    try:
        fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).step()
    finally:
        paddle.disable_static()

def by_hand():
    layers = network()
    layers(paddle.ones([2, 8])).mean().backward()
    for each in layers.parameters():
        paddle.distributed.all_reduce(each.grad)
    optimizer_of(layers).step()

def data_parallel():
    layers = paddle.DataParallel(network())
    trained(layers, optimizer_of(layers))

def alone():
    layers = network()
    trained(layers, optimizer_of(layers))

CASES = {
    "wrapped": lambda: wrapped(network()),
    "to_static": lambda: wrapped(paddle.jit.to_static(network())),
    "data parallel, wrapped": lambda: wrapped(paddle.DataParallel(network())),
    "scaled": scaled,
    "executed": executed,
    "distributed_model": lambda: fleet.distributed_model(network()),
    "step": lambda: switched("step"),
    "minimize": lambda: switched("minimize"),
    "backward": lambda: switched("backward"),
    "apply_gradients": lambda: switched("apply_gradients"),
    "in static mode": in_static_mode,
    "data parallel": data_parallel,
    "by hand": by_hand,
    "alone": alone,
}
fleet.init(is_collective=True)
for name in sys.argv[1:]:
    try:
        CASES[name]()
    except FleetTrainError as error:
        print(f"{name}: {error}", file=sys.stderr, flush=True)
        if name == "alone":
            raise
"""
REFUSED = (
    *("wrapped", "to_static", "data parallel, wrapped", "scaled", "executed", "distributed_model"),
    *("step", "minimize", "backward", "apply_gradients"),
)


def notices(log: str) -> dict[str, list[str]]:
    """What fleet_train said about the ranks' training in each case of the script."""
    cases = re.split(r"^begin (.*)$", log, flags=re.MULTILINE)[1:]
    said = re.compile(
        r"^fleet_train: (.*(?:updates on each rank alone|the same gradient|the same samples).*)$", re.MULTILINE
    )
    return {name: said.findall(text) for name, text in zip(cases[::2], cases[1::2], strict=True)}


def test_each_mistake_is_said_once_by_rank_0_and_nobody_else_is_accused(bench: Bench) -> None:
    flags = ["--nproc_per_node=2"]
    launcher = bench.start(SCRIPT, *INNOCENT, *ALONE, "a model", "same samples", FED_ALIKE[0], flags=flags)
    assert launcher.process.wait(timeout=300) == 0, launcher.output
    found = notices(launcher.output)
    lines = {
        line.rpartition("# ")[2]: number for number, line in enumerate(SCRIPT.strip().splitlines(), 1) if "# " in line
    }
    assert {name: said for name, said in found.items() if name in INNOCENT} == {name: [] for name in INNOCENT}
    for name in ALONE:
        (said,) = found[name]
        assert said.startswith(f"script.py, line {lines[name]} (")
        assert "so 2 ranks train 2 models; write optimizer = fleet.distributed_optimizer(optimizer) before it" in said
    (said,) = found["a model"]
    assert re.match(r"script\.py, line \d+ \(model\.prepare\(optimizer, paddle\.nn\.MSELoss\(\)\)\)", said)
    (said,) = found["same samples"]
    assert "fleet_train.data.ShardedBatchSampler" in said
    (said,) = found[FED_ALIKE[0]]
    assert said.startswith("all ranks were fed the same samples, in the same order or another one; share them: ")
    assert [case for case, said in notices(bench.log("node0/log/workerlog.1")).items() if said] == []
    assert SIDE_BY_SIDE not in launcher.output


def test_what_updates_without_minimize_is_refused_and_dynamic_scripts_that_communicate_are_not(bench: Bench) -> None:
    flags = ["--nproc_per_node=2", "--strict"]
    launcher = bench.start(DYNAMIC, *REFUSED, "in static mode", "data parallel", flags=flags)
    assert launcher.process.wait(timeout=120) == 0, launcher.output
    said = dict(re.findall(r"^([\w ,]+): (.*)$", bench.log("node0/log/workerlog.0"), re.MULTILINE))
    for name in REFUSED:
        assert "paddle.enable_static()" in said[name], name
    for name in ("wrapped", "to_static", "scaled", "step"):
        assert "2 ranks would train 2 models" in said[name]
    assert "update each of the 2 ranks alone; call optimizer.minimize(loss)" in said["in static mode"]
    assert "data parallel" not in said


@pytest.mark.parametrize(("name", "exit_code"), [("by hand", 0), ("alone", 7)])
def test_with_strict_an_update_of_each_rank_alone_in_dynamic_mode_is_an_error(
    bench: Bench, name: str, exit_code: int
) -> None:
    launcher = bench.start(DYNAMIC, name, flags=["--nproc_per_node=2", "--strict"])
    assert launcher.process.wait(timeout=120) == exit_code, launcher.output
    assert ("an optimizer updates in dynamic mode, on each rank alone" in launcher.output) == (exit_code != 0)


@pytest.mark.parametrize(("merged", "said"), [("1", ""), ("2", "the profile's settings would do nothing")])
def test_one_process_trains_in_dynamic_mode_unless_the_profile_asks_for_more(
    bench: Bench, merged: str, said: str
) -> None:
    flags = ["--nproc_per_node=1", "--strict", "--set", f"accumulate_steps={merged}"]
    launcher = bench.start(DYNAMIC, "wrapped", flags=flags)
    assert launcher.process.wait(timeout=120) == 0, launcher.output
    log = bench.log("node0/log/workerlog.0")
    assert said in log
    assert ("in dynamic mode" in log) == bool(said)


def test_ranks_that_never_join_are_told_at_the_end_by_the_first_node(bench: Bench) -> None:
    first, second = bench.start_two(NEVER_JOINED)
    assert [end.exit_code for end in bench.ended(120)] == [0, 0]
    assert first.output.count(f"the 2 {SIDE_BY_SIDE}") == 1
    assert SIDE_BY_SIDE not in second.output


@pytest.mark.parametrize(
    ("script", "argument", "exit_code", "reason"),
    [
        (SCRIPT, "same samples", 10, "all ranks computed the same gradient twice in a row"),
        (SCRIPT, "under dropout", 10, "all ranks were fed the same samples"),
        (NEVER_JOINED, "", 7, SIDE_BY_SIDE),
        (DATA_PARALLEL, "", 0, ""),
    ],
)
def test_with_strict_a_mistake_ends_the_job_and_is_not_tried_again(
    bench: Bench, script: str, argument: str, exit_code: int, reason: str
) -> None:
    flags = ["--nproc_per_node=2", "--strict", "--max_restarts=1"]
    launcher = bench.start(script, *filter(None, [argument]), flags=flags)
    assert launcher.process.wait(timeout=180) == exit_code, launcher.output
    assert reason in launcher.output
    assert (SIDE_BY_SIDE in launcher.output) == (script is NEVER_JOINED)
    assert "restart 1 of 1" not in launcher.output
