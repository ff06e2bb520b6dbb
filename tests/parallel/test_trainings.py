"""A training that the startup program begins again, or that runs in another scope, is that of a new program bit by bit.

The ranks run this file, too. Every profile, and in a long run the case of every knob, is trained by a program of its
own, then by a second one: in a scope whose startup program runs again in the middle of a period, an update and an
averaging, and in two scopes in turn.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train import fleet, role_maker
from fleet_train.collectives.methods import registry
from fleet_train.convert.program_state import position_of
from fleet_train.convert.session import exchange_of
from fleet_train.profile import Profile
from fleet_train.selftest.training import CLASSES, FEATURES, SAMPLES_PER_RANK, Trained, TriedNetwork, batches, share
from tests.parallel import test_knob_effects, test_resume
from tests.parallel.strategies import LOCAL, MLP, SHARDED, adam, momentum, sgd
from tests.parallel.test_resume import Case
from tests.support.ranks import run_ranks
from tests.support.worker import digest, report


def words(features: Any) -> Any:
    """A table whose rows are sent, a batch norm, and a weight that is large enough for every compression."""
    ids = (features[:, :3].abs() * 16).cast("int64").clip(0, 39)
    hidden = F.tanh(nn.Linear(24, 40, bias_attr=False)(nn.Embedding(40, 24)(ids).mean(1)))
    return nn.Linear(40, CLASSES)(nn.BatchNorm1D(40)(hidden))


WORDS = TriedNetwork("words", words)
ROWS = {"sparse_embeddings": True}
OVERLAP = LOCAL | {"local_sgd_is_warm_steps": 0, "local_sgd_steps": 2, "local_sgd_overlap_steps": 1}


# Averagings after 5 and 9 steps, updates of four micro-batches after 4 and 8: the startup program comes between them.
AGAIN_AFTER, STEPS = 7, 10
SOON = {
    "local_sgd_is_warm_steps": 1,
    "local_sgd_steps": 4,
    "local_sgd_overlap_steps": 1,
    "powersgd_start_step": 1,
}


def soon(profile: Profile) -> Profile:
    """What the profile switches on is at work after a step."""
    earlier = {knob: value for knob, value in SOON.items() if knob in profile.settings()}
    return profile.with_settings(**earlier) if earlier else profile


def remembers(profile: Profile) -> bool:
    """Whether its ranks keep anything between steps beside the variables, other than the number of the step."""
    return profile.use_local_sgd or profile.compression not in ("none", "bf16", "fp16")


def cases() -> dict[str, Case]:
    """What remembers something."""
    profiles = {name: case for name, case in every_case().items() if remembers(case[2]) and not name.startswith("more")}
    return profiles | others()


def every_case() -> dict[str, Case]:
    """Every profile of the catalogue, and those of the tests of a resume."""
    return {name: (network, make, soon(profile)) for name, (network, make, profile) in test_resume.cases().items()}


def others() -> dict[str, Case]:
    """What the catalogue has not."""
    return {
        "rows": (WORDS, sgd, Profile(**ROWS)),
        "rows, merge": (WORDS, momentum, Profile(**ROWS, accumulate_steps=2)),
        "rows, sharded, merge": (WORDS, adam, Profile(**ROWS, **SHARDED, accumulate_steps=2)),
        "sharded, int8": (MLP, momentum, Profile(**SHARDED, compression="int8")),
        "int8, merge": (WORDS, momentum, Profile(compression="int8", accumulate_steps=4)),
        "overlap, int8": (WORDS, adam, Profile(**OVERLAP, local_sgd_dtype="int8")),
        "checked": (MLP, adam, Profile(**OVERLAP, divergence_check_steps=2)),
    }


def knobs() -> dict[str, Case]:
    """The case of every knob that two ranks on CPUs carry out with this network."""
    found = {}
    for each in test_knob_effects._ALL:
        settings, elsewhere = each.asked()["with"], each.value == "fp16" or each.knob == "recompute_checkpoints"
        runs = each.how["run"] in ("linear", "embedding", "batch_norm", "layers")
        if each.ranks == 2 and runs and settings and not elsewhere:
            found[each.name] = (WORDS, momentum, Profile(**settings))
    return found


def data(seed: int, steps: int) -> Iterator[tuple[Any, Any]]:
    mine = share(fleet.worker_index())
    for features, labels in batches(steps, SAMPLES_PER_RANK * fleet.worker_num(), seed):
        yield features[mine], labels[mine]


def program(case: Case) -> Trained:
    """A conversion of its own: its exchange remembers nothing."""
    network, make, profile = case
    return Trained(network, lambda inner: fleet.distributed_optimizer(inner, profile), make)


def begin(trained: Trained, scope: Any) -> None:
    """Run the startup program in ``scope``."""
    trained.scope = scope
    paddle.seed(7)
    with paddle.static.scope_guard(scope):
        trained.exe.run(trained.startup)


def go_on(trained: Trained, scope: Any, batch: tuple[Any, Any]) -> None:
    trained.scope = scope
    trained.step(*batch)


def train(trained: Trained, scope: Any, seed: int, steps: int = STEPS) -> str:
    """From the start; a digest of the variables, and of what is remembered beside them."""
    begin(trained, scope)
    for batch in data(seed, steps):
        go_on(trained, scope, batch)
    return remembered(trained, scope)


def remembered(trained: Trained, scope: Any) -> str:
    trained.scope = scope
    with paddle.static.scope_guard(scope):
        fleet.synchronize_parameters(trained.main)  # applies an averaging that is under way
        exchange = exchange_of(trained.main)
        assert exchange is not None
        alike, own = registry.read_state(exchange.memories)
        return digest(trained.state() | alike | own | position_of(exchange))


def train_in_turn(trained: Trained, seed: int) -> str:
    """Beside another training, which begins anew on the way."""
    scope, other = paddle.static.Scope(), paddle.static.Scope()
    begin(trained, other)
    begin(trained, scope)
    for step, (batch, others) in enumerate(zip(data(seed, STEPS), data(seed + 1, STEPS), strict=True)):
        go_on(trained, scope, batch)
        if step == AGAIN_AFTER:
            begin(trained, other)
        go_on(trained, other, others)
    return remembered(trained, scope)


def run(case: Case, seed: int) -> dict[str, str]:
    fresh = train(program(case), paddle.static.Scope(), seed)
    trained, scope = program(case), paddle.static.Scope()
    found = {"fresh": fresh, "other": train(trained, scope, seed + 1, AGAIN_AFTER)}
    return found | {"again": train(trained, scope, seed), "in turn": train_in_turn(trained, seed)}


INT8_OVERLAP = Profile(**OVERLAP, local_sgd_dtype="int8", outer_optimizer="slowmo")
MERGED_ROWS = Profile(**ROWS, accumulate_steps=2)


class Script:
    """As users write them: a network, an optimizer, programs and scopes, and no more."""

    def __init__(self, profile: Profile, names: str = "", optimizer: Callable[[], Any] = momentum) -> None:
        self.main, self.network, self.rest = (paddle.static.Program() for _ in range(3))
        self.exe = paddle.static.Executor()
        with paddle.utils.unique_name.guard(names), paddle.static.program_guard(self.main, self.network):
            features = paddle.static.data("features", [None, FEATURES], "float32")
            labels = paddle.static.data("labels", [None, 1], "int64")
            self.loss = F.cross_entropy(words(features), labels)
            self.network_before = self.network.clone()
            self.inner = optimizer()
            fleet.distributed_optimizer(self.inner, profile).minimize(self.loss, startup_program=self.rest)

    def begin(self, scope: Any, *programs: Any) -> None:
        paddle.seed(7)
        for program in programs or (self.network, self.rest):
            self.exe.run(program, scope=scope)

    def train(self, scope: Any, seed: int, steps: int = STEPS, main: Any = None) -> None:
        for features, labels in data(seed, steps):
            self.exe.run(main or self.main, feed={"features": features, "labels": labels}, fetch_list=[], scope=scope)

    def values(self, scope: Any) -> dict[str, Any]:
        return {name: np.array(value) for name, value in self.main.state_dict("all", scope).items()}

    def digest(self, scope: Any) -> str:
        with paddle.static.scope_guard(scope):
            fleet.synchronize_parameters(self.main)
        return digest(self.values(scope))


def fresh(profile: Profile, seed: int = 0, steps: int = STEPS, names: str = "") -> str:
    script, scope = Script(profile, names), paddle.static.Scope()
    script.begin(scope)
    script.train(scope, seed, steps)
    return script.digest(scope)


def again(profile: Profile, *, programs: Callable[[Script], list[Any]], main: Callable[[Script], Any]) -> bool:
    """Whether a training is the first one again, after these startup programs and with this program."""
    script, scope = Script(profile), paddle.static.Scope()
    script.begin(scope)
    script.train(scope, 1, AGAIN_AFTER)
    script.begin(scope, *programs(script))
    script.train(scope, 0, main=main(script))
    return script.digest(scope) == fresh(profile)


def copies_of_programs() -> dict[str, bool]:
    return {
        str(number): again(
            profile,
            programs=lambda script: [script.network.clone(), script.rest.clone()],
            main=lambda script: script.main.clone(),
        )
        for number, profile in enumerate((INT8_OVERLAP, MERGED_ROWS))
    }


def startup_programs_in_any_order() -> dict[str, bool]:
    return {
        str(number): again(
            profile, programs=lambda script: [script.rest, script.network], main=lambda script: script.main
        )
        for number, profile in enumerate((INT8_OVERLAP, MERGED_ROWS))
    }


def a_copy_from_before_minimize_starts_all_ranks_alike() -> dict[str, bool]:
    script, scope = Script(Profile(compression="int8")), paddle.static.Scope()
    script.begin(scope)
    script.train(scope, 1, AGAIN_AFTER)
    paddle.seed(fleet.worker_index())
    for program in (script.network_before, script.rest):
        script.exe.run(program, scope=scope)
    return {"alike": len(set(fleet.gather(digest(script.values(scope))))) == 1}


def a_part_of_the_startup_programs() -> dict[str, bool]:
    """What is not initialized goes on with its mean over the ranks, which drift; everything else is new."""
    script, scope, other = Script(INT8_OVERLAP), paddle.static.Scope(), paddle.static.Scope()
    script.begin(scope)
    script.train(scope, 1, 5)
    script.begin(scope, script.rest)
    start = script.values(scope)
    script.train(scope, 0)
    new = Script(INT8_OVERLAP)
    new.begin(other)
    for name, value in new.main.state_dict("all", other).items():
        value.set(start[name], fleet.place())
    new.train(other, 0)
    parameters = {each.name for each in script.main.global_block().all_parameters()}
    alike = fleet.gather(digest({name: value for name, value in start.items() if name in parameters}))
    return {"alike": len(set(alike)) == 1, "goes on": script.digest(scope) == new.digest(other)}


def the_learning_rate_alone() -> dict[str, bool]:
    """That it is initialized anew is no reason to forget anything."""
    profile = Profile(compression="int8")
    script, scope, other = Script(profile, optimizer=sgd), paddle.static.Scope(), paddle.static.Scope()
    script.begin(scope)
    script.train(scope, 1, 3)
    script.begin(scope, script.rest)
    start = script.values(scope)
    script.train(scope, 0, 3)
    new = Script(profile, optimizer=sgd)
    new.begin(other)
    new.train(other, 1, 3)
    for name, value in new.main.state_dict("all", other).items():
        value.set(start[name], fleet.place())
    new.train(other, 0, 3)
    return {"int8": script.digest(scope) == new.digest(other)}


def a_part_of_them_within_an_update() -> dict[str, bool]:
    """As in one process, where the sums of gradient merge are variables that another startup program initializes."""
    found = []
    for rows in (True, False):
        script, scope = Script(Profile(sparse_embeddings=rows, accumulate_steps=4)), paddle.static.Scope()
        script.begin(scope)
        script.train(scope, 1, AGAIN_AFTER)
        script.begin(scope, script.network)
        script.train(scope, 0, 6)
        found.append(script.values(scope))
    return {"goes on": all(np.allclose(value, found[1][name], 1e-5, 1e-6) for name, value in found[0].items())}


def one_of_two_programs_in_a_scope() -> dict[str, bool]:
    found = {}
    for number, profile in enumerate((Profile(compression="int8", accumulate_steps=2), INT8_OVERLAP)):
        first, second, scope = Script(profile), Script(profile, "other_"), paddle.static.Scope()
        first.begin(scope)
        second.begin(scope)
        first.train(scope, 1, AGAIN_AFTER)
        second.train(scope, 0, AGAIN_AFTER)
        first.begin(scope)
        first.train(scope, 0, AGAIN_AFTER)
        found[f"first {number}"] = first.digest(scope) == fresh(profile, steps=AGAIN_AFTER)
        found[f"second {number}"] = second.digest(scope) == fresh(profile, steps=AGAIN_AFTER, names="other_")
    return found


def startup_programs_while_an_averaging_is_under_way() -> dict[str, bool]:
    """In its scope, in another one, and that of another program."""
    script, scope, other = Script(INT8_OVERLAP), paddle.static.Scope(), paddle.static.Scope()
    second = Script(INT8_OVERLAP, "other_")
    for _ in range(10):
        script.begin(scope)
        script.train(scope, 0, 2)
        script.begin(other)
        second.begin(other)
    script.train(scope, 0, 2)
    found = {"finite": all(bool(np.isfinite(value).all()) for value in script.values(scope).values())}
    script.begin(scope)
    script.train(scope, 0)
    return found | {"as new": script.digest(scope) == fresh(INT8_OVERLAP)}


def saved_and_loaded_in_two_scopes() -> dict[str, bool]:
    found = {}
    for number, profile in enumerate((INT8_OVERLAP, Profile(compression="int4", accumulate_steps=4))):
        script, scope, other = Script(profile), paddle.static.Scope(), paddle.static.Scope()
        script.begin(scope)
        script.train(scope, 1, AGAIN_AFTER)
        with paddle.static.scope_guard(scope):
            fleet.save_persistables(script.exe, f"state{number}", script.main)
        script.begin(other)
        script.train(other, 2, 3)
        with paddle.static.scope_guard(other):
            fleet.load_persistables(script.exe, f"state{number}", script.main)
        script.train(other, 3)
        script.train(scope, 3)
        loaded = script.digest(other)
        found[f"loaded {number}"] = loaded == script.digest(scope)
        script.begin(scope)
        with paddle.static.scope_guard(scope):
            fleet.load_persistables(script.exe, f"state{number}", script.main)
        script.train(scope, 3)
        found[f"after the startup program {number}"] = loaded == script.digest(scope)
    return found


def one_rank_evaluates_in_a_scope_of_its_own() -> dict[str, bool]:
    """Its network has the same names, and is initialized there, by that rank alone."""
    profile = Profile(compression="int8")
    script, scope = Script(profile), paddle.static.Scope()
    script.begin(scope)
    script.train(scope, 0, AGAIN_AFTER)
    if fleet.worker_index() == 0:
        main, startup = paddle.static.Program(), paddle.static.Program()
        with paddle.utils.unique_name.guard(), paddle.static.program_guard(main, startup):
            features = paddle.static.data("features", [None, FEATURES], "float32")
            logits = words(features)
        with paddle.static.scope_guard(paddle.static.Scope()):
            script.exe.run(startup)
            script.exe.run(main, feed={"features": np.ones((2, FEATURES), "float32")}, fetch_list=[logits])
    script.train(scope, 1, 3)
    new, other = Script(profile), paddle.static.Scope()
    new.begin(other)
    new.train(other, 0, AGAIN_AFTER)
    new.train(other, 1, 3)
    return {"goes on": script.digest(scope) == new.digest(other)}


def scopes_within_a_scope() -> dict[str, bool]:
    """Their runs train the variables of the scope around them, and go on with that training."""
    found = {}
    for number, profile in enumerate((INT8_OVERLAP, Profile(compression="int8"))):
        script, scope = Script(profile), paddle.static.Scope()
        script.begin(scope)
        for seed in (1, 2):
            script.train(scope.new_scope(), seed, 3)
            script.train(scope, seed, 2)
        script.begin(scope.new_scope())
        for _ in range(AGAIN_AFTER):
            inner = scope.new_scope()
            script.train(inner, 0, 1)
        with paddle.static.scope_guard(inner):
            fleet.synchronize_parameters(script.main)
        new, other = Script(profile), paddle.static.Scope()
        new.begin(other)
        for _ in range(AGAIN_AFTER):
            new.train(other, 0, 1)
        found[str(number)] = digest(script.values(scope)) == new.digest(other)
    return found


def freed_scopes() -> dict[str, bool]:
    profiles = {"freed": {}, "freed beside checked steps": {"replay_check_steps": 1}}
    return {name: _is_freed(Profile(compression="int8", **more)) for name, more in profiles.items()}


def _is_freed(profile: Profile) -> bool:
    """Whether what is remembered of trainings goes with their scopes."""
    script, kept = Script(profile), []
    for seed in range(3):
        scope = paddle.static.Scope()
        script.begin(scope)
        script.train(scope, seed, 2)
        with paddle.static.scope_guard(scope):
            exchange = exchange_of(script.main)
            assert exchange is not None
            kept.append(weakref.ref(exchange.methods[0][1]))
    del scope
    script.exe = paddle.static.Executor()  # the old one's cache holds the scopes
    gc.collect()
    return [each() for each in kept] == [None] * 3


SITUATIONS = {
    each.__name__.replace("_", " "): each
    for each in (
        copies_of_programs,
        startup_programs_in_any_order,
        a_copy_from_before_minimize_starts_all_ranks_alike,
        a_part_of_the_startup_programs,
        the_learning_rate_alone,
        a_part_of_them_within_an_update,
        one_of_two_programs_in_a_scope,
        startup_programs_while_an_averaging_is_under_way,
        saved_and_loaded_in_two_scopes,
        one_rank_evaluates_in_a_scope_of_its_own,
        scopes_within_a_scope,
        freed_scopes,
    )
}


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    chosen = {"remembering": cases, "all": every_case, "knobs": knobs, "situations": lambda: SITUATIONS}[sys.argv[1]]()
    act: Callable[[Any, int], Any] = run if sys.argv[1] != "situations" else lambda situation, _: situation()
    report(fleet.worker_index(), cases={name: act(case, seed) for seed, (name, case) in enumerate(chosen.items())})


LONG = [("all", False), ("knobs", False), ("remembering", True)]
Found = list[dict[str, dict[str, str]]]


def on_ranks(what: str, folder: Path, world_size: int = 2, late_streams: bool = False) -> Found:
    nodes = [1] * world_size
    return run_ranks(
        Path(__file__),
        world_size,
        folder=folder,
        nodes=nodes,
        args=[what],
        late_streams=late_streams,
        timeout_seconds=900.0,
    ).of_all("cases")


def different(found: Found) -> list[tuple[int, str, str]]:
    """What is not as in a new program: rank, case, and which training."""
    return [
        (rank, name, way)
        for rank, each in enumerate(found)
        for name, case in each.items()
        for way in ("again", "in turn")
        if case[way] != case["fresh"]
    ]


@pytest.mark.parametrize(
    ("what", "late_streams"),
    [("remembering", False), *(pytest.param(*each, marks=pytest.mark.long) for each in LONG)],
)
def test_a_training_begins_anew_and_in_each_scope_as_in_a_new_program(
    what: str, late_streams: bool, tmp_path: Path
) -> None:
    found = on_ranks(what, tmp_path, late_streams=late_streams)
    assert [name for name, case in found[0].items() if case["other"] == case["fresh"]] == []
    assert different(found) == []


@pytest.mark.parametrize("late_streams", [False, pytest.param(True, marks=pytest.mark.long)])
def test_situations_in_which_a_training_begins_or_goes_on(late_streams: bool, tmp_path: Path) -> None:
    for found in on_ranks("situations", tmp_path, 3, late_streams):
        assert {name: case for name, case in found.items() if not all(case.values())} == {}


if __name__ == "__main__":
    main()
