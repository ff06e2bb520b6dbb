"""Run as several ranks, first with ``straight``, then, in new processes, with ``resumed`` or ``moved``.

``straight`` trains each case with a save on the way. ``resumed`` starts anew from the save and goes on to the same
step. ``moved`` loads on any number of ranks, or one, and reports what it found there.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.collectives.methods import registry
from fleet_train.convert import persistables
from fleet_train.convert.program_state import mean_of_ranks
from fleet_train.convert.session import exchange_of
from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.selftest.training import SAMPLES_PER_RANK, Network, Trained, batches
from tests.parallel import local_sgd
from tests.parallel.local_sgd import BATCH_NORM, LOCAL, MLP, adam
from tests.parallel.strategies import LARGE, SPARSE, sgd, without_decay
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
    "dgc_rampup_begin_step": 3,
    "dgc_rampup_steps": 12,
}
NETWORKS: dict[str, tuple[Network, Any]] = {
    "dgc": (SPARSE, without_decay),
    "powersgd": (LARGE, sgd),
    "sync_batch_norm": (BATCH_NORM, adam),
    "diloco": (MLP, adam),
}
MORE_OF_LOCAL_SGD = (
    "adam",
    "average momentum",
    "diloco",
    "bfloat16 differences",
    "doubling",
    "adaptive",
    "batch norm",
    "overlap, diloco",
    "streaming diloco",
    "fragments, sequential, two dtypes",
)
Case = tuple[Network, Any, Profile]


def shortened(name: str) -> Profile:
    profile = load_profile(name)
    shorter = {knob: value for knob, value in SOON.items() if knob in profile.settings() and profile.heeds(knob)}
    return profile.with_settings(**shorter, environment={})


def cases() -> dict[str, Case]:
    """Every profile of the catalogue, and what it has not."""
    found: dict[str, Case] = {
        name: (*NETWORKS.get(name, (MLP, local_sgd.momentum)), shortened(name)) for name in profile_names()
    }
    for name in MORE_OF_LOCAL_SGD:
        network, make, settings = local_sgd.CASES[name]
        found[f"LocalSGD, {name}"] = (network, make, Profile(**LOCAL | settings))
    found["batch norm"] = (BATCH_NORM, adam, Profile())
    found["LocalSGD, overlap, bfloat16"] = (
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
    keeps = profile.use_local_sgd or profile.accumulate_steps > 1 or profile.compression in ("powersgd", "dgc", "int4")
    return keeps or name in ("multi_node", "batch norm")


def start(case: Case, seed: int) -> Trained:
    network, make, profile = case
    paddle.seed(seed)
    return Trained(network, lambda inner: fleet.distributed_optimizer(inner, profile), make)


def steps(trained: Trained, first: int, last: int, seed: int) -> None:
    share = slice(fleet.worker_index() * SAMPLES_PER_RANK, (fleet.worker_index() + 1) * SAMPLES_PER_RANK)
    for features, labels in batches(STEPS, SAMPLES_PER_RANK * fleet.worker_num(), seed)[first:last]:
        trained.step(features[share], labels[share])


def memories(trained: Trained) -> dict[str, np.ndarray]:
    """What compression remembers on this rank."""
    exchange = exchange_of(trained.main)
    if exchange is None:
        return {}
    alike, own = registry.read_state(exchange.memories)
    return alike | own


def everything(trained: Trained) -> str:
    return digest(trained.state() | memories(trained))


def straight(case: Case, seed: int, folder: Path) -> dict[str, Any]:
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
    run = {"straight": straight, "resumed": resumed, "moved": moved}[what]
    results = {
        name: run(case, seed, folder / name)
        for seed, (name, case) in enumerate(cases().items())
        if what != "moved" or has_more_than_replicas(name, case[2])
    }
    report(fleet.worker_index(), cases=results)


if __name__ == "__main__":
    main()
