"""Every profile of the catalogue: saved on two ranks, resumed by new processes on two, three and one.

Of those that only cut or send otherwise than another, that other one.

The ranks run this file, too: ``straight`` trains each case with a save on the way, ``resumed`` starts anew from the
save and goes on to the same step, ``moved`` loads on any number of ranks and reports what it found there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import fleet, role_maker
from fleet_train.collectives.methods import registry
from fleet_train.convert import persistables
from fleet_train.convert.program_state import mean_of_ranks
from fleet_train.convert.session import exchange_of
from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.selftest.training import SAMPLES_PER_RANK, Trained, TriedNetwork, batches, share
from tests.parallel import strategies
from tests.parallel.strategies import BATCH_NORM, LARGE, LOCAL, MLP, adam, momentum, sgd
from tests.support.ranks import run_ranks
from tests.support.worker import digest, report

# Warm-up 3, averagings after 7 and 11: two local steps into a period, one micro-batch into an update of 4.
SAVED_AFTER, STEPS = 9, 14

# So that everything that a profile switches on is at work before the save.
SOON = {
    "local_sgd_is_warm_steps": 3,
    "local_sgd_steps": 4,
    "local_sgd_fragments": 2,
    "local_sgd_overlap_steps": 1,
    "powersgd_start_step": 3,
}
NETWORKS: dict[str, tuple[TriedNetwork, Any]] = {
    "powersgd": (LARGE, sgd),
    "sync_batch_norm": (BATCH_NORM, adam),
    "diloco": (MLP, adam),
}
# Profiles that only cut or send otherwise what another one sends.
ALIKE = {
    *("single_node", "one_communicator", "two_communicators", "infiniband", "tcp_only", "ethernet_10g"),
}
MORE = (
    "local sgd, average momentum",
    "local sgd, doubling",
    "local sgd, batch norm",
    "diloco, overlap",
    "slowmo, fragments, sequential, two dtypes",
)
Case = tuple[TriedNetwork, Any, Profile]


def shortened(name: str) -> Profile:
    profile = load_profile(name)
    shorter = {knob: value for knob, value in SOON.items() if knob in profile.settings() and profile.heeds(knob)}
    return profile.with_settings(**shorter, environment={})


def cases() -> dict[str, Case]:
    """Every profile of the catalogue, and what it has not."""
    names = [name for name in profile_names() if name not in ALIKE]
    found: dict[str, Case] = {name: (*NETWORKS.get(name, (MLP, momentum)), shortened(name)) for name in names}
    for name in MORE:
        case = strategies.CASES[name]
        found[f"more, {name}"] = (case.network, case.make, Profile(**case.settings))
    found["batch norm"] = (BATCH_NORM, adam, Profile())
    found["more, overlap, bfloat16"] = (
        BATCH_NORM,
        adam,
        Profile(**LOCAL | {"local_sgd_overlap_steps": 3, "local_sgd_dtype": "bfloat16"}),
    )
    found["merge, LocalSGD"] = (MLP, adam, Profile(**LOCAL | {"accumulate_steps": 2}))
    found["merge, PowerSGD"] = (LARGE, sgd, Profile(accumulate_steps=2, compression="powersgd"))
    found["amp, merge"] = (MLP, adam, Profile(amp_level="O1", amp_dtype="bfloat16", accumulate_steps=2))
    return found


def has_more_than_replicas(name: str, profile: Profile) -> bool:
    """Whether ranks have something of their own between steps; one profile without is enough to see what that is."""
    keeps = profile.use_local_sgd or profile.accumulate_steps > 1 or profile.compression in ("powersgd", "int4")
    return keeps or name in ("multi_node", "batch norm")


def start(case: Case, seed: int) -> Trained:
    network, make, profile = case
    paddle.seed(seed)
    return Trained(network, lambda inner: fleet.distributed_optimizer(inner, profile), make)


def steps(trained: Trained, first: int, last: int, seed: int) -> None:
    mine = share(fleet.worker_index())
    for features, labels in batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), seed)[first:last]:
        trained.step(features[mine], labels[mine])


def memories(trained: Trained) -> dict[str, np.ndarray]:
    """What compression remembers on this rank."""
    with paddle.static.scope_guard(trained.scope):
        exchange = exchange_of(trained.main)
    if exchange is None:
        return {}
    alike, own = registry.read_state(exchange.memories)
    return alike | own


def everything(trained: Trained) -> str:
    return digest(trained.state() | memories(trained))


def train_straight(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    trained = start(case, seed)
    steps(trained, 0, SAVED_AFTER, seed)
    with paddle.static.scope_guard(trained.scope):
        fleet.save_persistables(trained.exe, folder, trained.main)
    at_save = digest({name: value for name, value in trained.state().items() if "@gradient_merge" not in name})
    own = sorted(memories(trained))
    steps(trained, SAVED_AFTER, STEPS, seed)
    return {"at_save": at_save, "own": own, "end": everything(trained), "parameters": digest(trained.parameters())}


def load(case: Case, seed: int, folder: Path) -> Trained:
    trained = start(case, seed + 1000)
    with paddle.static.scope_guard(trained.scope):
        fleet.load_persistables(trained.exe, folder, trained.main)
    rate = trained.optimizer._learning_rate
    if isinstance(rate, paddle.optimizer.lr.LRScheduler):
        rate.step(SAVED_AFTER)
    return trained


def resumed(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    trained = load(case, seed, folder)
    steps(trained, SAVED_AFTER, STEPS, seed)
    return {"end": everything(trained)}


def moved(case: Case, seed: int, folder: Path) -> dict[str, Any]:
    """On another number of ranks: parameters as saved, and the means of what each rank has of its own."""
    trained, saved = load(case, seed, folder), persistables.read_folder(folder)
    kept = trained.parameters()
    result = {
        "parameters": digest(kept) == digest({name: saved.arrays[name] for name in kept}),
        "own": [name.removeprefix("fleet_train/") for name in saved.ranks[0]] if saved.ranks else [],
    }
    found = memories(trained) | trained.state()
    expected = {n.removeprefix("fleet_train/"): v for n, v in mean_of_ranks(saved.ranks).items()} if saved.ranks else {}
    worst = 0.0
    for name, value in expected.items():
        if name in found:
            mean = fleet.all_reduce(found[name]) / fleet.worker_num()
            worst = max(worst, float(np.abs(mean - value).max() / max(np.abs(value).max(), 1e-12)))
    result |= {"worst": worst, "taken": sorted(expected.keys() & found.keys())}
    steps(trained, SAVED_AFTER, STEPS, seed)
    return result | {"finite": all(bool(np.isfinite(value).all()) for value in trained.parameters().values())}


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    run = {"straight": train_straight, "resumed": resumed, "moved": moved}[what]
    results = {
        name: run(case, seed, folder / name)
        for seed, (name, case) in enumerate(cases().items())
        if what != "moved" or has_more_than_replicas(name, case[2])
    }
    report(fleet.worker_index(), cases=results)


Cases = list[dict[str, dict[str, Any]]]


def run(what: str, saved: Path, world_size: int, late_streams: bool = False) -> Cases:
    folder = saved.parent / f"{what}{world_size}{late_streams}"
    nodes = 0 if world_size == 1 else world_size
    args = [what, str(saved)]
    result = run_ranks(Path(__file__), world_size, folder=folder, nodes=nodes, args=args, late_streams=late_streams)
    return result.of_all("cases")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resume") / "saved"


@pytest.fixture(scope="module")
def straight(saved: Path) -> Cases:
    return run("straight", saved, 2)


def test_rank_0_logs_for_all_what_a_single_card_needs(straight: Cases) -> None:
    for name, first in straight[0].items():
        assert first["at_save"] == straight[1][name]["at_save"], name


def test_resumed_run_is_the_one_that_went_on_bit_by_bit(straight: Cases, saved: Path) -> None:
    resumed = run("resumed", saved, 2)
    different = [
        (rank, n) for rank in (0, 1) for n in straight[rank] if resumed[rank][n]["end"] != straight[rank][n]["end"]
    ]
    assert different == []


@pytest.mark.long
def test_run_on_late_streams_with_a_save_on_the_way_has_the_same_bits(straight: Cases, tmp_path: Path) -> None:
    assert run("straight", tmp_path / "saved", 2, late_streams=True) == straight


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.usefixtures("straight")
def test_another_number_of_ranks_takes_everything_over(saved: Path, world_size: int) -> None:
    ranks = run("moved", saved, world_size)
    for rank in ranks:
        for name, case in rank.items():
            assert case["parameters"], f"{name}: other parameters than saved"
            assert case["finite"], name
            assert case["worst"] < 1e-6, f"{name}: the mean over ranks of what each has of its own has changed"
    with_own = {
        name: sorted({own.rpartition(".")[2].rpartition("@")[2] for own in case["own"]})
        for name, case in ranks[0].items()
    }
    assert {name: ends for name, ends in with_own.items() if ends} == {
        "amp, merge": ["gradient_merge"],
        "gradient_merge": ["gradient_merge"],
        "int4_compression": ["error"],
        "merge, LocalSGD": ["gradient_merge"],
        "merge, PowerSGD": ["error", "gradient_merge"],
        "powersgd": ["error"],
        "streaming_diloco": ["error"],
    }
    if world_size > 1:
        for name in with_own:
            assert ranks[0][name]["taken"] == sorted(ranks[0][name]["own"]), name


if __name__ == "__main__":
    main()
