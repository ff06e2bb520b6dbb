"""Options that have no effect without another one are refused, not ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import click
from click.core import ParameterSource

from fleet_train.errors import FleetTrainError

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Companion:
    """``has_effect``: whether the option has an effect with these values. ``rule`` and ``fix`` end two sentences:
    "--option <rule>" and "<fix>, or leave --option out"."""

    has_effect: Callable[[Options], bool]
    rule: str
    fix: str


_FOLDER = "add --data_dir <folder>"

TRAIN = {
    "data": Companion(
        lambda given: given["data_dir"] is None, "names data that --data_dir replaces", "leave --data_dir out"
    ),
    "image_size": Companion(lambda given: given["data_dir"] is not None, "is for the images of --data_dir", _FOLDER),
    "max_corrupt": Companion(lambda given: given["data_dir"] is not None, "is for the files of --data_dir", _FOLDER),
    "workers": Companion(
        lambda given: given["data_dir"] is not None and given["loader"] != "thread",
        "counts processes that decode the images of --data_dir, which --loader thread does not start",
        "give --data_dir <folder> and another --loader",
    ),
    "uneven": Companion(
        lambda given: given["shard_by"] == "folder",
        "applies to machines that read their own folders",
        "add --shard_by folder",
    ),
    "last_batch": Companion(
        lambda given: given["shard_by"] == "sample",
        "applies to samples that all ranks share; with --shard_by folder, --uneven decides",
        "give --uneven instead",
    ),
    "lr_decay": Companion(
        lambda given: given["lr_schedule"] == "step", "belongs to the step schedule", "add --lr_schedule step"
    ),
    "lr_power": Companion(
        lambda given: given["lr_schedule"] == "polynomial",
        "belongs to the polynomial schedule",
        "add --lr_schedule polynomial",
    ),
    "no_decay_norm_bias": Companion(
        lambda given: given["weight_decay"] > 0, "leaves parameters out of --weight_decay", "add --weight_decay 1e-4"
    ),
}
"""What options of the reference trainer require."""


def refuse_without_companion(context: click.Context, table: Mapping[str, Companion], options: Options) -> None:
    """Raise FleetTrainError for an option of ``table`` that was given explicitly and has no effect."""
    for name, companion in table.items():
        if context.get_parameter_source(name) is ParameterSource.DEFAULT or companion.has_effect(options):
            continue
        said = f"--{name} {options[name]} would have no effect: it {companion.rule}"
        raise FleetTrainError(f"{said}; {companion.fix}, or leave --{name} out")
