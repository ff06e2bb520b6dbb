"""Run by the launcher: programs that each rank trains alone, and innocent ones. argv: their names, in order."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet


class Samples(paddle.io.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return np.full(4, index, "float32"), np.ones(1, "float32")


def a_model(optimizer: Any = None) -> None:
    """Paddle's high-level API; without an optimizer it only evaluates."""
    inputs = [paddle.static.InputSpec([None, 4], "float32", "x")]
    labels = [paddle.static.InputSpec([None, 1], "float32", "y")]
    model = paddle.Model(paddle.nn.Linear(4, 1), inputs, labels)
    model.prepare(optimizer, paddle.nn.MSELoss())
    if optimizer is None:
        model.evaluate(Samples(), batch_size=4, verbose=0)
    else:
        model.fit(Samples(), batch_size=4, epochs=1, verbose=0)


def program(minimize: Callable[[Any, Any], Any], same_samples: bool = False) -> None:
    """A network with batch norm, whose operator changes statistics in place, and a condition."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup), paddle.static.scope_guard(paddle.static.Scope()):
        x = paddle.static.data("x", [None, 4], "float32")
        hidden = paddle.nn.BatchNorm1D(4)(paddle.static.nn.fc(x, 4))
        seen = paddle.static.nn.cond(x.mean() > 0, lambda: x.sum(), lambda: x.mean())
        minimize(hidden.square().mean(), (paddle.static.nn.fc(hidden, 1) - 1).square().mean())
        exe = paddle.static.Executor()
        exe.run(startup)
        random = np.random.default_rng(0 if same_samples else fleet.worker_index())
        for _ in range(8):
            exe.run(main, feed={"x": random.standard_normal((8, 4)).astype("float32")}, fetch_list=[seen])


def sgd() -> Any:
    return paddle.optimizer.SGD(0.01)


def wrapped(strategy: Any = None) -> Any:
    return fleet.distributed_optimizer(sgd(), strategy)


def minimized_before(_: Any, loss: Any) -> None:
    optimizer = sgd()
    optimizer.minimize(loss)  # minimized before
    fleet.distributed_optimizer(optimizer)


def the_old_variable(_: Any, loss: Any) -> None:
    optimizer = sgd()
    fleet.distributed_optimizer(optimizer)
    optimizer.minimize(loss)  # the old variable


def evaluated_before(_: Any, loss: Any) -> None:
    exe = paddle.static.Executor()
    exe.run(paddle.static.default_startup_program())
    exe.run(feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])
    sgd().minimize(loss)  # evaluated before


def one_of_two(first: Any, second: Any) -> None:
    wrapped().minimize(first)
    sgd().minimize(second)  # one of two


CASES: dict[str, Callable[[], None]] = {
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
    "same samples": lambda: program(lambda _, loss: wrapped().minimize(loss), same_samples=True),
}

paddle.enable_static()
fleet.init(is_collective=True)
for name in sys.argv[1:]:
    print(f"begin {name}", file=sys.stderr, flush=True)
    with paddle.utils.unique_name.guard():
        CASES[name]()
