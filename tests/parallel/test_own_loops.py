"""What a loop of one's own asks of the other ranks: random numbers of its own, arrays of all, parts of saved states.

The ranks run this file, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import DistributedStrategy, fleet
from fleet_train.convert import session
from fleet_train.convert.draws import advice_about_draws
from fleet_train.errors import FleetTrainError
from tests.support.ranks import run_ranks
from tests.support.worker import report

FEATURES, BATCH = 8, 16


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except FleetTrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# random numbers


class Drawing:
    """A program that draws: what ``drawn`` makes of its hidden values is what it trains with."""

    def __init__(self, drawn: Callable[[Any], Any], batch: int = -1, random_seed: int = 0) -> None:
        self.main, startup, self._scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        with paddle.static.program_guard(self.main, startup), paddle.utils.unique_name.guard():
            self.main.random_seed = random_seed
            x = paddle.static.data("x", [batch, FEATURES])
            hidden = paddle.nn.Linear(FEATURES, FEATURES)(x)
            self._drawn = drawn(hidden)
            loss = (hidden * self._drawn).mean()
            fleet.distributed_optimizer(paddle.optimizer.SGD(0.0)).minimize(loss)
        self._exe = paddle.static.Executor(fleet.place())
        self._exe.run(startup, scope=self._scope)

    def run(self) -> Any:
        feed = {"x": np.full((BATCH, FEATURES), 1 + fleet.worker_index(), "float32")}
        (drawn,) = self._exe.run(self.main, feed=feed, fetch_list=[self._drawn], scope=self._scope)
        return drawn


def mask(values: Any) -> Any:
    """1 where a dropout of ones keeps: the mask alone."""
    return paddle.nn.functional.dropout(paddle.ones_like(values), 0.5)


def noise(values: Any) -> Any:
    return paddle.uniform(paddle.shape(values), min=0.5, max=1.5)


def in_a_branch(values: Any) -> Any:
    return paddle.static.nn.cond(values.mean() > -1e9, lambda: mask(values), lambda: values)


def of_weights(values: Any) -> Any:
    return paddle.nn.functional.dropout(paddle.create_parameter([FEATURES], "float32"), 0.5) + 0 * values


def of_features(values: Any) -> Any:
    """One mask for all samples."""
    mask = paddle.uniform([1, paddle.shape(values)[1]]) + paddle.uniform([paddle.shape(values)[1]])
    return paddle.nn.functional.dropout(paddle.ones_like(values), 0.5, axis=1) + mask


def of_rows(values: Any) -> Any:
    return paddle.nn.functional.dropout(paddle.ones_like(values), 0.5, axis=0)


def while_testing(values: Any) -> Any:
    return paddle.nn.functional.dropout(paddle.ones_like(values), 0.5, training=False)


def random_numbers(_: Path) -> None:
    rank, job = fleet.worker_index(), session.current().job
    found = {}

    def look(name: str, seed: int | None, **program: Any) -> None:
        made = Drawing(**program)
        if seed is not None:
            paddle.seed(seed)
        found[name] = str(advice_about_draws(job, made.main) or "")
        drawn = [made.run() for _ in range(2)]
        masks = [fleet.gather((each > 1).astype(int).ravel().tolist()) for each in drawn]
        alike[name] = [masks[0][0] == masks[0][-1], masks[0][rank] == masks[1][rank]]

    alike: dict[str, list[bool]] = {}
    for kind, drawn in (("dropout", mask), ("noise", noise), ("branch", in_a_branch), ("rows", of_rows)):
        look(f"{kind}, equal seeds", 7, drawn=drawn)
        look(f"{kind}, own seeds", 7 + rank, drawn=drawn)
    look("two of three", 7 + (rank == 1), drawn=mask)
    look("fixed size, equal seeds", 7, drawn=mask, batch=BATCH)
    look("program's seed", None, drawn=mask, random_seed=7)
    look("weights, equal seeds", 7, drawn=of_weights)
    look("features, equal seeds", 7, drawn=of_features)
    look("testing, equal seeds", 7, drawn=while_testing)
    look("nothing drawn, equal seeds", 7, drawn=lambda values: paddle.ones_like(values))

    session.current().is_strict = True
    paddle.seed(3)
    strict = Drawing(mask)
    paddle.seed(3)
    refused = message_of(strict.run)
    paddle.seed(3 + rank)
    report(rank, found=found, alike=alike, refused=refused, ran=message_of(Drawing(mask).run))


def test_equal_random_numbers_for_samples_are_said_and_others_are_not(tmp_path: Path) -> None:
    ranks = run_ranks(Path(__file__), 3, folder=tmp_path, args=["random_numbers", str(tmp_path)])
    assert ranks.exit_codes == [0, 0, 0], ranks.report()
    found, alike = ranks.of_all("found"), ranks.of_all("alike")
    assert found[0] == found[1] == found[2]
    for kind in ("dropout", "noise", "branch", "rows", "fixed size"):
        assert "all ranks draw the same random numbers" in found[0][f"{kind}, equal seeds"]
        assert "paddle.seed(SEED + fleet.worker_index())" in found[0][f"{kind}, equal seeds"]
        assert alike[0][f"{kind}, equal seeds"] == [True, False]
        if kind != "fixed size":
            assert found[0][f"{kind}, own seeds"] == ""
            assert alike[0][f"{kind}, own seeds"] == [False, False]
    assert "2 of 3 ranks draw the same" in found[0]["two of three"]
    assert "in every step: the program's random_seed, or seed= of a layer, is 7" in found[0]["program's seed"]
    assert alike[0]["program's seed"] == [True, True]
    for innocent in ("weights", "features", "testing", "nothing drawn"):
        assert found[0][f"{innocent}, equal seeds"] == ""
    assert {each[:60] for each in ranks.of_all("refused")} == {
        "ConversionError: all ranks draw the same random numbers for their"[:60]
    }
    assert ranks.of_all("ran") == ["", "", ""]


# arrays of all ranks

ARRAYS: list[Any] = [
    np.array([-0.0, np.nan, 1.5]),
    np.float32(3),
    np.zeros((0, 3)),
    np.array(["ab", "c"]),
    np.arange(7, dtype="int8"),
    np.array([True, False]),
    np.arange(5) * 1j,
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(["2020-01-01"], "datetime64[D]"),
]

REFUSED: list[Any] = [
    np.zeros(2, [("a", "i4"), ("b", "f8")]),
    np.ma.masked_invalid([1.0, np.nan]),
    None,
    np.array([None]),
]


def arrays(_: Path) -> None:
    rank, last = fleet.worker_index(), fleet.worker_num() - 1
    same = []
    for array in ARRAYS:
        got, sent = fleet.broadcast(array if rank == last else None, source=last), np.asarray(array)
        same.append((got.dtype, got.shape, got.tobytes()) == (sent.dtype, sent.shape, sent.tobytes()))
    gathered = fleet.all_gather(np.arange(rank + 1) + (0.5 if rank else 0))
    gathered[0][0] += 1  # it is this rank's to change
    report(
        rank,
        same=same,
        gathered=[each.tolist() for each in gathered],
        dtypes=[each.dtype.name for each in gathered],
        no_rank=message_of(lambda: fleet.broadcast(1, source=last + 1)),
        half=message_of(lambda: fleet.broadcast(1, source=0.5)),  # type: ignore[arg-type]
        objects=message_of(lambda: fleet.all_gather([object()] if rank == 0 else 1)),
        refused=[message_of(lambda: fleet.broadcast(each if rank == 0 else None)) for each in REFUSED],  # noqa: B023
        mean=fleet.all_reduce(np.asarray(float(rank)), "mean").item(),
    )


@pytest.mark.parametrize("ranks", [1, 3])
def test_arrays_of_one_rank_or_of_all_are_everywhere_bit_by_bit(ranks: int, tmp_path: Path) -> None:
    found = run_ranks(Path(__file__), ranks, folder=tmp_path, nodes=ranks, args=["arrays", str(tmp_path)])
    assert found.exit_codes == [0] * ranks, found.report()
    assert found.of_all("same") == [[True] * len(ARRAYS)] * ranks
    assert found.of_all("gathered") == [[[1], [0.5, 1.5], [0.5, 1.5, 2.5]][:ranks]] * ranks
    assert found.of_all("dtypes") == [["int64", "float64", "float64"][:ranks]] * ranks
    assert found.of_all("no_rank")[0].endswith(f"source={ranks} is no rank; ranks are 0 to {ranks - 1}")
    assert found.of_all("half")[0].endswith(f"source=0.5 is no rank; ranks are 0 to {ranks - 1}")
    wrong = "ConversionError: fleet.all_gather(): it takes numpy arrays of numbers, not 'list'; use fleet.gather"
    assert found.of_all("objects") == [wrong] * ranks
    for fields, masked, none, array in found.of_all("refused"):
        assert "fleet.broadcast(source=0): dtype [('a', '<i4'), ('b', '<f8')] is none of numpy's own" in fields
        assert "would lose its mask" in masked
        assert none.endswith("numbers, not 'NoneType'; use fleet.gather")
        assert array.endswith("numbers, not an array of objects; use fleet.gather")
    assert found.of_all("mean") == [(ranks - 1) / 2] * ranks


# parts of a saved state


def linear(name: str, inputs: int, outputs: int) -> Any:
    weight, bias = (paddle.ParamAttr(name=f"{name}.{kind}_0") for kind in "wb")
    return paddle.nn.Linear(inputs, outputs, weight_attr=weight, bias_attr=bias)


class Classifier:
    """A body with a batch norm below a head; ``classes`` decides the head's shape."""

    def __init__(
        self, classes: int, seed: int, prefix: str = "", looks_ahead: bool = False, trains: bool = True, **knobs: Any
    ) -> None:
        self._main, self._startup, self._scope = paddle.static.Program(), paddle.static.Program(), paddle.static.Scope()
        self._classes = classes
        with paddle.static.program_guard(self._main, self._startup), paddle.utils.unique_name.guard(prefix):
            paddle.seed(seed)
            x, y = paddle.static.data("x", [None, FEATURES]), paddle.static.data("y", [None, 1], "int64")
            hidden = paddle.nn.BatchNorm1D(4)(linear(f"body{prefix}", FEATURES, 4)(x))
            logits = linear(f"head{prefix}", 4, classes)(hidden)
            extra = linear(f"only{classes}{prefix}", classes, classes)(logits)
            loss = paddle.nn.functional.cross_entropy(extra, y)
            optimizer = paddle.optimizer.Momentum(0.1)
            if looks_ahead:
                optimizer = paddle.incubate.LookAhead(paddle.optimizer.SGD(0.0), k=3)
            if trains:
                fleet.distributed_optimizer(optimizer, DistributedStrategy(**knobs)).minimize(loss)
        self._exe = paddle.static.Executor(fleet.place())
        self.start()

    def start(self) -> None:
        self._exe.run(self._startup, scope=self._scope)

    def train(self, steps: int = 3) -> None:
        rng = np.random.default_rng(fleet.worker_index())
        for _ in range(steps):
            x, y = rng.normal(size=(5, FEATURES)).astype("float32"), rng.integers(0, self._classes, (5, 1))
            self._exe.run(self._main, feed={"x": x, "y": y}, scope=self._scope)

    def save(self, folder: Path) -> None:
        with paddle.static.scope_guard(self._scope):
            fleet.save_persistables(self._exe, folder, self._main)

    def load(self, folder: Path, **how: Any) -> list[str]:
        with paddle.static.scope_guard(self._scope):
            return fleet.load_persistables(self._exe, folder, self._main, **how)

    def values(self) -> dict[str, list[float]]:
        values = self._main.state_dict("all", self._scope)
        return {name: np.array(value).ravel().tolist() for name, value in sorted(values.items())}


def parts(folder: Path) -> None:
    rank, saved = fleet.worker_index(), folder / "pretrained"
    old = Classifier(3, seed=1)
    old.train()
    old.save(saved)
    new = Classifier(4, seed=20 + rank)
    before = new.values()
    whole = message_of(lambda: new.load(saved))
    assert new.values() == before
    loaded = new.load(saved, partial=True)
    after = new.values()
    new.train()
    late = Classifier(3, seed=30)
    late.train()
    trained_late = late.values()
    refused = message_of(lambda: late.load(saved, partial=True))
    kept = late.values() == trained_late
    late.start()
    again = late.load(saved, partial=True)
    merging = Classifier(3, seed=30, accumulate_steps=3)
    merging.train(2)
    report(rank, merging=message_of(lambda: merging.load(saved, partial=True)))
    slow, slow_saved = Classifier(3, seed=40, looks_ahead=True), folder / "slow"
    slow.train(5)
    slow.save(slow_saved)
    tested = Classifier(3, seed=45, trains=False)
    evaluated = len(tested.load(slow_saved))
    fresh = Classifier(4, seed=50, looks_ahead=True)
    fresh.load(slow_saved, partial=True)
    start = fresh.values()
    fresh.train(4)
    moved = [
        name
        for name, value in fresh.values().items()
        if name.startswith(("body", "head", "only")) and "slow" not in name and value != start[name]
    ]
    other = message_of(lambda: Classifier(5, seed=1, prefix="other").load(saved, partial=True))
    report(rank, old=old.values(), before=before, after=after, loaded=loaded, trained=new.values())
    stock = folder / "stock"
    if rank == 0:
        with paddle.static.scope_guard(old._scope):
            paddle.static.save(old._main, str(stock / "net"))
    fleet.barrier_worker()
    unread = [message_of(lambda: new.load(stock, partial=True)), message_of(lambda: new.load(stock / "net"))]
    report(rank, unread=unread)
    report(rank, evaluated=evaluated, refused=refused, again=again, moved=moved, counted=start["lookahead_step_0"])
    report(rank, whole=whole, other=other, kept=kept, late=late.values(), missing=message_of(
        lambda: new.load(folder / "nowhere", partial=True)))  # fmt: skip


def test_what_fits_of_a_saved_state_is_loaded_on_all_ranks_and_the_rest_is_listed(tmp_path: Path) -> None:
    ranks = run_ranks(Path(__file__), 2, folder=tmp_path, args=["parts", str(tmp_path)])
    assert ranks.exit_codes == [0, 0], ranks.report()
    for rank, (old, before, after) in enumerate(zip(*map(ranks.of_all, ("old", "before", "after")), strict=True)):
        loaded = ranks.of_all("loaded")[rank]
        assert len(loaded) == 6  # weight and bias of the body; of its norm those and two statistics
        assert all(name.startswith(("body", "batch_norm")) for name in loaded)
        assert all(after[name] == old[name] != before[name] for name in loaded if "norm" not in name or ".w_" in name)
        assert all(after[name] == before[name] for name in after.keys() - set(loaded))
        late = ranks.of_all("late")[rank]
        assert all(late[name] == old[name] for name in late if "velocity" not in name and "learning_rate" not in name)
    trained = [{name: value for name, value in each.items() if "norm" not in name} for each in ranks.of_all("trained")]
    assert trained[0] == trained[1]
    for unread in ranks.of_all("unread"):
        assert all("read by paddle.static.load(program, prefix), on each rank" in each for each in unread)
    assert ranks.of_all("kept") == [True, True]
    for refused in (*ranks.of_all("refused"), *ranks.of_all("merging")):
        assert "partial=True is for the start of a training, and this one has made steps" in refused
    assert [len(each) for each in ranks.of_all("again")] == [10, 10]
    assert ranks.of_all("evaluated") == [10, 10], "a program without an optimizer has no use for LookAhead's counters"
    assert ranks.of_all("counted") == [[0], [0]]
    assert ranks.of_all("moved") == [[], []]  # at a learning rate of 0
    assert {each.partition(":")[0] for each in (*ranks.of_all("whole"), *ranks.of_all("other"))} == {"CheckpointError"}
    assert all("has no parameter of this program (" in each for each in ranks.of_all("other"))
    assert all("holds no saved state" in each for each in ranks.of_all("missing"))
    line, *_ = [each for each in ranks.ranks[0].output.splitlines() if "of this program's 10 parameters" in each]
    assert "pretrained: 6 of this program's 10 parameters and statistics are loaded" in line
    assert "of another shape or dtype: 'head.b_0' ([3] float32 there, [4] float32 here), 'head.w_0' ([4, 3]" in line
    assert "only in this program: 'only4.b_0', 'only4.w_0'; only there: 'only3.b_0', 'only3.w_0'" in line
    assert "of this program's 10" not in ranks.ranks[1].output


KINDS: dict[str, Callable[[Path], None]] = {"random_numbers": random_numbers, "arrays": arrays, "parts": parts}

if __name__ == "__main__":
    paddle.enable_static()
    fleet.init(is_collective=True)
    KINDS[sys.argv[1]](Path(sys.argv[2]))
