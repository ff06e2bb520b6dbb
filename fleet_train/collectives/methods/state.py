"""The state that the methods of all buckets keep between steps, by parameter: saved on one cluster, loaded on another.

Names are ``<kind>/<parameter>.<what>`` and ``<kind>/step``, without the bucket: another profile may form other buckets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import paddle

from fleet_train.collectives.methods.base import Remembers
from fleet_train.collectives.paddle_compat.modes import dynamic_mode
from fleet_train.plan import Bucket

Array = np.ndarray[Any, Any]
Methods = Sequence[tuple[Bucket, Remembers]]


def read(methods: Methods) -> tuple[dict[str, Array], dict[str, Array]]:
    """(state that is equal on all ranks, this rank's own state)."""
    alike: dict[str, Array] = {}
    own: dict[str, Array] = {}
    for _, method in methods:
        for name, tensor in method.state().items():
            target = own if name.endswith(method.own_state) else alike
            target[f"{method.kind}/{name}"] = np.array(tensor.numpy())
    return alike, own


def write(methods: Methods, arrays: Mapping[str, Array], place: Any) -> list[str]:
    """Restore what ``read`` returned; returns the names that belong to no method here.

    A method that finds nothing of its kind starts as new.
    """
    used: set[str] = set()
    with dynamic_mode():
        for bucket, method in methods:
            wanted = _of_bucket(bucket, method.kind, arrays)
            used.update(f"{method.kind}/{name}" for name in wanted)
            method.load_state({name: paddle.to_tensor(array, place=place) for name, array in wanted.items()})
    return sorted(arrays.keys() - used)


def _of_bucket(bucket: Bucket, kind: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    members = {gradient.name for gradient in bucket.gradients}
    mine = {name.removeprefix(f"{kind}/"): array for name, array in arrays.items() if name.startswith(f"{kind}/")}
    return {name: array for name, array in mine.items() if name == "step" or name.rpartition(".")[0] in members}
