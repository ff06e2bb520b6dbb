"""Which program is meant: copies, programs for evaluation and programs that share parameters, on two ranks, which run
this file, too. What a call writes, exports, compares or makes equal belongs to the job by its parameters.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn, static
from paddle.utils import unique_name
from safetensors.numpy import load_file

from fleet_train import fleet
from fleet_train.errors import FleetTrainError
from fleet_train.profile import Profile
from tests.support.ranks import run_ranks
from tests.support.worker import digest, report

LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 10}
SLOWMO = {**LOCAL, "local_sgd_steps": 2, "outer_optimizer": "slowmo", "outer_momentum": 0.5}
SHARDED = {"sharding": True}
FILE = "persistables.safetensors"
Values = dict[str, np.ndarray]


def network(testing: bool = False) -> tuple[Any, Any]:
    """Under a name guard: the same parameters in every program."""
    x = static.data("x", [None, 8])
    norm, first, second = nn.BatchNorm1D(8), nn.Linear(8, 9), nn.Linear(9, 1)
    if testing:
        norm.eval()
    return x, second(paddle.tanh(first(norm(x))))


class Trained:
    """A converted program, its parameters named after ``name``; ``testing``: one for evaluation that shares them."""

    def __init__(self, name: str, make: Callable[[], Any], **knobs: Any) -> None:
        self.name, self.exe = name, static.Executor()
        self.main, self.startup, self.testing = static.Program(), static.Program(), static.Program()
        with unique_name.guard(name), static.program_guard(self.testing, static.Program()):
            self.test_x, self.test_out = network(testing=True)
        with unique_name.guard(name), static.program_guard(self.main, self.startup):
            self.x, self.out = network()
            self.loss = ((self.out - self.x.sum(1, keepdim=True)) ** 2).mean()
            fleet.distributed_optimizer(make(), Profile(**knobs)).minimize(self.loss)
        self.exe.run(self.startup)

    def train(self, first: int, last: int) -> Values:
        train(self.main, first, last)
        return self.values()

    def values(self) -> Values:
        return values_of(self.testing)


def train(program: Any, first: int, last: int) -> None:
    for step in range(first, last):
        rows = np.random.default_rng([step, fleet.worker_index()]).standard_normal((4, 8)).astype("float32")
        static.Executor().run(program, feed={"x": rows + fleet.worker_index()}, fetch_list=[])


def values_of(program: Any) -> Values:
    return {name: np.array(value) for name, value in program.state_dict("param", static.global_scope()).items()}


def off(found: Values, before: Values) -> dict[str, float]:
    """How far ``found``, what rank 0 has written or holds, is from the mean of what the ranks had, and from its own."""
    mean, own = 0.0, 0.0
    for name, value in before.items():
        expected = fleet.all_reduce(value.astype("float64"), "mean")
        if name in found:
            mean = max(mean, float(np.abs(found[name] - expected).max()))
            own = max(own, float(np.abs(found[name] - value).max()))
    return {"mean": mean, "own": own}


def adam() -> Any:
    return paddle.optimizer.Adam(0.05)


def sgd() -> Any:
    return paddle.optimizer.SGD(0.05)


def saved_by(folder: Path, kind: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """The same state saved by the program, a copy of it, and one for evaluation; another one is converted later."""
    trained = Trained(f"{kind}_a_", adam, **knobs)
    Trained(f"{kind}_b_", sgd)
    found: dict[str, Any] = {}
    programs = {"copy": trained.main.clone(), "program": trained.main, "evaluation": trained.testing}
    for step, (name, program) in enumerate(programs.items()):
        before = trained.train(step, step + 1)
        fleet.save_persistables(trained.exe, folder / kind / name, program)
        fleet.barrier_worker()
        written = load_file(folder / kind / name / FILE)
        found[name] = off(written, before) | {"tensors": len(written)}
        before = trained.train(step + 5, step + 6)
        fleet.synchronize_parameters(program)
        found[f"equal by {name}"] = off(trained.values(), before)
    before = trained.train(9, 10)
    fleet.synchronize_parameters()
    return found | {"equal by all": off(trained.values(), before)}


def goes_on(folder: Path, kind: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """Saved and loaded by copies: as if nothing had happened."""
    trained = Trained(f"{kind}_c_", adam, **knobs)
    trained.train(0, 3)
    fleet.save_persistables(trained.exe, folder / kind / "on", trained.main.clone())
    straight = digest(trained.train(3, 8))
    fleet.load_persistables(trained.exe, folder / kind / "on", trained.main.clone())
    return {"straight": straight, "resumed": digest(trained.train(3, 8))}


def exported(folder: Path) -> dict[str, Any]:
    """The export of the program converted first, in the middle of LocalSGD's period, by the program's own values and by
    those of one for evaluation; then with NaN in the one, and in the other."""
    first, last = Trained("export_a_", sgd, **LOCAL), Trained("export_b_", sgd)
    found: dict[str, Any] = {}
    for name, x, out in (("training", first.x, first.out), ("evaluation", first.test_x, first.test_out)):
        before = first.train(0, 2)
        fleet.save_inference_model(first.exe, folder / name, [x], [out])
        fleet.barrier_worker()
        found[name] = off(first.values(), before) | {"file": sorted(each.name for each in (folder / name).iterdir())}
        program, feeds, (fetched,) = static.load_inference_model(str(folder / name / "model"), first.exe)
        rows = np.ones((2, 8), "float32")
        (got,) = first.exe.run(program, feed={feeds[0]: rows}, fetch_list=[fetched])
        (expected,) = first.exe.run(first.testing, feed={"x": rows}, fetch_list=[first.test_out])
        found[name]["difference"] = float(np.abs(got - expected).max())
    weight = next(name for name in first.values() if "linear_0.w" in name)
    static.global_scope().find_var(weight).get_tensor().set(np.full((8, 9), np.nan, "float32"), fleet.place())
    for name, trained in (("nan", first), ("sane", last)):
        found[name] = message_of(
            lambda trained=trained, name=name: fleet.save_inference_model(
                trained.exe, folder / name, [trained.test_x], [trained.test_out]
            )
        )
    found["first not finite"] = fleet.first_not_finite(first.testing)
    return found


def message_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except FleetTrainError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Pair:
    """Two programs as a GAN has them: that of the generator has the critic's parameters, too, and trains its own."""

    def __init__(self, name: str, **knobs: Any) -> None:
        self.programs, startups = {}, []
        for what in ("critic", "generator"):
            main, startup = static.Program(), static.Program()
            with unique_name.guard(f"{name}_"), static.program_guard(main, startup):
                x = static.data("x", [None, 8])
                made, judged = nn.Linear(8, 8), nn.Linear(8, 1)
                loss = paddle.tanh(judged(paddle.tanh(made(x)))).mean()
                trained = judged if what == "critic" else made
                optimizer = fleet.distributed_optimizer(paddle.optimizer.Momentum(0.1), Profile(**knobs))
                optimizer.minimize(loss if what == "critic" else -loss, parameters=trained.parameters())
            self.programs[what] = main
            startups.append(startup)
        for startup in startups:
            static.Executor().run(startup)

    def train(self, first: int, last: int) -> Values:
        for step in range(first, last):
            for program in self.programs.values():
                train(program, step, step + 1)
        return self.values()

    def values(self) -> Values:
        return values_of(self.programs["generator"])


def shared(folder: Path, kind: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """Each program of a pair saved, and both loaded again in either order."""
    pair, found = Pair(kind, **knobs), dict[str, Any]()
    before = pair.train(0, 3)
    for name, program in pair.programs.items():
        fleet.save_persistables(static.Executor(), folder / kind / name, program)
        fleet.barrier_worker()
        found[name] = off(load_file(folder / kind / name / FILE), before)
    found["straight"] = digest(pair.train(3, 8))
    for order in (list(pair.programs), list(pair.programs)[::-1]):
        for name in order:
            fleet.load_persistables(static.Executor(), folder / kind / name, pair.programs[name])
        found[f"{order[0]} first"] = digest(pair.train(3, 8))
    return found


def two_optimizers(folder: Path) -> dict[str, Any]:
    """One program: its first optimizer is sharded or drifts, its second one does neither."""
    found = {}
    for kind, knobs in (("sharded", SHARDED), ("local", LOCAL)):
        main, startup = static.Program(), static.Program()
        with unique_name.guard(f"two_{kind}_"), static.program_guard(main, startup):
            x = static.data("x", [None, 8])
            one, two = nn.Linear(8, 9), nn.Linear(8, 1)
            losses = (paddle.tanh(one(x)) ** 2).mean(), (two(x) ** 2).mean()
            optimizers = [fleet.distributed_optimizer(adam(), Profile(**each)) for each in (knobs, {})]
            pairs = [
                optimizer.backward(loss, parameters=layer.parameters())
                for optimizer, loss, layer in zip(optimizers, losses, (one, two), strict=True)
            ]
            for optimizer, gradients in zip(optimizers, pairs, strict=True):
                optimizer.apply_gradients(gradients)
        static.Executor().run(startup)
        train(main, 0, 3)
        before = values_of(main)
        fleet.save_persistables(static.Executor(), folder / kind, main)
        fleet.barrier_worker()
        found[kind] = off(load_file(folder / kind / FILE), {n: v for n, v in before.items() if "@rows" not in n})
        train(main, 3, 8)
        found[kind]["straight"] = digest(values_of(main))
        fleet.load_persistables(static.Executor(), folder / kind, main)
        train(main, 3, 8)
        found[kind]["resumed"] = digest(values_of(main))
    return found


def by_paddle(folder: Path) -> dict[str, str]:
    """What Paddle's own export says of values that are one rank's own, and when they are not."""
    trained, alike = Trained("paddle_a_", sgd, **LOCAL), Trained("paddle_b_", sgd, sync_batch_norm=True)
    said: dict[str, str] = {}
    trained.train(0, 1)
    alike.train(0, 1)
    for name, each in (("equal", alike), ("drifting", trained)):
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            path = str(folder / f"{name}{fleet.worker_index()}")
            static.save_inference_model(path, [each.test_x], [each.test_out], each.exe, program=each.testing)
        said[name] = stderr.getvalue()
    return said


def main() -> None:
    folder = Path(sys.argv[1])
    paddle.enable_static()
    fleet.init()
    rank = fleet.worker_index()
    paddle.seed(7 + rank)
    report(rank, by_paddle=by_paddle(folder / "paddle"))
    kinds: dict[str, dict[str, Any]] = {"local": LOCAL, "slowmo": SLOWMO, "sharded": SHARDED, "plain": {}}
    report(rank, saved={kind: saved_by(folder / "saved", kind, knobs) for kind, knobs in kinds.items()})
    report(rank, on={kind: goes_on(folder / "on", kind, knobs) for kind, knobs in kinds.items()})
    report(rank, exported=exported(folder / "exported"))
    report(rank, shared={kind: shared(folder / "shared", kind, knobs) for kind, knobs in kinds.items()})
    report(rank, two=two_optimizers(folder / "two"))


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("shared")
    result = run_ranks(Path(__file__), 2, folder=folder, nodes=2, args=[str(folder / "written")])
    return [result.values[0], result.values[1]]


@pytest.mark.parametrize("kind", ["local", "slowmo", "sharded", "plain"])
@pytest.mark.parametrize("by", ["program", "copy", "evaluation"])
def test_a_copy_and_a_program_for_evaluation_write_and_make_equal_what_the_ranks_agree_on(
    ranks: Ranks, by: str, kind: str
) -> None:
    for rank in ranks:
        saved = rank["saved"][kind]
        for found in (saved[by], saved[f"equal by {by}"]):
            assert found["mean"] < 1e-6
            # A batch norm's statistics drift in every kind, but for slowmo where its period has just ended.
            assert kind == "slowmo" or found["own"] > 1e-3
        assert saved["equal by all"]["mean"] < 1e-6
        assert kind == "slowmo" or saved["copy"]["tensors"] == saved["program"]["tensors"]  # its momentum begins later


@pytest.mark.parametrize("kind", ["local", "slowmo", "sharded", "plain"])
def test_a_training_goes_on_from_what_copies_of_its_program_save_and_load(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        assert rank["on"][kind]["straight"] == rank["on"][kind]["resumed"]


@pytest.mark.parametrize("name", ["training", "evaluation"])
def test_the_program_of_the_targets_is_exported_though_another_one_was_converted_last(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        found = rank["exported"][name]
        assert found["mean"] < 1e-6 < 1e-3 < found["own"]
        assert found["file"] == ["model.json", "model.pdiparams"]
        assert found["difference"] < 1e-6


def test_nan_is_refused_in_what_is_exported_alone(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["exported"]["nan"].startswith("NotFinite: export to ")
        assert "linear_0.w_0' holds NaN" in rank["exported"]["nan"]
        assert rank["exported"]["sane"] == ""
        assert "linear_0.w_0" in rank["exported"]["first not finite"]


@pytest.mark.parametrize("kind", ["local", "slowmo", "sharded", "plain"])
def test_programs_that_share_parameters_are_saved_and_go_on_together(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        found = rank["shared"][kind]
        assert found["critic"]["mean"] < 1e-6
        assert found["generator"]["mean"] < 1e-6
        assert found["straight"] == found["critic first"] == found["generator first"]
    assert ranks[0]["shared"]["local"]["critic"]["own"] > 1e-4


@pytest.mark.parametrize("kind", ["local", "sharded"])
def test_each_optimizer_of_a_program_has_its_own_part_of_a_save(ranks: Ranks, kind: str) -> None:
    for rank in ranks:
        found = rank["two"][kind]
        assert found["mean"] < 1e-6
        assert found["straight"] == found["resumed"]
    assert ranks[0]["two"]["local"]["own"] > 1e-4


def test_paddles_own_export_says_what_is_one_ranks_own(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["by_paddle"]["equal"] == ""
        assert (
            "LocalSGD's ranks differ between averagings: call fleet.synchronize_parameters()"
            in (rank["by_paddle"]["drifting"])
        )


if __name__ == "__main__":
    main()
