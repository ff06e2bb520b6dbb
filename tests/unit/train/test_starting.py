"""Every machine has its own command line: a flag that is not the same everywhere is found before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fleet_train.errors import ScheduleMismatch
from fleet_train.train import reference
from fleet_train.train.config import TrainConfig

CONFIG = TrainConfig(data_dir="/data", workers=2)


class Ranks:
    """Stands in for the facade on rank 0 of three; the others bring the given flags."""

    def __init__(self, *others: TrainConfig) -> None:
        self._others = others

    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        return [mine, *({name: each.as_json()[name] for name in mine} for each in self._others)]

    def worker_endpoints(self) -> list[str]:
        return [f"10.0.0.{rank}:6170" for rank in range(1, 2 + len(self._others))]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 64}, r"--batch_size is 32 on rank 0 \(10.0.0.1:6170\) and 64 on rank 2 \(10.0.0.3:6170\)"),
        ({"learning_rate": 0.5}, "--lr is None on rank 0 .* and 0.5 on rank 2"),
        ({"resume": True}, "--resume is False on rank 0 .* and True on rank 2"),
    ],
)
def test_flag_that_differs_is_named_with_both_machines(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(reference, "fleet", Ranks(CONFIG, replace(CONFIG, **change)))
    with pytest.raises(ScheduleMismatch, match=said):
        reference.agree_on_flags(CONFIG)


def test_what_belongs_to_a_machine_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(
        CONFIG, data_dir="/mnt/data", output_dir="/tmp/other", workers=8, loader="thread", strategy="x.yaml"
    )
    monkeypatch.setattr(reference, "fleet", Ranks(CONFIG, other))
    reference.agree_on_flags(CONFIG)
