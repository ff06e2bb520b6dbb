"""The facade's promises, on two ranks, which run this file, too."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train import DistributedStrategy, fleet, role_maker
from fleet_train.errors import FleetTrainError
from tests.parallel.faults import RANK, state, train
from tests.support.ranks import run_ranks
from tests.support.worker import digest, report

FLAG = "FLAGS_use_mkldnn"
ORIGINALS = (sys.exit, paddle.static.Executor.run, paddle.base.core.serialize_pir_program)


def replaced() -> list[str]:
    """What in this process is not as it was before ``fleet.init``."""
    now = (sys.exit, paddle.static.Executor.run, paddle.base.core.serialize_pir_program)
    names = [before.__name__ for before, after in zip(ORIGINALS, now, strict=True) if after is not before]
    names += ["excepthook"] if sys.excepthook is not sys.__excepthook__ else []
    return names + [name for name in (FLAG,) if not paddle.get_flags(name)[name]]


def message_of(action: Any) -> str:
    try:
        action()
    except FleetTrainError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def perturb() -> None:
    for value in fleet.main_program.state_dict("all", paddle.static.global_scope()).values():
        value.set(np.array(value) + np.asarray(1 + RANK).astype(np.array(value).dtype), fleet.place())


def save_and_load(exe: Any, folder: Path) -> None:
    before = digest(state())
    fleet.save_persistables(exe, folder)
    perturb()
    perturbed = digest(state())
    fleet.load_persistables(exe, folder)
    report(RANK, saved=before, perturbed=perturbed, loaded=digest(state()))
    fleet.barrier_worker()
    if RANK == 0:
        tensors = folder / "persistables.safetensors"
        content = bytearray(tensors.read_bytes())
        content[-1] ^= 1
        tensors.write_bytes(content)
    report(RANK, altered=message_of(lambda: fleet.load_persistables(exe, folder)))
    report(RANK, missing=message_of(lambda: fleet.load_persistables(exe, folder / "nowhere")))
    report(RANK, unwritable=message_of(lambda: fleet.save_persistables(exe, "/proc/nowhere")))


def other_model(folder: Path) -> None:
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        # Named by hand: static.nn.fc goes on counting in a program of its own, also under unique_name.guard.
        attributes = {f"{kind}_attr": paddle.ParamAttr(name=f"fc_0.{kind[0]}_0") for kind in ("weight", "bias")}
        paddle.static.nn.fc(paddle.static.data("x", [None, 4], "float32"), 9, **attributes)
        exe = paddle.static.Executor(fleet.place())
        exe.run(startup)
        report(RANK, other=message_of(lambda: fleet.load_persistables(exe, folder, main)))


def main() -> None:
    folder = Path(sys.argv[1])
    paddle.enable_static()
    paddle.set_flags({FLAG: True})
    paddle.seed(7 + RANK)
    report(RANK, early=message_of(fleet.worker_num))
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    report(RANK, twice=message_of(fleet.init))
    report(RANK, who=[fleet.worker_index(), fleet.worker_num(), fleet.node_num(), fleet.local_rank()])
    report(RANK, largest=fleet.all_reduce(np.array([[RANK * 7]], "int64"), op="max"))
    report(RANK, gathered=fleet.gather({"rank": RANK}))
    report(RANK, unequal=message_of(lambda: fleet.all_reduce(np.zeros(1 + RANK, "float32"))))
    exe = train(DistributedStrategy.from_profile("multi_node").to_profile())
    save_and_load(exe, folder)
    fleet.save_persistables(exe, folder / "good")
    fleet.save_persistables(exe, folder / f"rank{RANK}")
    report(RANK, folders=sorted(path.name for path in folder.glob("rank*")))
    weight = fleet.main_program.global_block().all_parameters()[0]
    report(RANK, folder=str(folder))
    report(RANK, unknown_input=message_of(lambda: fleet.save_inference_model(exe, folder, ["y"], [weight])))
    report(RANK, unused_input=message_of(lambda: fleet.save_inference_model(exe, folder, ["x"], [weight])))
    other_model(folder / "good")
    report(RANK, replaced_in_job=replaced())
    fleet.shutdown()
    report(RANK, replaced_after=replaced())
    report(RANK, after=message_of(fleet.init))


Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    folder = tmp_path_factory.mktemp("facade")
    result = run_ranks(Path(__file__), 2, folder=folder, nodes=2, args=[str(folder / "saved")])
    return [result.values[0], result.values[1]]


def test_every_rank_knows_its_place(ranks: Ranks) -> None:
    assert [rank["who"] for rank in ranks] == [[0, 2, 2, 0], [1, 2, 2, 0]]


def test_calls_out_of_order_say_so(ranks: Ranks) -> None:
    assert ranks[0]["early"].startswith("ConversionError: fleet.init(role) has not been called yet")
    assert ranks[0]["twice"].startswith("ConversionError: fleet.init was called twice")
    assert ranks[0]["after"].startswith("ConversionError: this process has left its job")


def test_shutdown_puts_back_everything_that_was_replaced(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["replaced_in_job"] == ["exit", "run", "serialize_pir_program", "excepthook", "FLAGS_use_mkldnn"]
        assert rank["replaced_after"] == []


def test_all_values_are_gathered_and_reduced_and_different_arrays_are_refused_on_every_rank(ranks: Ranks) -> None:
    for rank in ranks:
        np.testing.assert_array_equal(rank["largest"], np.array([[7]], "int64"), strict=True)
        assert rank["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert "the ranks passed different arrays" in rank["unequal"]


def test_rank_0_writes_its_own_folder_and_every_rank_loads_what_was_saved(ranks: Ranks) -> None:
    assert ranks[0]["folders"] == ["rank0"]
    assert ranks[0]["perturbed"] != ranks[1]["perturbed"]
    for rank in ranks:
        assert rank["loaded"] == rank["saved"] == ranks[0]["saved"]


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("altered", "persistables.safetensors: tensor 'fleet_train/step' was altered"),
        ("missing", "nowhere holds no saved state: complete.json is missing"),
        ("unwritable", "save to /proc/nowhere"),
        ("other", "'fc_0.b_0' is [8] float32, this program needs [9] float32"),
    ],
)
def test_every_rank_gets_the_error_if_a_file_cannot_be_saved_or_loaded(ranks: Ranks, case: str, told: str) -> None:
    for rank in ranks:
        assert rank[case].startswith("CheckpointError: ")
        assert told in rank[case]
    assert "the program has no input 'y'; it has " in ranks[1]["unknown_input"]
    for rank in ranks:  # an error of Paddle's own
        assert rank["unused_input"].startswith(f"CheckpointError: export to {rank['folder']}: ValueError: ")
        assert "is not involved in the target_vars calculation" in rank["unused_input"]


if __name__ == "__main__":
    main()
