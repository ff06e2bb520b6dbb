"""Named ``sitecustomize`` in a folder on PYTHONPATH by a test: corrupts what checks of a selftest communicate.

FLEET_TRAIN_TEST_SABOTAGE: ``one value`` (rank 1 gets one wrong integer from all_reduce, and averages whose last bit is
wrong in one place), ``every average`` (all ranks get the same, 1 % too large), ``early reads`` (collectives end late,
and on own streams send what the buffer held before).
"""

from __future__ import annotations

import os
from typing import Any

KIND = os.environ.get("FLEET_TRAIN_TEST_SABOTAGE", "")
IS_SUBJECT = ".selftest." in os.environ.get("FLEET_TRAIN_STORE", "")
RANK = os.environ.get("PADDLE_TRAINER_ID")


def spoil_collectives() -> None:
    from fleet_train.collectives import engine

    real = engine.Collective._begin

    def begin(collective: Any, how: Any) -> Any:
        task = real(collective, how)
        tensor = collective.tensor
        is_checked = "float32" in str(tensor.dtype) and tensor.shape == [1031]  # and no gradient
        if collective.kind == "all_reduce" and RANK == "1" and is_checked:
            tensor[5:6].scale_(1.0, 1.0)
        return task

    engine.Collective._begin = begin  # type: ignore[method-assign]


def spoil_averages() -> None:
    import paddle

    from fleet_train.collectives.methods.dense import FlatAllreduce
    from fleet_train.collectives.methods.quantised import QuantisedAllreduce
    from fleet_train.selftest import check_profiles

    real = FlatAllreduce.sum

    def total(allreduce: Any, buffers: Any, more: bool = False, divide_by: int = 1) -> Any:
        sums = yield from real(allreduce, buffers, more, divide_by)
        for one in sums:
            if KIND == "every average":
                one.scale_(1.01)
            elif RANK == "1":
                bits = one.numpy().view("int32").copy()
                bits[3] ^= 1
                paddle.assign(paddle.to_tensor(bits.view("float32")), output=one)
        return sums

    FlatAllreduce.sum = total  # type: ignore[method-assign]
    names = ["single_node"]
    if KIND == "every average":
        real_added = QuantisedAllreduce.sum_added
        QuantisedAllreduce.sum_added = lambda one, factor, more=False: real_added(one, 1.01 * factor, more)  # type: ignore[method-assign]
        names += ["amp_bf16", "diloco", "int4_compression", "powersgd"]
    check_profiles.profile_names = lambda: names  # type: ignore[attr-defined]


def read_early() -> None:
    from tests.support.late import install_late_engine

    install_late_engine(int(RANK or 0), stream="", reads_early=True)


if IS_SUBJECT and KIND == "early reads":
    read_early()
elif IS_SUBJECT and KIND:
    if KIND == "one value":
        spoil_collectives()
    spoil_averages()
