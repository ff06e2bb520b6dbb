"""No silent knob: every knob changes what real ranks send, compute, wait for, fetch, write or print.

Each case gives a knob's value, the settings beside it, and what is seen of it, which is not what the default shows; how
that is seen is in ``knob_effects.py``. Cases of two ranks are started by ``launch`` as well: what it sets by itself
overrules nothing that a script asks for. The numbers are small enough to be worked out by hand; parameters have 2048,
32, 256 and 8 elements (w0 .. w3) of float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from fleet_train.profile import KNOBS
from fleet_train.profile.schema import DESCRIPTIVE, FLAG_KNOBS
from tests.support.processes import ROOT
from tests.support.ranks import run_launched, run_ranks

Seen = list[dict[str, Any]]


class ByRank(list[Any]):
    """What is seen differs from rank to rank: one value each."""


@dataclass(frozen=True)
class Case:
    knob: str
    value: Any
    beside: dict[str, Any]
    sees: dict[str, Any]
    ranks: int
    how: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.knob}: {self.value!r}" + (f" beside {self.beside}" if self.beside else "")

    def asked(self) -> dict[str, Any]:
        """What the ranks get. Old flags are set as variables of the process, and not in the profile."""
        is_flag = self.knob in FLAG_KNOBS
        return {
            "name": self.name,
            "knob": self.knob,
            "sees": list(self.sees),
            "variables": {self.knob: str(self.value)} if is_flag else {},
            "with": self.beside if is_flag else {**self.beside, self.knob: self.value},
            **self.how,
        }


OPTIONS = ("steps", "optimizer", "gradients", "shapes", "overflows", "taken")


def case(
    knob: str,
    value: Any,
    beside: Any = (),
    *,
    run: str = "linear",
    ranks: int = 2,
    holds: float = 0.0,
    holds_runs: bool = False,
    **rest: Any,
) -> Case:
    """``rest``: options of the run, and what is seen on every rank; ``said`` is seen on rank 0 alone."""
    options = {name: rest.pop(name) for name in OPTIONS if name in rest}
    if "said" in rest:
        rest["said"] = ByRank([[rest["said"]], *[[]] * (ranks - 1)])
    how = {"run": run, "holds": holds, "holds_runs": holds_runs, "options": options}
    return Case(knob, value, dict(beside), rest, ranks, how)


def scaled(knob: str, value: Any, scales: list[float], overflows: tuple[int, ...] = (), **rest: Any) -> Case:
    """Of float16's loss scale."""
    beside = {"amp_level": "O1", "amp_dtype": "float16", **rest.pop("beside", {})}
    return case(knob, value, beside, run="scaled", overflows=overflows, scales=scales, **rest)


WHOLE = "all_reduce 9376"
_UNFUSED = ["all_reduce 8192", "all_reduce 128", "all_reduce 1024", "all_reduce 32"]
_ALONE = {"fuse_parameter_groups_size": 1}
_PAIRS = {"fuse_parameter_groups_size": 2}
_IN_PAIRS = ["all_reduce 8320", "all_reduce 1056"]
_IN_SIZES = ["all_reduce 8192", "all_reduce 1184"]
_CHOSEN = (
    "nccl_comm_num: {}, fuse_grad_size_in_MB: {}, last_comm_group_size_MB: {}: chosen for {} (link_gigabits and "
    "link_latency_ms given) and 2 MB of gradients, which makes {}; numbers in the profile override this"
)
_SLOWER = FLAG_KNOBS["FLAGS_sync_nccl_allreduce"].today
_LARGE = {f"v{number}": [512, 256] for number in range(4)}
"""Four parameters of 512 KiB: enough to cut into buckets in more than one way."""
_GROUPED = {"use_hierarchical_allreduce": True}
_TALK = [[f"reduce {pair}", *own, f"broadcast {pair}"] for pair in ("0,1", "2,3") for own in (["all_reduce 0,2"], [])]
_LOCAL = {"use_local_sgd": True, "local_sgd_is_warm_steps": 0, "local_sgd_steps": 2}
_EACH_STEP = _LOCAL | {"local_sgd_steps": 1}
_SLOWMO = _EACH_STEP | {"outer_optimizer": "slowmo"}
_POWERSGD = {"compression": "powersgd"}
_FACTORS = ["all_reduce 480", "all_reduce 192"]
_INT4 = {"compression": "int4"}
_FORGETFUL = _INT4 | {"quantised_error_feedback": False}
_FIRST = 32768.0
_ROWS = ["all_gather 8 int64", "all_gather 60 uint8"]
_OWNED, _SHARDED = [*["broadcast 4736"] * 2, "all_gather 4736"], {"sharding": True}
_SLOW = {"link_gigabits": 0.01, "link_latency_ms": 0.1}

_WEIGHTED = {"average_over": "samples"}
_SHARED = _WEIGHTED | {"batch_shares": "auto"}
_ALL = [
    # Buckets.
    case("fuse_all_reduce_ops", False, sent=[_UNFUSED] * 2),
    case("fuse_grad_size_in_MB", 0.002, sent=[_IN_SIZES] * 2),
    case("fuse_parameter_groups_size", 2, sent=[_IN_PAIRS] * 2),
    case("last_comm_group_size_MB", 0.001, sent=[["all_reduce 8192", "all_reduce 1152", "all_reduce 32"]] * 2),
    # What is chosen for a link.
    case(
        "link_gigabits",
        100.0,
        {"link_latency_ms": 0.1},
        shapes=_LARGE,
        sent=[["all_reduce 2097152"]] * 2,
        said=_CHOSEN.format(1, 2, 2, "100 Gb/s, 0.1 ms", "1 bucket"),
    ),
    case(
        "link_latency_ms",
        1.0,
        {"link_gigabits": 2.0},
        shapes=_LARGE,
        sorted_sent=[["all_reduce 1048576"] * 2] * 2,
        said=_CHOSEN.format(2, 2, 1, "2 Gb/s, 1 ms", "2 buckets"),
    ),
    # Communicators and their threads.
    case("nccl_comm_num", "auto", _ALONE, threads="aaaa", groups="aaaa", beside_computing=True),
    case("nccl_comm_num", 4, _ALONE, threads="abcd", groups="abcd", beside_computing=True),
    case(
        "sync_nccl_allreduce",
        True,
        _PAIRS,
        holds=0.3,
        steps=1,
        launches_wait=[True, True],
        planned=[1, True],
        said=f"sync_nccl_allreduce: true (set by the caller): {_SLOWER}",
    ),
    case("sync_nccl_allreduce", False, _PAIRS, holds=20.0, steps=1, launches_wait=[False, False]),
    case("overlap_next_step", True, holds=1.0, holds_runs=True, steps=2, runs_end_first=True),
    case(
        "FLAGS_sync_nccl_allreduce",
        "1",
        _PAIRS,
        holds=0.3,
        steps=1,
        launches_wait=[True, True],
        said=f"FLAGS_sync_nccl_allreduce=1 is used as sync_nccl_allreduce: true: {_SLOWER}",
    ),
    # Where the collectives of NCCL run: the second half of what own sends is its comparison.
    case("collective_stream", "calc", _PAIRS, run="on_streams", beside_computing=False, sent=[_IN_PAIRS] * 2),
    case(
        "collective_stream",
        "own",
        _PAIRS,
        run="on_streams",
        steps=5,
        sorted_sent=[sorted(_IN_PAIRS * 2)] * 3 + [sorted(_IN_PAIRS)] * 2,
    ),
    case(
        "collective_stream",
        "calc",
        said="collective_stream: calc (set by the caller) has no effect on Gloo, whose calls block the host",
    ),
    # Local groups.
    case("force_hierarchical_allreduce", True, _GROUPED, run="on_streams", ranks=4, members=ByRank(_TALK)),
    case(
        "use_hierarchical_allreduce",
        True,
        {"collective_stream": "calc"},
        run="on_streams",
        ranks=4,
        members=["all_reduce 0,1,2,3"],
    ),
    case("use_hierarchical_allreduce", True, ranks=4, members=ByRank(_TALK), moved=[2.5, 2.5]),
    case("hierarchical_allreduce_inter_nranks", 4, _GROUPED, ranks=4, members=["all_reduce 0,1,2,3"], moved=[2.5, 2.5]),
    # Owners of a sharded optimizer: sums at them, and new parameters from them.
    case("sharding", True, sent=[_OWNED] * 2, moved=[1.5, 1.5]),
    case("sharding_stage", 1, _SHARDED, sent=[_OWNED] * 2, said="sharding_stage: 1 (set by the caller) is mapped"),
    case(
        "sharding_degree",
        2,
        _SHARDED,
        ranks=4,
        sent=[[*["broadcast 4736"] * 2, "all_reduce 4736", "all_gather 4736"]] * 2,
        moved=[2.5, 2.5],
    ),
    # Embeddings: three rows of 16 bytes with their indices, behind the numbers of rows; on a slow link.
    case("sparse_embeddings", True, run="embedding", sent=[_ROWS] * 2, moved=[0.5, 0.5], counted=2 * 68),
    case("sparse_embeddings", "auto", _SLOW, run="embedding", sent=[_ROWS] * 2, moved=[0.5, 0.5]),
    case("sparse_embeddings", False, _SLOW, run="embedding", sent=[["all_reduce 9600"]] * 2, moved=[0.5, 0.5]),
    # Running a job.
    case("fetch_frequency", 3, run="trainer", fetches="x..xx.x..x", asked="x..x.."),
    case("divergence_check_steps", 2, steps=5, compared_at=["step 1", "step 3", "step 5"]),
    case("divergence_check_steps", 0, steps=5, compared_at=[], ends_with_an_operator=False),
    case("divergence_check_steps", 3, _LOCAL, steps=9, compared_at=["the start", "step 4", "step 8"]),
    case("replay_check_steps", 2, steps=5, replayed_at=["step 2", "step 4"]),
    case("nonfinite", "skip", steps=3, gradients="broken", moved=[1.5, 0.0, 1.5]),
    case("nonfinite", "ignore", steps=3, gradients="broken", stays_finite=[True, False, False]),
    case("collective_timeout_seconds", 7, bounds=[7]),
    case("barrier_every_steps", 1, steps=20, barriers=list(range(1, 21))),
    case(
        "barrier_every_steps",
        8,
        {"divergence_check_steps": 12},
        steps=20,
        # The first three, each eighth, and those behind the comparisons at steps 1 and 13.
        barriers=[1, 2, 3, 8, 14, 16],
        sending_steps=list(range(1, 21)),
        counted=20 * 9376,
        said="barrier_every_steps: 8 (set by the caller): between two barriers Gloo waits for a rank for 30 s, which "
        "cannot be set: one that pauses for longer fails the job. NCCL's ranks wait for 300 s "
        "(collective_timeout_seconds). A stop request is known up to 7 steps later.",
    ),
    case(
        "num_threads",
        4,
        serial_flags=[False, False],
        on_the_scripts_thread=False,
        said="num_threads: 4 (set by the caller) is mapped",
    ),
    case("num_threads", 1, serial_flags=[True, True], on_the_scripts_thread=True),
    case(
        "num_iteration_per_drop_scope",
        5,
        run="memory",
        large_value=["needed"],
        said="num_iteration_per_drop_scope: 5 (set by the caller) is mapped",
    ),
    case("environment", {"FLAGS_fraction_of_gpu_memory_to_use": "0.5"}, memory_fraction_flag=0.5),
    case("environment", {"NCCL_DEBUG": "INFO"}, variables=["INFO", "=lo"]),
    # What the launcher sets by itself.
    case("environment", {"NCCL_SOCKET_IFNAME": "eth9"}, variables=[None, "eth9"]),
    case("environment", {"FLAGS_new_executor_serial_run": "0"}, serial_flags=[False, True]),
    # LocalSGD.
    case(
        "use_local_sgd",
        True,
        {"local_sgd_is_warm_steps": 1, "local_sgd_steps": 2},
        steps=5,
        sent=[[WHOLE], [], [WHOLE], [], [WHOLE]],
        counted=3 * 9376,
        first_values=ByRank([[-0.5, -1.5, -3.5, -4.5, -6.5], [-0.5, -2.5, -3.5, -5.5, -6.5]]),
    ),
    case(
        "local_sgd_is_warm_steps",
        3,
        _LOCAL,
        steps=5,
        sending_steps=[1, 2, 3, 5],
        averaging=[3, 2, "constant", 0, "float32", "none"],
    ),
    case(
        "local_sgd_steps", 3, _LOCAL, steps=6, sending_steps=[3, 6], averaging=[0, 3, "constant", 0, "float32", "none"]
    ),
    case(
        "local_sgd_schedule",
        "doubling",
        _LOCAL | {"local_sgd_steps": 4},
        steps=7,
        sending_steps=[1, 3, 7],
        averaging=[0, 4, "doubling", 0, "float32", "none"],
    ),
    case("local_sgd_schedule", "adaptive", _LOCAL, optimizer="falling", steps=12, sending_steps=[2, 4]),
    case(
        "local_sgd_max_steps",
        3,
        _LOCAL | {"local_sgd_schedule": "adaptive"},
        optimizer="falling",
        steps=12,
        sending_steps=[2, 4, 7, 10],
    ),
    case("local_sgd_momentum", "keep", _LOCAL, optimizer="momentum", velocities=ByRank([[1.0, 1.9], [2.0, 3.8]])),
    case(
        "local_sgd_momentum",
        "average",
        _LOCAL,
        optimizer="momentum",
        velocities=ByRank([[1.0, 2.85], [2.0, 2.85]]),
        sent=[[], [WHOLE, WHOLE]],
        counted=2 * 9376,
    ),
    case("local_sgd_momentum", "reset", _LOCAL, optimizer="momentum", velocities=ByRank([[1.0, 0.0], [2.0, 0.0]])),
    case(
        "local_sgd_dtype",
        "bfloat16",
        _LOCAL,
        sent=[[], ["all_reduce 4688 bfloat16"]],
        counted=4688,
        averaging=[0, 2, "constant", 0, "bfloat16", "none"],
    ),
    case(
        "local_sgd_dtype",
        "int8",
        _LOCAL,
        sent=[[], ["all_gather 2580 uint8"]],
        counted=2580,
        averaging=[0, 2, "constant", 0, "int8", "none"],
    ),
    case("local_sgd_dtype", "int4", _LOCAL, sent=[[], ["all_gather 1300 uint8"]], counted=1300),
    case("local_sgd_fragments", 2, _LOCAL, sent=[["all_reduce 9216"], ["all_reduce 160"]], counted=9376),
    case(
        "local_sgd_fragment_pattern",
        "strided",
        _LOCAL | {"local_sgd_fragments": 2},
        sent=[["all_reduce 9216"], ["all_reduce 160"]],
    ),
    case(
        "local_sgd_fragment_pattern",
        "sequential",
        _LOCAL | {"local_sgd_fragments": 2},
        sent=[["all_reduce 8192"], ["all_reduce 1184"]],
    ),
    case(
        "local_sgd_overlap_steps",
        1,
        _LOCAL,
        steps=4,
        first_values=ByRank([[0.0, -1.0, -3.0, -4.0], [-1.0, -3.0, -4.0, -6.0]]),
        averaging=[0, 2, "constant", 1, "float32", "none"],
    ),
    case("outer_optimizer", "slowmo", _EACH_STEP | {"outer_momentum": 0.5}, steps=3, moved=[1.5, 2.25, 2.625]),
    case(
        "outer_optimizer",
        "diloco",
        _EACH_STEP | {"outer_momentum": 0.5},
        steps=3,
        moved=[2.25, 2.625, 2.8125],
        averaging=[0, 1, "constant", 0, "float32", "diloco"],
    ),
    case("outer_lr", 0.5, _SLOWMO, steps=3, moved=[0.75] * 3),
    case("outer_momentum", 0.5, _SLOWMO, steps=3, moved=[1.5, 2.25, 2.625]),
    # Compression.
    case("compression", "bf16", sent=[["all_reduce 4688 bfloat16"]] * 2, moved=[1.5, 1.5], counted=9376),
    case("compression", "fp16", sent=[["all_reduce 4688 float16"]] * 2, moved=[1.5, 1.5]),
    # Five blocks of 512 bytes, or 256, and their scales.
    case("compression", "int8", sent=[["all_gather 2580 uint8"]] * 2, moved=[1.5, 1.5], counted=2 * 2580),
    case("compression", "int4", sent=[["all_gather 1300 uint8"]] * 2, counted=2 * 1300),
    case("quantised_block_size", 64, {"compression": "int8"}, sent=[["all_gather 2516 uint8"]] * 2),
    # Two of seven levels of 3; then what is owed, and what two ranks draw.
    case("quantised_error_feedback", False, _INT4, gradients="of rank two", steps=12, small_steps=[0.857]),
    case("quantised_error_feedback", True, _INT4, gradients="of rank two", steps=12, small_steps=[0.857, 1.286]),
    case(
        "quantised_rounding",
        "stochastic",
        _FORGETFUL,
        gradients="of rank two",
        steps=40,
        small_steps=[0.857, 1.071, 1.286],
    ),
    case("compression", "powersgd", sent=[_FACTORS] * 2, counted=2 * 672),
    case("powersgd_rank", 2, _POWERSGD, sent=[["all_reduce 800", "all_reduce 384"]] * 2),
    case("powersgd_start_step", 1, _POWERSGD, sent=[[WHOLE], _FACTORS]),
    case("powersgd_min_compression", 10.0, _POWERSGD, sent=[["all_reduce 1440", "all_reduce 128"]] * 2),
    case(
        "powersgd_warm_start",
        False,
        _POWERSGD | {"powersgd_error_feedback": False},
        gradients="of rank two",
        steps=8,
        finds_the_largest=False,
    ),
    case("powersgd_error_feedback", False, _POWERSGD, gradients="of rank two", steps=30, sends_both=False),
    # Passes over the program.
    case(
        "accumulate_steps",
        2,
        steps=4,
        sending_steps=[2, 4],
        moved=[0.0, 1.5, 0.0, 1.5],
        counted=2 * 9376,
        planned=[2, False],
    ),
    case("amp_level", "O1", run="layers", fetched_dtypes=["uint16", "float32"]),
    case("amp_level", "O2", run="layers", fetched_dtypes=["uint16", "uint16"]),
    case("amp_dtype", "bfloat16", {"amp_level": "O1"}, run="lowered", product_dtype="bfloat16"),
    case("amp_dtype", "float16", {"amp_level": "O1"}, run="lowered", product_dtype="float16"),
    case("amp_keep_batch_norm_fp32", True, {"amp_level": "O2"}, run="lowered", batch_norm_dtype="float32"),
    case("amp_keep_batch_norm_fp32", False, {"amp_level": "O2"}, run="lowered", batch_norm_dtype="bfloat16"),
    scaled("amp_init_loss_scaling", 1024.0, [1024.0] * 6),
    scaled("amp_dynamic_loss_scaling", False, [_FIRST] * 6, (2, 3)),
    scaled("amp_incr_every_n_steps", 2, [_FIRST, 65536.0, 65536.0, 131072.0, 131072.0, 262144.0]),
    scaled("amp_decr_every_n_nan_or_inf", 1, [_FIRST, *[26214.4] * 5], (2,), moved=[1.0, 0.0, 1.0, 1.0, 1.0, 1.0]),
    scaled(
        "sharding",
        True,
        [_FIRST, *[26214.4] * 5],
        (2,),
        moved=[1.0, 0.0, 1.0, 1.0, 1.0, 1.0],
        beside={"amp_decr_every_n_nan_or_inf": 1},
    ),
    scaled(
        "amp_incr_ratio",
        4.0,
        [_FIRST, *[131072.0] * 2, *[524288.0] * 2, 2097152.0],
        beside={"amp_incr_every_n_steps": 2},
    ),
    scaled("amp_decr_ratio", 0.5, [_FIRST, *[16384.0] * 5], (2,), beside={"amp_decr_every_n_nan_or_inf": 1}),
    case(
        "sync_batch_norm",
        True,
        run="batch_norm",
        running_mean=[0.1],
        sorted_sent=[["all_gather 32", "all_gather 36", "all_reduce 52"]],
    ),
    case("sync_batch_norm", False, run="batch_norm", running_mean=ByRank([[0.0], [0.2]])),
    case("average_over", "samples", run="unequal", moved=[2.0]),
    case("average_over", "samples", _ALONE, run="unequal", taken="sum", moved=[8.0]),
    case("average_over", "ranks", run="unequal", moved=[3.0]),
    case("average_over", "nothing", run="unequal", moved=[6.0]),
    case("batch_shares", [3.0, 1.0], _WEIGHTED, run="shares", size=ByRank([6, 2])),
    case("batch_shares", "auto", _WEIGHTED, run="shares", steps=12, size=ByRank([6, 2]), **{"first change": 10}),
    case("max_share", [0.625, 1.0], _SHARED, run="shares", steps=12, size=ByRank([5, 3])),
    case("max_share", 0.5, _SHARED, run="shares", steps=12, size=4),
    case("batch_shares_steps", 3, _SHARED, run="shares", steps=4, **{"first change": 3}),
    case("recompute_segments", 2, run="layers", tanhs=6),
    case("recompute_every_blocks", 2, run="layers", tanhs=5),
    case("recompute_checkpoints", ["layer_3"], run="layers", tanhs=6),
]
CASES = {one.name: one for one in _ALL}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Seen]:
    """What each rank has seen of a case: all cases of two ranks are in one job, all of four in another; the former are
    also started by the launcher."""

    @cache
    def started(ranks: int, is_launched: bool) -> list[dict[str, Any]]:
        asked = [one.asked() for one in CASES.values() if one.ranks == ranks]
        script, folder = ROOT / "tests/parallel/knob_effects.py", tmp_path_factory.mktemp(f"ranks{ranks}")
        how: dict[str, Any] = {"folder": folder, "args": [json.dumps(asked)], "timeout_seconds": 200}
        if is_launched:
            return run_launched(script, ranks, **how).of_all("seen")
        return run_ranks(script, ranks, nodes=2, **how).of_all("seen")

    return lambda name, is_launched: [rank[name] for rank in started(CASES[name].ranks, is_launched)]


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.ranks == 2])
def test_a_knob_does_what_it_says_under_the_launcher(seen: Callable[[str, bool], Seen], name: str) -> None:
    compare(CASES[name], seen(name, True))


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_knob_does_what_it_says_without_a_launcher(seen: Callable[[str, bool], Seen], name: str) -> None:
    compare(CASES[name], seen(name, False))


def compare(case: Case, seen: Seen) -> None:
    for look, expected in case.sees.items():
        ranks = [rank[look] for rank in seen]
        assert ranks == (list(expected) if isinstance(expected, ByRank) else [expected] * case.ranks), look


def test_every_knob_has_a_case_and_every_choice_and_what_is_mapped_is_said() -> None:
    assert len(CASES) == len(_ALL), "two cases have one name: let their settings tell them apart"
    # Texts, which `profiles` prints, and old flags, which are knobs by another name, have none.
    assert {one.knob for one in _ALL} == KNOBS.keys() - {*DESCRIPTIVE, *FLAG_KNOBS} | {"FLAGS_sync_nccl_allreduce"}
    tried = {(one.knob, one.value) for one in _ALL if KNOBS[one.knob].choices}
    assert tried >= {(n, choice) for n, knob in KNOBS.items() for choice in knob.choices if choice != knob.default}
    for one in _ALL:
        assert KNOBS[one.knob].fate != "mapped" or "said" in one.sees or one.value == KNOBS[one.knob].default, one.name
