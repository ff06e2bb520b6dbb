"""A sharded optimizer beside the same one without sharding, on the same ranks: every optimizer, clip and wrap, and
state that moves between numbers of ranks and to a job without sharding. The ranks run this file, too.
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
from paddle import nn
from paddle.incubate.optimizer import LarsMomentumOptimizer
from paddle.nn import functional as F

from fleet_train import fleet, role_maker
from fleet_train.convert import persistables
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.plan.explain import explain
from fleet_train.plan.shards import memory_of
from fleet_train.profile import Profile
from fleet_train.selftest.training import CLASSES, FEATURES, SAMPLES_PER_RANK, Trained, TriedNetwork, batches, share
from fleet_train.train.numerics import SkipNotFinite, WeightAverage
from tests.parallel.strategies import MLP, relative_difference
from tests.support.ranks import RanksResult, run_ranks
from tests.support.worker import digest, report
from tests.unit.passes.training import how_far_moved

STEPS = 6
BUCKETS = {"fuse_parameter_groups_size": 3, "nccl_comm_num": 2}
KINDS: dict[str, dict[str, Any]] = {"whole": {}, "sharded": {"sharding": True}}
EXACT = 1e-6
"""Largest difference from the largest value of a parameter, where only the order of float32 sums differs."""


def particular(features: Any) -> Any:
    """Parameters with rates, decays and exceptions of their own, one of them too large for a share."""

    def attribute(name: str, **settings: Any) -> Any:
        return paddle.ParamAttr(name=name, **settings)

    decay = paddle.regularizer.L2Decay(0.03)
    first = nn.Linear(FEATURES, 200, attribute("wide", learning_rate=0.5), attribute("wide_bias", need_clip=False))
    second = nn.Linear(200, 30, attribute("deep", regularizer=decay), attribute("deep_bias", learning_rate=2.0))
    return nn.Linear(30, CLASSES)(F.tanh(second(F.tanh(first(features)))))


def even(features: Any) -> Any:
    """Weights of one size, as many as ranks may share without cutting one."""
    for _ in range(4):
        features = F.tanh(nn.Linear(FEATURES, FEATURES, bias_attr=False)(features))
    return features


def held(features: Any) -> Any:
    """The last weights are read by names of their own, by gradients that come when they could have been updated."""
    first, *layers = [nn.Linear(FEATURES, FEATURES, bias_attr=False) for _ in range(10)]
    features = F.tanh(first(features))
    for layer in layers[-3:]:
        features = F.tanh(features @ layer.weight.detach())
    for layer in layers:
        features = F.tanh(layer(features))
    return features


def one_number(features: Any) -> Any:
    return features[:, :CLASSES] * paddle.static.create_parameter([1], "float32", name="factor")


def odd_numbers(features: Any) -> Any:
    """Three parameters that cannot be cut: one owner updates more of them than the other."""
    for number in range(3):
        features = features * paddle.static.create_parameter([1], "float32", name=f"factor_{number}")
    return nn.Linear(FEATURES, CLASSES)(features)


def vectors(features: Any) -> Any:
    factors, shifts = paddle.static.create_parameter([2], "float32"), paddle.static.create_parameter([5], "float32")
    hidden = nn.Linear(FEATURES, CLASSES, bias_attr=False)(features) * factors[0] + factors[1]
    return paddle.concat([hidden[:, :5] + shifts, hidden[:, 5:]], axis=1)


_NETWORKS = (particular, even, held, odd_numbers, vectors)
PARTICULAR, EVEN, HELD, ODD, VECTORS = (TriedNetwork(each.__name__, each) for each in _NETWORKS)


def adamw(**settings: Any) -> Any:
    decayed = {"apply_decay_param_fun": lambda name: name in ("wide", "deep"), "weight_decay": 0.1}
    return paddle.optimizer.AdamW(0.01, epsilon=1e-3, **decayed, **settings)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: paddle.optimizer.SGD(0.1, weight_decay=0.01),
    "Momentum": lambda: paddle.optimizer.Momentum(0.05, 0.9, use_nesterov=True, weight_decay=1e-3),
    "Adam": lambda: paddle.optimizer.Adam(0.01, epsilon=1e-3),
    "Adam, amsgrad": lambda: paddle.optimizer.Adam(0.01, epsilon=1e-3, amsgrad=True),
    "AdamW": adamw,
    "AdamW, global clip": lambda: adamw(grad_clip=nn.ClipGradByGlobalNorm(0.05)),
    "Adamax": lambda: paddle.optimizer.Adamax(0.01, epsilon=1e-3),
    "Adagrad": lambda: paddle.optimizer.Adagrad(0.05, initial_accumulator_value=0.1),
    "Adadelta": lambda: paddle.optimizer.Adadelta(0.5),
    "RMSProp": lambda: paddle.optimizer.RMSProp(0.01, epsilon=1e-3, momentum=0.9, centered=True),
    "Lamb": lambda: paddle.optimizer.Lamb(0.01, epsilon=1e-3),
    "Lars": lambda: LarsMomentumOptimizer(0.5, 0.9),
    "NAdam": lambda: paddle.optimizer.NAdam(0.01, epsilon=1e-3),
    "RAdam": lambda: paddle.optimizer.RAdam(0.01, epsilon=1e-3),
    "Rprop": lambda: paddle.optimizer.Rprop(0.01, learning_rate_range=(1e-4, 0.1)),
    "ASGD": lambda: paddle.optimizer.ASGD(0.05, batch_num=2),
}
UNITED = ("Lamb", "Lars")
"""Whose parameters are never cut."""
NORM_OVER_OWNERS = ("AdamW, global clip",)
"""Whose norm adds the owners' sums: in another order than one rank has."""


def start(make: Callable[[], Any], seed: int, network: TriedNetwork = PARTICULAR, **knobs: Any) -> Trained:
    paddle.seed(seed * 10 + fleet.worker_index())
    return Trained(network, lambda inner: fleet.distributed_optimizer(inner, Profile(**knobs)), make)


def train(trained: Trained, seed: int, first: int = 0, last: int = STEPS) -> None:
    mine = share(fleet.worker_index())
    for features, labels in batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), seed)[first:last]:
        trained.step(features[mine], labels[mine])


def state_bytes(trained: Trained) -> int:
    kept, parameters = trained.state(), trained.parameters()
    return sum(value.nbytes for name, value in kept.items() if name not in parameters and not name.endswith("@rows"))


def compare(name: str, seed: int, network: TriedNetwork = PARTICULAR) -> dict[str, Any]:
    """Both kinds from the same start, through the same steps."""
    whole, sharded = (start(OPTIMIZERS[name], seed, network, **BUCKETS, **knobs) for knobs in KINDS.values())
    begun = whole.parameters()
    assert relative_difference(begun, sharded.parameters()) == 0
    train(whole, seed)
    train(sharded, seed)
    plan = fleet.plan()
    assert plan is not None
    expected, found = whole.parameters(), sharded.parameters()
    return {
        "difference": relative_difference(found, expected),
        "bits": all(np.array_equal(found[each], expected[each]) for each in expected),
        "moved": how_far_moved(expected, begun),
        "state": state_bytes(sharded) / max(state_bytes(whole), 1),
        "cut": "cut by rows: " in explain(plan),
        "planned": memory_of(plan)["state"] / max(plan.state_values * plan.gradient_bytes, 1),
    }


def save(folder: Path) -> dict[str, Any]:
    """The middle of a training without and with sharding, saved; then its end."""
    ends = {}
    for name, knobs in KINDS.items():
        trained = start(OPTIMIZERS["Adam"], 3, **BUCKETS, **knobs)
        train(trained, 3, 0, 3)
        with paddle.static.scope_guard(trained.scope):
            fleet.save_persistables(trained.exe, folder / name, trained.main)
        train(trained, 3, 3, STEPS)
        ends[name] = digest(trained.parameters())
    return ends


def resume(folder: Path) -> dict[str, Any]:
    """Every saved state continued by every kind, and saved again at once."""
    ends = {}
    for saved in KINDS:
        for kind, knobs in KINDS.items():
            trained = start(OPTIMIZERS["Adam"], 4, **BUCKETS, **knobs)
            again = folder / f"{saved} in {kind} on {fleet.worker_num()}"
            with paddle.static.scope_guard(trained.scope):
                fleet.load_persistables(trained.exe, folder / saved, trained.main)
                fleet.save_persistables(trained.exe, again, trained.main)
            train(trained, 3, 3, STEPS)
            ends[f"{saved} in {kind}"] = digest(trained.parameters())
    return ends


def start_of_each(name: str, seed: int) -> Trained:
    """Every parameter is cut, one of them into single numbers, where the optimizer's update allows it."""
    return start(OPTIMIZERS[name], seed, VECTORS, fuse_parameter_groups_size=1, sharding=True)


def save_each(folder: Path) -> dict[str, str]:
    """The middle of a sharded training with every optimizer, saved; then its end."""
    ends = {}
    for name in OPTIMIZERS:
        trained = start_of_each(name, 8)
        train(trained, 8, 0, 3)
        with paddle.static.scope_guard(trained.scope):
            fleet.save_persistables(trained.exe, folder / "each" / name, trained.main)
        train(trained, 8, 3, STEPS)
        ends[name] = digest(trained.parameters())
    return ends


def resume_each(folder: Path) -> dict[str, str]:
    """Each of them loaded, saved again at once, and continued."""
    ends = {}
    for name in OPTIMIZERS:
        trained = start_of_each(name, 9)
        with paddle.static.scope_guard(trained.scope):
            fleet.load_persistables(trained.exe, folder / "each" / name, trained.main)
            again = folder / "each" / f"{name} on {fleet.worker_num()}"
            fleet.save_persistables(trained.exe, again, trained.main)
        train(trained, 8, 3, STEPS)
        ends[name] = digest(trained.parameters())
    return ends


def surrounded(accumulate_steps: int) -> dict[str, Any]:
    """The norm of the gradient, an average of the weights and skipped updates; the fourth batch of rank 0 is NaN."""
    found = {}
    for kind, knobs in KINDS.items():
        average, skip = WeightAverage(0.9), SkipNotFinite()
        paddle.seed(5)

        def wrap(inner: Any, knobs: Any = knobs, average: Any = average, skip: Any = skip) -> Any:
            profile = Profile(**BUCKETS, **knobs, accumulate_steps=accumulate_steps)
            optimizer = fleet.distributed_optimizer(inner, profile)
            optimizer.around_update(average.follow)
            optimizer.around_update(skip.guard)
            return optimizer

        trained = Trained(PARTICULAR, wrap, lambda: adamw(grad_clip=nn.ClipGradByGlobalNorm(0.05)))
        norm, norms, mine = trained.optimizer.gradient_norm(), [], share(fleet.worker_index())
        for step, (features, labels) in enumerate(batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), 5)):
            spoilt = np.full_like(features, np.nan) if step == 3 and fleet.worker_index() == 0 else features
            norms.append(float(trained.run(spoilt[mine], labels[mine], norm)[1].item()))
        with paddle.static.scope_guard(trained.scope):
            found[kind] = {
                "norms": [-1.0 if np.isnan(each) else each for each in norms],
                "skipped": skip.count(),
                "average": {name: value.tolist() for name, value in average.weights().items()},
                "weights": {name: value.tolist() for name, value in trained.parameters().items()},
            }
    return found


def norms() -> dict[str, list[float]]:
    """Of gradients whose buckets are updated one by one, and sent while the norm is summed."""
    found: dict[str, list[float]] = {}
    for kind, knobs in KINDS.items():
        trained = start(OPTIMIZERS["Adam"], 6, fuse_all_reduce_ops=False, **knobs)
        norm, mine = trained.optimizer.gradient_norm(), share(fleet.worker_index())
        found[kind] = [
            float(trained.run(features[mine], labels[mine], norm)[1].item())
            for features, labels in batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), 6)
        ]
    return found


def scheduled() -> float:
    """A rate that changes, in buckets of one gradient: sharded beside whole."""
    found = []
    for knobs in KINDS.values():
        rate = paddle.optimizer.lr.StepDecay(0.1, 2)
        trained = start(lambda rate=rate: paddle.optimizer.SGD(rate), 7, ODD, fuse_all_reduce_ops=False, **knobs)
        for last in range(STEPS):
            train(trained, 7, last, last + 1)
            rate.step()
        found.append(trained.parameters())
    return relative_difference(*found)


def wide() -> dict[str, float]:
    """In float64, and beside parameters in float32, under a wrap: how far sharding is from training without it."""

    def wrap(update: Any, pairs: Any) -> Any:
        return update(pairs)

    wrap.is_for_owners = True  # type: ignore[attr-defined]
    found = {}
    cases: list[tuple[str, tuple[str, str], Callable[[], Any]]] = [
        (
            "float64",
            ("float64", "float64"),
            lambda: paddle.optimizer.Adam(0.1, grad_clip=nn.ClipGradByGlobalNorm(0.05)),
        ),
        ("both", ("float32", "float64"), lambda: paddle.optimizer.SGD(0.1)),
    ]
    for name, dtypes, make in cases:
        ends = []
        paddle.set_default_dtype(dtypes[0])  # that of the learning rate
        for kind, knobs in KINDS.items():
            main, startup = paddle.static.Program(), paddle.static.Program()
            guard = paddle.utils.unique_name.guard(f"{name}_{kind}_")
            with paddle.static.program_guard(main, startup), guard:
                x = paddle.static.data("x", [None, 8], "float32")
                shapes = zip(([8, 5], [5, 3]), dtypes, strict=True)
                first, second = (paddle.static.create_parameter(shape, dtype) for shape, dtype in shapes)
                hidden = paddle.tanh(x.astype(first.dtype) @ first).astype(second.dtype)
                loss = ((hidden @ second) ** 2).mean()
                optimizer = fleet.distributed_optimizer(make(), Profile(**knobs))
                optimizer.around_update(wrap)
                optimizer.minimize(loss)
            exe = paddle.static.Executor()
            paddle.seed(11)
            exe.run(startup)
            for step in range(STEPS):
                rows = np.random.default_rng([step, fleet.worker_index()]).standard_normal((4, 8)).astype("float32")
                exe.run(main, feed={"x": rows}, fetch_list=[])
            kept = main.state_dict("param", paddle.static.global_scope())
            ends.append([np.array(kept[each]) for each in sorted(kept) if not each.endswith("@rows")])
        paddle.set_default_dtype("float32")
        found[name] = max(float(np.abs(one - other).max()) for one, other in zip(*ends, strict=True))
    return found


def save_as_paddle_does(folder: Path) -> None:
    trained = start(OPTIMIZERS["SGD"], 1, **KINDS["sharded"])
    with paddle.static.scope_guard(trained.scope):
        paddle.static.save(trained.main, str(folder / f"rank{fleet.worker_index()}"))


def refusals(folder: Path) -> dict[str, str]:
    """What a sharded optimizer refuses, by name."""

    class Own(paddle.optimizer.SGD):  # type: ignore[misc]
        """Somebody's own optimizer."""

    def with_a_wrap() -> None:
        optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), Profile(sharding=True))
        optimizer.around_update(lambda update, pairs: update(pairs))
        Trained(MLP, lambda _: optimizer, lambda: paddle.optimizer.SGD(0.1))

    attempts: dict[str, Callable[[], object]] = {
        "own optimizer": lambda: start(lambda: Own(0.1), 1, sharding=True),
        "wrap": with_a_wrap,
        "degree": lambda: start(OPTIMIZERS["SGD"], 1, sharding=True, sharding_degree=fleet.worker_num() + 1),
        "static save": lambda: save_as_paddle_does(folder),
        "nothing to own": lambda: start(OPTIMIZERS["SGD"], 1, TriedNetwork("tiny", one_number), sharding=True),
    }
    said = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            said[name] = ""
        except (ConversionError, ProfileError) as error:
            said[name] = str(error)
    return said


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    if what == "optimizers":
        compared = {name: compare(name, seed) for seed, name in enumerate(OPTIMIZERS)}
        report(fleet.worker_index(), optimizers=compared)
        if fleet.worker_num() == 2:  # each program's groups have threads of Gloo's that never sleep for long
            exact = [name for name in OPTIMIZERS if name not in NORM_OVER_OWNERS and not compared[name]["bits"]]
            uncut = {name: compare(name, 5, EVEN)["bits"] for name in exact}
            report(fleet.worker_index(), uncut=uncut, held=compare("SGD", 3, HELD))
    elif what == "save":
        report(fleet.worker_index(), ends=save(folder), each=save_each(folder))
    elif what == "resume":
        report(fleet.worker_index(), ends=resume(folder), each=resume_each(folder))
    else:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            each = {str(merged): surrounded(merged) for merged in (1, 2)}
        report(fleet.worker_index(), surrounded=each, norms=norms(), scheduled=scheduled(), wide=wide())
        report(fleet.worker_index(), refused=refusals(folder))


Ranks = list[dict[str, Any]]


def run(
    factory: pytest.TempPathFactory, what: str, world_size: int, saved: Path = Path(), late_streams: bool = False
) -> RanksResult:
    args, nodes, folder = [what, str(saved)], 0 if world_size == 1 else world_size, factory.mktemp(what)
    return run_ranks(Path(__file__), world_size, folder=folder, nodes=nodes, args=args, late_streams=late_streams)


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> RanksResult:
    return run(tmp_path_factory, "optimizers", 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_owners_train_as_without_sharding_bit_by_bit_if_nothing_is_cut(on_two: RanksResult, name: str) -> None:
    assert all(rank.get(name, True) for rank in on_two.of_all("uncut"))
    check([rank[name] for rank in on_two.of_all("optimizers")], name)


def test_no_parameter_is_updated_before_its_last_reader_by_whatever_name(on_two: RanksResult) -> None:
    for rank in on_two.of_all("held"):
        assert rank["difference"] < EXACT < 1e-2 < rank["moved"]


@pytest.mark.long
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_owners_differ_by_the_order_of_sums_only(
    tmp_path_factory: pytest.TempPathFactory, world_size: int
) -> None:
    found = run(tmp_path_factory, "optimizers", world_size).of_all("optimizers")
    for name in OPTIMIZERS:
        check([rank[name] for rank in found], name)


def check(ranks: Ranks, name: str) -> None:
    for rank in ranks:
        assert rank["difference"] < EXACT < 1e-2 < rank["moved"]
        assert rank["cut"] == (name not in UNITED)
        # Of the largest share; a power of beta for each parameter beside it.
        assert name == "SGD" or rank["state"] < rank["planned"] + 0.01
    if name not in (*UNITED, "SGD"):
        assert sum(rank["state"] for rank in ranks) < 1.02
        assert max(rank["planned"] for rank in ranks) < 1.1 / len(ranks)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RanksResult]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run(tmp_path_factory, "save", 2, folder)


def test_a_save_holds_what_a_job_without_sharding_saves(saved: tuple[Path, RanksResult]) -> None:
    whole, sharded = (persistables.read_folder(saved[0] / name) for name in KINDS)
    assert whole.kinds == sharded.kinds
    assert whole.arrays.keys() == sharded.arrays.keys()
    for name, array in whole.arrays.items():
        assert np.array_equal(array, sharded.arrays[name]), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_saved_state_goes_on_anywhere(
    tmp_path_factory: pytest.TempPathFactory, saved: tuple[Path, RanksResult], world_size: int
) -> None:
    folder, straight = saved
    resumed = run(tmp_path_factory, "resume", world_size, folder)
    ends = resumed.of_all("ends")
    for kind in KINDS:
        assert len({end[f"{each} in {kind}"] for each in KINDS for end in ends}) == 1
        if world_size == 2:
            assert ends[0][f"sharded in {kind}"] == straight.of_all("ends")[0][kind]
        for each in KINDS:
            first, again = (
                persistables.read_folder(folder / name) for name in (each, f"{each} in {kind} on {world_size}")
            )
            assert first.kinds == again.kinds
            assert all(np.array_equal(first.arrays[name], again.arrays[name]) for name in first.kinds)
    for optimizer in OPTIMIZERS:
        assert len({each[optimizer] for each in resumed.of_all("each")}) == 1
        if world_size == 2:
            assert resumed.of_all("each") == straight.of_all("each"), optimizer
        first, again = (
            persistables.read_folder(folder / "each" / name) for name in (optimizer, f"{optimizer} on {world_size}")
        )
        assert first.kinds == again.kinds
        for name in first.kinds:
            assert np.array_equal(first.arrays[name], again.arrays[name]), (optimizer, name)


@pytest.fixture(scope="module", params=[False, True], ids=["on Gloo", "on late streams"])
def around(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> RanksResult:
    folder = tmp_path_factory.mktemp("refused")
    return run(tmp_path_factory, "around", 2, folder, late_streams=request.param)


@pytest.mark.parametrize("merged", ["1", "2"])
def test_norms_averages_and_skipped_updates_are_those_of_all_owners(around: RanksResult, merged: str) -> None:
    for rank in around.of_all("surrounded"):
        whole, sharded = rank[merged]["whole"], rank[merged]["sharded"]
        assert whole["skipped"] == sharded["skipped"] == 1
        assert sharded["norms"] == pytest.approx(whole["norms"], rel=EXACT)
        for kind in ("average", "weights"):
            expected, found = ({n: np.array(v) for n, v in side[kind].items()} for side in (whole, sharded))
            assert expected.keys() == found.keys()
            assert relative_difference(found, expected) < EXACT


def test_a_norm_is_summed_while_new_parameters_are_sent(around: RanksResult) -> None:
    for rank in around.of_all("norms"):
        assert rank["sharded"] == pytest.approx(rank["whole"], rel=EXACT)
        assert min(rank["whole"]) > 0


def test_owners_of_unequal_numbers_of_buckets_follow_one_schedule(around: RanksResult) -> None:
    assert max(around.of_all("scheduled")) < EXACT


@pytest.mark.parametrize("name", ["float64", "both"])
def test_owners_update_float64_under_a_wrap(around: RanksResult, name: str) -> None:
    assert all(rank[name] < EXACT for rank in around.of_all("wide"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own optimizer", "Own is not known to update parameters one by one"),
        ("wrap", "is_for_owners = True"),
        ("degree", "sharding_degree: 3 does not divide the number of ranks, 2"),
        ("static save", "call fleet.save_persistables on all ranks"),
        ("nothing to own", "rank 1 would own nothing of the 1 parameters"),
    ],
)
def test_what_owners_cannot_do_is_refused_with_the_way_out(around: RanksResult, name: str, words: str) -> None:
    assert all(words in rank[name] for rank in around.of_all("refused"))


if __name__ == "__main__":
    main()
