"""`fleet_train train`: flags of the reference trainer. Paddle is imported after they are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import click
from click.core import ParameterSource

from fleet_train.cli.options import (
    HELP,
    Command,
    Number,
    WholeNumber,
    WholeNumberRange,
    ask_here,
    folders,
    profiles,
    set_option,
    verbose_option,
)
from fleet_train.data import AUGMENTATIONS, LAST_BATCHES, LOADERS, SHARDINGS, UNEVEN_POLICIES
from fleet_train.errors import FleetTrainError
from fleet_train.train.config import DEFAULT_LEARNING_RATES, ON_NAN, OPTIMIZERS, TrainConfig
from fleet_train.train.settings import MODELS, SCHEDULES

_DEFAULT = TrainConfig()
_RATES = ", ".join(f"{name} {rate:g}" for name, rate in DEFAULT_LEARNING_RATES.items())


def _epochs(context: click.Context, parameter: click.Parameter, value: str) -> tuple[float, ...]:
    """Numbers separated by commas."""
    try:
        return tuple(float(part) for part in value.split(",") if value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list such as 30,60,80", context, parameter) from None


def _option(flag: str, help_text: str, **settings: Any) -> Callable[[Command], Command]:
    """An option whose default is the config's field of the same name."""
    name = flag.removeprefix("--")
    settings.setdefault("default", getattr(_DEFAULT, name, None))
    settings.setdefault("show_default", settings["default"] not in (None, ""))
    return click.option(flag, help=help_text, **settings)


_FOLDER = "add --data_dir <folder>"
NEEDS: dict[str, tuple[Callable[[Mapping[str, Any]], bool], str, str]] = {
    "data": (lambda given: given["data_dir"] is None, "names data that --data_dir replaces", "leave --data_dir out"),
    "image_size": (lambda given: given["data_dir"] is not None, "is for the images of --data_dir", _FOLDER),
    "max_corrupt": (lambda given: given["data_dir"] is not None, "is for the files of --data_dir", _FOLDER),
    "workers": (
        lambda given: given["data_dir"] is not None and given["loader"] != "thread",
        "counts processes that decode the images of --data_dir, which --loader thread does not start",
        "give --data_dir <folder> and another --loader",
    ),
    "uneven": (
        lambda given: given["shard_by"] == "folder",
        "applies to machines that read their own folders",
        "add --shard_by folder",
    ),
    "last_batch": (
        lambda given: given["shard_by"] == "sample",
        "applies to samples that all ranks share; with --shard_by folder, --uneven decides",
        "give --uneven instead",
    ),
    "lr_decay": (
        lambda given: given["lr_schedule"] == "step",
        "belongs to the step schedule",
        "add --lr_schedule step",
    ),
    "lr_power": (
        lambda given: given["lr_schedule"] == "polynomial",
        "belongs to the polynomial schedule",
        "add --lr_schedule polynomial",
    ),
    "no_decay_norm_bias": (
        lambda given: given["weight_decay"] > 0,
        "leaves parameters out of --weight_decay",
        "add --weight_decay 1e-4",
    ),
}
"""Options that have no effect without another one, which are refused, not ignored: whether one has an effect with the
given values, and the ends of two sentences, "--option <rule>" and "<fix>, or leave --option out"."""


def _refuse_without_effect(context: click.Context, options: Mapping[str, Any]) -> None:
    """Raise FleetTrainError for an option that was given explicitly and has no effect."""
    for name, (has_effect, rule, fix) in NEEDS.items():
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT and not has_effect(options):
            problem = f"--{name} {options[name]} would have no effect: it {rule}"
            raise FleetTrainError(f"{problem}; {fix}, or leave --{name} out")


@click.command(context_settings=HELP)
@_option("--model", "Network: small ones, and paddle.vision.models.", type=click.Choice(MODELS))
@_option("--data", "digits (scikit-learn), synthetic, or synthetic:<channels>x<height>x<width>x<classes>.")
@_option(
    "--data_dir",
    "Image folder instead: train/<class>/, val/<class>/, or train.txt and val.txt.",
    shell_complete=folders,
)
@_option("--image_size", "Height and width in pixels to which images of --data_dir are resized.", type=WholeNumber())
@_option(
    "--augment", "Random change of training images; auto: crop_flip for folders.", type=click.Choice(AUGMENTATIONS)
)
@_option("--loader", "What decodes images; auto: worker processes for folders.", type=click.Choice(LOADERS))
@_option("--workers", "Decoding processes per rank. Default: the cores of this rank, at most 8.", type=WholeNumber())
@_option("--prefetch_depth", "Batches prepared in advance while a step runs.", type=WholeNumber())
@_option("--shard_by", "Machines share the same files, or each reads its own.", type=click.Choice(SHARDINGS))
@_option("--uneven", "With --shard_by folder and unequal machines.", type=click.Choice(UNEVEN_POLICIES))
@_option(
    "--last_batch", "A last batch of one sample per rank; exact: no sample twice.", type=click.Choice(LAST_BATCHES)
)
@_option("--max_corrupt", "Unreadable images to skip: below 1 a share, from 1 on a number.", type=Number())
@_option(
    "--strategy",
    "Profile name or YAML file. Default: the launcher's, else chosen by the cluster.",
    shell_complete=profiles,
)
@set_option
@_option("--epochs", "Passes over the training data.", type=WholeNumber())
@_option(
    "--batch_size", "Samples per rank and batch; a step is one, or accumulate_steps of the profile.", type=WholeNumber()
)
@_option("--lr", f"Peak learning rate. Default: {_RATES}.", type=Number(), default=None)
@_option("--scale_lr", "Multiply the learning rate by the number of ranks.", is_flag=True)
@_option("--optimizer", "Optimizer (momentum: 0.9).", type=click.Choice(OPTIMIZERS))
@_option("--weight_decay", "L2 coefficient; decoupled with adamw.", type=Number())
@_option("--no_decay_norm_bias", "No weight decay for biases and scales of norms.", is_flag=True)
@_option("--clip_norm", "Largest global norm of the averaged gradients; 0 = no clipping.", type=Number())
@_option("--gradient_norm", "Record the global norm of the averaged gradients; --clip_norm does, too.", is_flag=True)
@_option("--label_smoothing", "Share of the target that is spread over all classes.", type=Number())
@_option("--ema_decay", "Decay of the weights' moving average, used in evaluation; 0 = none.", type=Number())
@_option("--lr_schedule", "How the learning rate decays from the peak.", type=click.Choice(SCHEDULES))
@_option(
    "--lr_milestones",
    "Epochs, 30,60,80, at which the step schedule drops. Default: 1/2, 3/4.",
    default="",
    callback=_epochs,
)
@_option("--lr_decay", "Factor of the step schedule at a milestone.", type=Number())
@_option("--lr_power", "Power of the polynomial schedule.", type=Number())
@_option("--warmup_epochs", "Epochs in which the rate rises to the peak.", type=Number())
@_option("--seed", "Seed of all random streams; the same seed gives the same run.", type=WholeNumber())
@_option(
    "--output_dir",
    "Folder for checkpoints, metrics.jsonl, visualdl/ and summary.json (on rank 0's machine).",
    shell_complete=folders,
)
@_option(
    "--checkpoint_every",
    "Epochs between two checkpoints; 0 = only at the end, or when it is stopped.",
    type=WholeNumber(),
)
@_option("--checkpoint_every_steps", "Steps between two checkpoints within epochs; 0 = none.", type=WholeNumber())
@_option("--keep_checkpoints", "How many of the newest checkpoints to keep.", type=WholeNumber())
@_option("--keep_best", "Also keep the checkpoint with the best evaluation.", is_flag=True)
@_option("--background_checkpoints", "Write checkpoints while training goes on.", is_flag=True)
@_option("--checkpoint_timeout", "Seconds to wait for a hanging disk before the job stops.", type=Number())
@_option("--checkpoint_copies", "Nodes that keep each checkpoint, the first one included.", type=WholeNumber())
@_option("--evaluate_every", "Epochs between two evaluations.", type=WholeNumber())
@_option("--log_every", "Steps between two metric records.", type=WholeNumber())
@_option(
    "--straggler_factor", "Report a rank whose step takes this many times the others' median; 0 = never.", type=Number()
)
@_option("--trace", "Trace these steps, such as 100-104; then: fleet_train timeline.", metavar="STEPS")
@_option("--prometheus_port", "Port of /metrics for Prometheus on rank 0.", type=WholeNumberRange(1, 65535))
@_option("--prometheus_host", "Address of /metrics; 0.0.0.0 = every address of the machine.")
@_option("--on_nan", "What to do about a loss or gradient that is NaN or infinite.", type=click.Choice(ON_NAN))
@_option("--deterministic", "Ask Paddle for kernels that give the same bits in every run.", is_flag=True)
@_option("--resume", "Continue from the newest checkpoint in output_dir, or start if there is none.", is_flag=True)
@_option(
    "--resume_uncompared",
    "Also resume from a checkpoint that was saved with divergence_check_steps: 0.",
    is_flag=True,
)
@_option(
    "--overwrite", "Start over in a used output_dir; its run is deleted after the first new checkpoint.", is_flag=True
)
@_option("--accept_changed_data", "Resume although the training data is not the checkpoint's.", is_flag=True)
@_option("--stop_after_epochs", "Stop this run after this many epochs; --resume continues later.", type=WholeNumber())
@verbose_option
@click.pass_context
def command(context: click.Context, /, lr: float | None, settings: tuple[str, ...], **options: Any) -> None:
    """Train a built-in model with the reference trainer, on one process or under any launcher."""
    _refuse_without_effect(context, options)
    config = TrainConfig(learning_rate=lr, **options)
    ask_here(config.strategy, settings)
    from fleet_train.train.reference import run

    run(config)
