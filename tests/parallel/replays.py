"""Run as ranks: networks whose checked steps are computed twice (``replay_check_steps``), and one wrong bit.

Arguments: ``healthy``, a network, and settings of the profile as NAME=VALUE; or ``wrong``, a network, the knob's value,
the calls of rank 1 in which an operator flips a bit of a gradient (``3``; ``2,3``; ``all``; NaN in ``3n``), settings.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import paddle
import yaml

from fleet_train import fleet, role_maker
from fleet_train.collectives.replay import Replay
from fleet_train.profile import Profile
from tests.support.worker import report

STEPS, ROWS, FLIPPED = 6, 8, "linear_1.w_0"
RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))


def plain(x: Any, dropout: float = 0.0) -> Any:
    hidden = paddle.nn.functional.relu(paddle.nn.Linear(12, 32)(x))
    hidden = paddle.nn.functional.dropout(hidden, dropout)
    other = paddle.nn.functional.dropout(paddle.tanh(paddle.nn.Linear(32, 32)(hidden)), dropout)
    return paddle.nn.Linear(32, 3)(hidden + other)


def dropout(x: Any) -> Any:
    return plain(x + 0.01 * paddle.randn([ROWS, 12]), 0.3)


def norms(x: Any) -> Any:
    """Convolutions, batch norms whose statistics move, dropout of channels, and a max over space."""
    image = x.reshape([-1, 3, 2, 2])
    for channels in ((3, 16), (16, 16)):
        image = paddle.nn.Conv2D(*channels, 3, padding=1)(image)
        image = paddle.nn.functional.relu(paddle.nn.BatchNorm2D(channels[1])(image))
    image = paddle.nn.functional.dropout2d(image, 0.2)
    hidden = paddle.nn.Linear(16, 32)(paddle.nn.functional.adaptive_max_pool2d(image, 1).flatten(1))
    return paddle.nn.Linear(32, 3)(hidden)


def table(x: Any) -> Any:
    """Lookups with many repeated rows, whose gradients are added up; a recurrent layer behind them."""
    ids = paddle.abs(x * 3).cast("int64") % 50
    looked_up = paddle.nn.Embedding(50, 16, sparse=True)(ids)
    hidden = paddle.nn.GRU(16, 16)(looked_up)[0].mean(1)
    hidden = paddle.nn.functional.dropout(paddle.nn.Linear(16, 32)(hidden), 0.1)
    return paddle.nn.Linear(32, 3)(hidden)


def counting(x: Any) -> Any:
    """A variable of the script's own that each run changes in place, and that the network reads."""
    count = paddle.pir.core.create_persistable_value(
        "float32", [1], "runs", initializer=paddle.nn.initializer.Constant(1.0)
    )
    paddle.assign(count + 1.0, count)
    return plain(x / count)


def attention(x: Any) -> Any:
    tokens = x.reshape([-1, 3, 4])
    tokens = paddle.nn.TransformerEncoderLayer(4, 2, 16, dropout=0.1)(paddle.nn.Linear(4, 4)(tokens))
    return paddle.nn.Linear(12, 3)(paddle.nn.Linear(12, 12)(tokens.flatten(1)))


def weighted(logits: Any, y: Any) -> Any:
    """A mean over samples of unequal weight, whose number is exchanged."""
    wanted = (y != 2).cast("float32")
    losses = paddle.nn.functional.cross_entropy(logits, y, reduction="none")
    return (losses * wanted).sum() / wanted.sum()


def contrast(logits: Any, y: Any) -> Any:
    """Each sample against those of all ranks, which are gathered."""
    del y
    others = fleet.all_gather_samples(logits)
    return paddle.nn.functional.softplus(paddle.matmul(logits, others, transpose_y=True)).mean()


LOSSES = {"cross_entropy": paddle.nn.functional.cross_entropy, "weighted": weighted, "contrast": contrast}
NETWORKS = {each.__name__: each for each in (plain, dropout, norms, table, counting, attention)}


def batch(step: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([step, RANK, seed])
    x = random.standard_normal((ROWS, 12)).astype("float32")
    return {"x": x, "y": (x.sum(1) > 0).astype("int64").reshape(-1, 1)}


def flipping(gradient: Any, calls: str) -> Any:
    """``gradient``, with a flipped bit, another one each time, in some calls of an operator on rank 1."""
    count, chosen = 0, calls.split(",")

    def flip(_: Any) -> Any:
        nonlocal count
        count += 1
        values = _.numpy().copy()
        if RANK == 1 and f"{count}n" in chosen:
            values.reshape(-1)[0] = np.nan
        elif RANK == 1 and (calls == "all" or str(count) in chosen):
            values.view(np.uint32).reshape(-1)[count % values.size] ^= 1 << 20
        return paddle.to_tensor(values, place=_.place)

    operator = paddle.static.register_op(
        flip,
        name="flip",
        infer_meta=lambda _: paddle.static.MetaTensor(dtype=gradient.dtype, shape=gradient.shape),
        input_names=["_"],
        output_names=["out"],
    )
    return operator(gradient)


def state(main: Any) -> dict[str, np.ndarray]:
    values = main.state_dict("all", paddle.static.global_scope())
    return {name: np.array(value) for name, value in values.items()}


def train(network: str, every: int, calls: str = "", settings: Any = (), seed: int = 0) -> dict[str, np.ndarray]:
    """Train from the start, in a scope of its own; returns all values of the program, and the losses."""
    main, startup = paddle.static.Program(), paddle.static.Program()
    paddle.seed(100 * seed + RANK)
    given = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in settings)}
    inner = {"sgd": lambda: paddle.optimizer.SGD(0.05), "adam": lambda: paddle.optimizer.Adam(0.01)}
    with paddle.static.program_guard(main, startup), paddle.utils.unique_name.guard():
        x, y = paddle.static.data("x", [None, 12]), paddle.static.data("y", [None, 1], "int64")
        loss = LOSSES[given.pop("loss", "cross_entropy")](NETWORKS[network](x), y)
        optimizer = inner[given.pop("optimizer", "adam")]()
        optimizer = fleet.distributed_optimizer(optimizer, Profile(**given, replay_check_steps=every))
        if calls:
            pairs = optimizer.backward(loss)
            optimizer.apply_gradients([(p, flipping(g, calls) if p.name == FLIPPED else g) for p, g in pairs])
        else:
            optimizer.minimize(loss)
    with paddle.static.scope_guard(paddle.static.Scope()):
        exe, losses = paddle.static.Executor(fleet.place()), []
        exe.run(startup)
        for step in range(STEPS):
            before = state(main)
            try:
                losses.append(exe.run(main, feed=batch(step, seed), fetch_list=[loss])[0])
            except BaseException:
                report(changed=[name for name, value in state(main).items() if unlike(value, before[name])])
                raise
        return {**state(main), "losses": np.stack(losses)}


def unlike(one: np.ndarray, other: np.ndarray) -> bool:
    return one.tobytes() != other.tobytes()


def healthy(network: str, *settings: str) -> None:
    """For two seeds, the values that differ from those of a training in which nothing is compared."""
    made, begin, different = [0], Replay.begin, []

    def count(replay: Replay, number: Any) -> None:
        made[0] += 1
        begin(replay, number)

    Replay.begin = count  # type: ignore[method-assign]
    for seed in range(2):
        usual, checked = (train(network, every, "", settings, seed) for every in (0, 1))
        different += [name for name, value in usual.items() if unlike(value, checked[name])]
    report(different=different, compared=len(usual), checked=made[0])


def wrong(network: str, every: str, calls: str, *settings: str) -> None:
    train(network, int(every), calls, settings)


if __name__ == "__main__":
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    {"healthy": healthy, "wrong": wrong}[sys.argv[1]](*sys.argv[2:])
