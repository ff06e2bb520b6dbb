"""What `plan --script` runs of a script: nothing is trained, saved or overwritten, whatever the script does."""

from __future__ import annotations

import atexit
import textwrap
from collections.abc import Iterator
from pathlib import Path

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.convert import rehearsal
from fleet_train.errors import ConversionError

PAIR = Cluster.imagined(2, 1)
STATIC = """
import numpy as np
import paddle
from fleet_train import fleet

paddle.enable_static()
BATCH = np.ones([2, 4], "float32")
exe = paddle.static.Executor()


def program(width, minimize):
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        loss = paddle.mean(paddle.static.nn.fc(paddle.static.data("x", [None, 4], "float32"), width))
        minimize(loss)
    return main, startup, loss


def sgd(loss):
    paddle.optimizer.SGD(0.1).minimize(loss)


def wrapped(loss):
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1)).minimize(loss)


def train(main, loss):
    exe.run(main, feed={"x": BATCH}, fetch_list=[loss])
    open("trained", "w").close()
    paddle.static.save(main, "model")
"""
DYNAMIC = """
import numpy as np
import paddle

net = paddle.nn.Linear(4, 1)
optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())


def train():
    net(paddle.ones([2, 4])).mean().backward()
    optimizer.step()
    open("trained", "w").close()
    paddle.save(net.state_dict(), "model.pdparams")
"""
NOT_CONVERTED = {
    "trains": (STATIC + "main, startup, loss = program(1, sgd)\nexe.run(startup)\ntrain(main, loss)", "runs a program"),
    "the default programs": (
        STATIC + "x = paddle.static.data('x', [None, 4], 'float32')\nloss = paddle.mean(paddle.static.nn.fc(x, 1))\n"
        "sgd(loss)\nexe.run(paddle.static.default_startup_program())\ntrain(None, loss)",
        "runs a program",
    ),
    "saves before it trains": (
        STATIC + "main, startup, loss = program(1, sgd)\nexe.run(startup)\npaddle.static.save(main, 'model')",
        "saves",
    ),
    "saves by another name": (
        STATIC
        + "from paddle.framework import io\nio.save({}, 'model.pdparams')\nmain, startup, loss = program(1, sgd)",
        "saves",
    ),
    "exports before it trains": (
        STATIC + "main, startup, loss = program(1, sgd)\nexe.run(startup)\n"
        "paddle.static.save_inference_model('model', [], [loss], exe, program=main)",
        "saves",
    ),
    "empties its log": (
        STATIC + "main, startup, loss = program(1, sgd)\nopen('model.pdparams', 'w').close()",
        "writes (model.pdparams)",
    ),
    "catches everything": (
        STATIC + "main, startup, loss = program(1, sgd)\nexe.run(startup)\ntry:\n    train(main, loss)\n"
        "except:\n    pass\nfinally:\n    paddle.static.save(main, 'model')",
        "runs a program",
    ),
    "predicts": (
        STATIC + "main, startup, loss = program(1, id)\nexe.run(startup)\ntrain(main, loss)",
        "runs a program",
    ),
    "never runs": (STATIC + "program(1, sgd)", "has ended without a step"),
    "two halves of minimize": (
        STATIC + "def halves(loss):\n    optimizer = paddle.optimizer.Adam(0.1)\n"
        "    optimizer.apply_gradients(optimizer.backward(loss))\n"
        "main, startup, loss = program(1, halves)\nopen('model.pdparams', 'w').close()",
        "writes (model.pdparams)",
    ),
    "reads a parameter": (
        STATIC + "main, startup, loss = program(1, sgd)\nexe.run(startup)\n"
        "paddle.static.global_scope().find_var('nothing').get_tensor()",
        "ended with AttributeError",
    ),
    "joins and does not wrap": (
        STATIC + "fleet.init(is_collective=True)\nmain, startup, loss = program(1, sgd)\nexe.run(startup)\n"
        "train(main, loss)",
        "minimizes without the other ranks",
    ),
    "Paddle's own fleet": (
        STATIC.replace("from fleet_train import fleet", "import paddle.distributed.fleet as fleet")
        + "fleet.init(is_collective=True)\n"
        "def stock(loss):\n    strategy = fleet.DistributedStrategy()\n"
        "    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), strategy).minimize(loss)\n"
        "main, startup, loss = program(1, stock)\nexe.run(startup)\ntrain(main, loss)",
        "Paddle's own fleet",
    ),
    "ends the process": (
        STATIC + "main, startup, loss = program(1, sgd)\nimport os\nos._exit(0)",
        "minimizes without the other ranks",
    ),
    "dynamic": (DYNAMIC + "train()", "calls backward"),
    "dynamic, by paddle.grad": (
        DYNAMIC + "paddle.grad(net(paddle.ones([2, 4])).mean(), net.parameters())",
        "paddle.grad",
    ),
    "dynamic, saves first": (DYNAMIC + "paddle.save(net.state_dict(), 'model.pdparams')\ntrain()", "saves"),
    "dynamic, paddle.Model": (
        DYNAMIC + "class Ones(paddle.io.Dataset):\n    def __getitem__(self, index):\n"
        "        return np.ones(4, 'float32'), np.ones(1, 'float32')\n    def __len__(self):\n        return 4\n"
        "model = paddle.Model(net)\nmodel.prepare(optimizer, paddle.nn.MSELoss())\n"
        "model.fit(Ones(), epochs=1, batch_size=2, verbose=0)\nopen('trained', 'w').close()",
        "calls backward",
    ),
}


RANKS = """
def job():
    import paddle
    from fleet_train import fleet
    open("trained", "w").close()

"""
STARTS_PYTHON = {
    "ranks of ours": RANKS + "import fleet_train\nfleet_train.spawn(job, nprocs=2)",
    "ranks of Paddle": RANKS + "import paddle\npaddle.distributed.spawn(job, nprocs=2, backend='gloo')",
    "a process": RANKS + "import multiprocessing as mp\nmp.get_context('spawn').Process(target=job).start()",
    "a script": "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'open(\"trained\", \"w\")'])",
    "a shell's line": "import os, sys\nos.system(f'{sys.executable} -c \"open(0x29)\"; touch trained')",
    "another in its place": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'open(0x29)'])",
}
"""Scripts that do all in a process that is not watched."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current one, with a model of an earlier run; Paddle as a script finds it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pdparams").write_text("the model of last week")
    monkeypatch.setattr(paddle.distributed.fleet.fleet, "_role_maker", None)
    paddle.disable_static()
    yield tmp_path
    paddle.disable_static()


def plans_of(folder: Path, text: str) -> list[rehearsal.Planned]:
    (folder / "train.py").write_text(textwrap.dedent(text))
    before = (paddle.static.Executor.run, paddle.save, paddle.optimizer.Optimizer.minimize)
    try:
        return rehearsal.plans_of_script(folder / "train.py", (), PAIR)
    finally:
        assert sorted(path.name for path in folder.iterdir()) == ["model.pdparams", "train.py"]
        assert (folder / "model.pdparams").read_text() == "the model of last week"
        assert (paddle.static.Executor.run, paddle.save, paddle.optimizer.Optimizer.minimize) == before


@pytest.mark.parametrize(("text", "why"), NOT_CONVERTED.values(), ids=NOT_CONVERTED.keys())
def test_a_script_that_is_not_converted_is_ended_before_it_trains_or_writes(folder: Path, text: str, why: str) -> None:
    with pytest.raises(ConversionError) as refused:
        plans_of(folder, text)
    message = str(refused.value)
    assert why in message
    if text.startswith(DYNAMIC):
        assert "paddle.enable_static()" in message
    elif "fleet.init(" in text and "paddle.distributed" not in text:
        assert "optimizer = fleet.distributed_optimizer(optimizer)" in message
    else:
        assert len(rehearsal.LINES.splitlines()) == 5
        assert message.endswith(rehearsal.LINES)


@pytest.mark.parametrize("text", STARTS_PYTHON.values(), ids=STARTS_PYTHON.keys())
def test_a_script_that_trains_in_another_process_is_ended_before_it_starts_it(folder: Path, text: str) -> None:
    with pytest.raises(ConversionError, match="starts another Python process"):
        plans_of(folder, text)


def test_what_a_script_would_do_at_its_exit_is_left_out(folder: Path) -> None:
    """Not what a library would do, which the script uses."""
    text = "import atexit, tempfile, weakref\natexit.register(open, 'trained', 'w')\n"
    before = atexit._ncallbacks()
    with pytest.raises(ConversionError):
        plans_of(folder, text)
    assert atexit._ncallbacks() == before


JOINED = STATIC + "fleet.init(is_collective=True)\n"
CONVERTED = {
    "one program": (JOINED + "main, startup, loss = program(1, wrapped)\nexe.run(startup)\ntrain(main, loss)", [8]),
    "ends the process": (
        JOINED + "program(1, wrapped)\nimport os\nchild = os.fork()\nif child == 0:\n    os._exit(3)\n"
        "os._exit(os.waitpid(child, 0)[1] != 3 << 8)",
        [8],
    ),
    "starts what serves it": (
        "if __name__ == '__main__':\n"
        + textwrap.indent(
            JOINED + "import multiprocessing, subprocess, sys\nsubprocess.run(['true', 'python', 'x'])\n"
            "subprocess.run([sys.executable, '--version'])\nsubprocess.run('true python; true', shell=True)\n"
            "with multiprocessing.get_context('spawn').Pool(1) as pool:\n    assert pool.map(abs, [-1]) == [1]\n"
            "main, startup, loss = program(1, wrapped)\nexe.run(startup)\ntrain(main, loss)",
            "    ",
        ),
        [8],
    ),
    "never runs": (JOINED + "program(1, wrapped)", [8]),
    "two programs, with startups in between": (
        JOINED + "for width in (1, 3, 5):\n    main, startup, loss = program(width, wrapped)\n    exe.run(startup)\n"
        "train(main, loss)",
        [8, 24, 40],
    ),
    "runs another program before": (
        JOINED + "test, startup, value = program(1, id)\nexe.run(startup)\n"
        "exe.run(test, feed={'x': BATCH}, fetch_list=[value])\nmain, startup, loss = program(3, wrapped)",
        [24],
    ),
    "writes before its first step": (
        JOINED + "main, startup, loss = program(1, wrapped)\nopen('model.pdparams', 'w').close()",
        [8],
    ),
    "reads what startup would have made": (
        JOINED + "main, startup, loss = program(1, wrapped)\nexe.run(startup)\n"
        "paddle.static.global_scope().find_var('nothing').get_tensor()",
        [8],
    ),
    "leaves": (JOINED + "main, startup, loss = program(1, wrapped)\nfleet.shutdown()\ntrain(main, loss)", [8]),
    "asks for the norm": (
        JOINED + "def asks(loss):\n    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1))\n"
        "    optimizer.minimize(loss)\n    optimizer.gradient_norm()\nprogram(1, asks)\nprogram(3, asks)",
        [8, 24],
    ),
}


@pytest.mark.parametrize(("text", "sizes"), CONVERTED.values(), ids=CONVERTED.keys())
def test_every_program_of_a_converted_script_is_planned(folder: Path, text: str, sizes: list[int]) -> None:
    """Of a layer with 4 inputs: 4 weights for each output, and a bias."""
    found = plans_of(folder, text)
    values = [sum(bucket.nbytes // 4 for bucket in planned.plan.buckets) for planned in found]
    assert values == [5 * size // 8 for size in sizes]
    assert {planned.place.partition(",")[0] for planned in found} == {"train.py"}


def test_a_loss_that_is_minimized_inside_a_branch_is_refused(folder: Path) -> None:
    text = JOINED + (
        "x = paddle.static.data('x', [None, 4], 'float32')\nweight = paddle.create_parameter([4, 1], 'float32')\n"
        "def branch():\n    loss = paddle.mean(x @ weight)\n    wrapped(loss)\n    return loss\n"
        "paddle.static.nn.cond(x.mean() > 0, branch, lambda: x.sum())"
    )
    with pytest.raises(ConversionError, match="is computed inside a control-flow block"):
        plans_of(folder, text)
