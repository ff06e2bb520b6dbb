"""Run as ranks: networks whose checked steps are computed twice (``replay_check_steps``), and one wrong bit.

Arguments: the case, the knob's value, and the calls of rank 1 in which an operator flips a bit of a gradient: ``3``,
``2,3``; ``all`` for another bit in each call. Further arguments: NAME=VALUE of the profile.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import paddle
import yaml

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.support.worker import report

STEPS, ROWS, FLIPPED = 6, 8, "linear_1.w_0"
RANK = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
SEED = int(os.environ.get("SEED", "0"))


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


def batch(step: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng([step, RANK, SEED])
    x = random.standard_normal((ROWS, 12)).astype("float32")
    return {"x": x, "y": (x.sum(1) > 0).astype("int64").reshape(-1, 1)}


def flipping(gradient: Any, calls: str) -> Any:
    """``gradient``, with a flipped bit in some of the calls; in those of an "n", such as 3n, with NaN."""
    count = 0

    def flip(_: Any) -> Any:
        nonlocal count
        tensor = _
        count += 1
        if RANK != 1 or (calls != "all" and not {str(count), f"{count}n"} & set(calls.split(","))):
            return tensor.clone()
        values = tensor.numpy().copy()
        if f"{count}n" in calls.split(","):
            values.reshape(-1)[0] = np.nan
        values.view(np.uint32).reshape(-1)[count % values.size] ^= 1 << 20
        return paddle.to_tensor(values, place=tensor.place)

    operator = paddle.static.register_op(
        flip,
        name="flip",
        infer_meta=lambda _: paddle.static.MetaTensor(dtype=gradient.dtype, shape=gradient.shape),
        input_names=["_"],
        output_names=["out"],
    )
    return operator(gradient)


def state() -> dict[str, np.ndarray]:
    values = fleet.main_program.state_dict("all", paddle.static.global_scope())
    return {name: np.array(value) for name, value in values.items()}


def main(network: str, every: str, calls: str, *settings: str) -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    paddle.seed(100 * SEED + RANK)
    x, y = paddle.static.data("x", [None, 12]), paddle.static.data("y", [None, 1], "int64")
    logits = NETWORKS[network](x)
    given = {name: yaml.safe_load(value) for name, _, value in (each.partition("=") for each in settings)}
    inner = {"sgd": lambda: paddle.optimizer.SGD(0.05), "adam": lambda: paddle.optimizer.Adam(0.01)}
    kind, loss = given.pop("optimizer", "adam"), LOSSES[given.pop("loss", "cross_entropy")](logits, y)
    profile = Profile(**given, replay_check_steps=int(every))
    optimizer = fleet.distributed_optimizer(inner[kind](), profile)
    if calls:
        pairs = optimizer.backward(loss)
        flipped = [(p, flipping(g, calls) if p.name == FLIPPED else g) for p, g in pairs]
        optimizer.apply_gradients(flipped)
    else:
        optimizer.minimize(loss)
    exe = paddle.static.Executor(fleet.place())
    exe.run(fleet.startup_program)
    losses = []
    for step in range(STEPS):
        before = state()
        report(step=step, before=before["linear_0.w_0"])
        try:
            losses.append(exe.run(fleet.main_program, feed=batch(step), fetch_list=[loss])[0])
        except BaseException:
            report(changed=[name for name, value in state().items() if value.tobytes() != before[name].tobytes()])
            raise
    report(losses=np.concatenate([each.reshape(-1) for each in losses]))
    report(**{f"state/{name}": value for name, value in state().items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
