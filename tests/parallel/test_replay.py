"""Checked steps, whose passes each rank computes twice (``replay_check_steps``): healthy ranks, and one wrong bit.

The networks and the operator that flips a bit of a gradient, in some of its calls on rank 1, are in ``replays.py``. A
checked step calls it twice, one that is not checked once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleet_train.errors import ComputeFault, ConversionError
from tests.support.processes import ROOT
from tests.support.ranks import RanksResult, run_ranks

SCRIPT = ROOT / "tests/parallel/replays.py"
FAULT, NOT_ALIKE = ComputeFault.exit_code, ConversionError.exit_code


def run(folder: Path, case: str, *args: str, **options: Any) -> RanksResult:
    return run_ranks(SCRIPT, 2, folder=folder, nodes=2, args=[case, *args], check=False, **options)


HEALTHY = [
    ("dropout", ""),
    ("norms", "sync_batch_norm=true accumulate_steps=2"),
    ("table", "sparse_embeddings=true optimizer=sgd"),
    *(
        pytest.param(network, settings, marks=pytest.mark.long)
        for network, settings in (
            ("norms", "amp_level=O1 amp_dtype=bfloat16"),
            ("counting", "num_threads=4"),
            ("dropout", "accumulate_steps=3 loss=contrast"),
            ("dropout", "loss=weighted fuse_grad_size_in_MB=0.001"),
            ("norms", "loss=weighted sync_batch_norm=true accumulate_steps=2"),
            ("attention", "recompute_every_blocks=2"),
            ("norms", "sharding=true fuse_grad_size_in_MB=0.001"),
            ("table", "sparse_embeddings=true sharding=true accumulate_steps=2"),
            ("dropout", "compression=powersgd powersgd_start_step=1"),
            ("dropout", "compression=int8"),
            ("norms", "use_local_sgd=true local_sgd_is_warm_steps=1 local_sgd_steps=2"),
            ("norms", "nonfinite=skip"),
        )
    ),
]


@pytest.mark.parametrize(("network", "settings"), HEALTHY)
def test_healthy_ranks_train_the_same_bits(network: str, settings: str, tmp_path: Path) -> None:
    assert_healthy(run(tmp_path, "healthy", network, *settings.split()))


def assert_healthy(result: RanksResult) -> None:
    assert result.exit_codes == [0, 0], result.report()
    assert result.of_all("different") == [[], []]
    assert min(result.of_all("compared")) > 8
    assert min(result.of_all("checked")) >= 12  # six steps for each of two seeds


@pytest.mark.parametrize(
    ("network", "calls", "settings", "step"),
    [
        ("plain", "5", "", 3),
        ("plain", "6", "use_local_sgd=true local_sgd_is_warm_steps=1 local_sgd_steps=4", 3),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("plain", "8n", "", 4),  # NaN, which is not the batch's
                ("dropout", "8", "accumulate_steps=2", 2),
                ("norms", "6", "sync_batch_norm=true loss=contrast", 3),
                ("attention", "2", "recompute_every_blocks=2 average_over=ranks", 1),
                ("dropout", "6", "sharding=true amp_level=O1 amp_dtype=bfloat16", 3),
                ("plain", "5", "sharding=true fuse_grad_size_in_MB=0.001", 3),
                ("table", "5", "sparse_embeddings=true optimizer=sgd", 3),
                ("dropout", "6", "compression=powersgd powersgd_start_step=1", 3),
                ("dropout", "6", "nonfinite=skip fuse_grad_size_in_MB=0.001", 3),
            )
        ),
    ],
)
def test_one_wrong_bit_ends_all_ranks_before_they_update(
    network: str, calls: str, settings: str, step: int, tmp_path: Path
) -> None:
    result = run(tmp_path, "wrong", network, "1", calls, *settings.split())
    assert result.exit_codes == [FAULT, FAULT], result.report()
    told = [[line for line in rank.output.splitlines() if "ComputeFault: " in line] for rank in result.ranks]
    assert told[0] == told[1], result.report()
    assert len(told[0]) == 1
    assert "the gradient of 'linear_1.w_0' of rank 1 (127.0.0.3:" in told[0][0]
    assert f"in step {step} differs between two passes over the same samples" in told[0][0]
    assert "and 3 further ones are alike: a processor or memory of that machine is at fault" in told[0][0]
    kept = ("batch_norm", "gradient_merge")  # the forward pass moves statistics, and micro-batches are added up
    changed = [name for names in result.of_all("changed") for name in names if not any(word in name for word in kept)]
    assert changed == []


@pytest.mark.long
def test_only_the_steps_that_are_checked_are_computed_twice(tmp_path: Path) -> None:
    """With 3, the operator's calls are steps 1 and 2, both passes of step 3, and step 4."""
    assert run(tmp_path / "unchecked", "wrong", "plain", "3", "2,5").exit_codes == [0, 0]
    assert run(tmp_path / "checked", "wrong", "plain", "3", "4").exit_codes == [FAULT, FAULT]


@pytest.mark.long
def test_operators_that_are_never_the_same_are_no_fault_of_a_machine(tmp_path: Path) -> None:
    result = run(tmp_path, "wrong", "plain", "2", "all")
    assert result.exit_codes == [NOT_ALIKE, NOT_ALIKE], result.report()
    for rank in result.ranks:
        assert (
            "in step 2 differs between two passes over the same samples, and 3 further ones differ as well"
            in rank.output
        )
        assert "ComputeFault: " not in rank.output


@pytest.mark.long
def test_on_streams_the_ranks_train_the_same_bits_and_end_alike(tmp_path: Path) -> None:
    assert_healthy(run(tmp_path / "healthy", "healthy", "norms", late_streams=True))
    assert run(tmp_path / "wrong", "wrong", "norms", "2", "3", late_streams=True).exit_codes == [FAULT, FAULT]


@pytest.mark.long
def test_random_operators_in_any_order_are_refused(tmp_path: Path) -> None:
    result = run(tmp_path, "wrong", "dropout", "100", "", "num_threads=4")
    assert result.exit_codes == [NOT_ALIKE, NOT_ALIKE], result.report()
    assert "set num_threads: 1, or replay_check_steps: 0" in result.report()
