"""The knobs of a profile, each declared once: type, range, unit, default, fate, meaning and reason.

To add a knob, add a field to the class that it belongs to, here, in `communication_knobs` or in a compression's file;
the loader, the checks, ``KNOBS``, ``strategies/schema.json``, ``docs/knobs.md``, ``fleet_train profiles`` and
`DistributedStrategy` follow from it. Each class extends the one before it, so that fields keep the order of the table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fleet_train.profile.communication_knobs import CompressionKnobs
from fleet_train.profile.knobs import Knob, OnlyWith, knob, knob_of

# The knobs that change what is computed: gradient merge, precision, batch norm, recompute.


class ProgramKnobs(CompressionKnobs):
    """Knobs of passes over the program."""

    accumulate_steps: int = knob(
        1,
        unit="micro-batches",
        ge=1,
        le=100_000,
        meaning="Gradient merge: micro-batches per update, their gradients averaged.",
        reason="Gradients are summed in the program and sent once per update, during the last backward pass. A run of "
        "the script's program is one micro-batch; step the learning rate once per update.",
    )
    amp_level: Literal["O0", "O1", "O2"] = knob(
        "O0",
        meaning="Mixed precision: O0 = float32, O1 = matrix products and convolutions in amp_dtype, O2 = also what "
        "follows them.",
        refused={
            "O3": "Apex's pure half precision also keeps parameters in 16 bits, so that an update smaller than "
            "1/256 of a bfloat16 parameter is lost; use O2, which keeps float32 parameters"
        },
        reason="A pass over the forward program. Parameters, gradients and communication stay float32. Apex's O3 (pure "
        "half precision) is refused: small updates would be lost.",
    )
    amp_dtype: Literal["bfloat16", "float16"] = knob(
        "bfloat16",
        only_with=OnlyWith("amp_level", ("O1", "O2")),
        meaning="The low precision. float16 needs a GPU and a loss scale.",
        reason="float16 is refused on CPU: Paddle has no such matrix product there.",
    )
    amp_keep_batch_norm_fp32: bool = knob(
        True,
        only_with=OnlyWith("amp_level", ("O2",)),
        meaning="Batch norm computes in float32 in O2 as well (in O1 it always does). false needs a GPU.",
        reason="Statistics and their update are float32 in any case. Refused when false on CPU, which has no bfloat16 "
        "batch norm.",
    )
    amp_init_loss_scaling: float = knob(
        32768.0,
        ge=1,
        le=2.0**32,
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="First loss scale of float16.",
        reason="Overflow is detected after gradients are averaged, so that all ranks skip the same updates. The scale "
        "is saved.",
    )
    amp_dynamic_loss_scaling: bool = knob(
        True,
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Adjust the loss scale automatically. false = it stays amp_init_loss_scaling.",
        reason="An update with an overflow is skipped on every rank in either case.",
    )
    amp_incr_every_n_steps: int = knob(
        1000,
        unit="updates",
        ge=1,
        le=1_000_000_000,
        needs="amp_dynamic_loss_scaling",
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Raise the loss scale after this many updates without overflow in a row.",
        reason="Fleet's default. The count is saved.",
    )
    amp_decr_every_n_nan_or_inf: int = knob(
        2,
        unit="updates",
        ge=1,
        le=1_000_000,
        needs="amp_dynamic_loss_scaling",
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Lower the loss scale after this many overflows in a row.",
        reason="Fleet's default. The count is saved.",
    )
    amp_incr_ratio: float = knob(
        2.0,
        gt=1,
        le=1024,
        needs="amp_dynamic_loss_scaling",
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Factor by which the loss scale is raised.",
        reason="Fleet's default; powers of two do not change the digits of a gradient.",
    )
    amp_decr_ratio: float = knob(
        0.8,
        gt=0,
        le=0.99,
        needs="amp_dynamic_loss_scaling",
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Factor by which the loss scale is lowered, but not below 1.",
        reason="Fleet's default.",
    )
    sync_batch_norm: bool = knob(
        False,
        meaning="Batch norm over the batches of all ranks, forward and backward.",
        reason="Paddle's kernels on CPUs, single operators on GPUs, around two small exchanges per layer and step, "
        "not overlapped; independent layers share theirs.",
    )
    average_over: Literal["samples", "ranks", "nothing"] = knob(
        "samples",
        meaning="Whose mean the averaged gradients are: the joint batch's, whatever the loss divides by (samples); of "
        "the ranks, each with the loss of its own batch (ranks); or they are summed over the ranks (nothing).",
        reason="samples: what the loss takes over the whole batch is taken over the batches of all ranks. Counts are "
        "sent while the forward pass runs; sums that depend on parameters where they stand. Where ranks have equal "
        "counts, bits are those of ranks. LocalSGD's local steps send nothing, so they are as with ranks.",
    )
    batch_shares: list[float] | Literal["equal", "auto"] = knob(
        "equal",
        meaning="The parts of the joint batch that ranks take: equal, numbers in proportion by rank such as [3, 1], or "
        "auto: so that ranks of unlike speed compute equally long.",
        reason="`Trainer`, `fleet.resumable` and `ShardedBatchSampler` deal by them, a loop of one's own feeds "
        "`fleet.batch_size(GLOBAL)` samples; gradients are weighted by samples, so that they are the joint batch's. "
        "auto begins with equal parts, measures what each rank computes, and changes parts between epochs (in a loop "
        "of one's own every batch_shares_steps) where that saves 3 % of a step. Checkpoints keep the parts.",
    )
    max_share: list[float] | float = knob(
        1.0,
        only_with=OnlyWith("batch_shares", ("auto",)),
        meaning="The largest part of the joint batch that a rank may get, for its memory: one number for all, or one "
        "for each rank. 1 = no bound.",
        reason="What a rank may not get is divided over the others. Bounds that leave a part to nobody are refused.",
    )
    batch_shares_steps: int = knob(
        200,
        unit="steps",
        ge=1,
        le=1_000_000_000,
        only_with=OnlyWith("batch_shares", ("auto",)),
        meaning="In a loop of one's own: steps between two measurements. The first one comes after 10, or after fewer.",
        reason="Counted in calls of fleet.batch_size, at which all ranks agree. Epochs of `Trainer` and of a loader of "
        "`fleet.resumable` do not need it.",
    )
    recompute_segments: int = knob(
        0,
        unit="segments",
        ge=0,
        le=10_000,
        meaning="Recompute: split the forward pass into this many pieces and keep only values that cross a boundary; "
        "the rest is computed again in the backward pass. 0 = off.",
        reason="Operators are cloned before their gradients; results are the same bit by bit. Random "
        "operators run "
        "once. Saves memory, costs up to a second forward pass.",
    )
    recompute_every_blocks: int = knob(
        0,
        unit="blocks",
        ge=0,
        le=10_000,
        meaning="Recompute: split before every n-th block instead. A block begins where a weight of two or more "
        "dimensions is read. 0 = off.",
        reason="Boundaries follow the layers, so that few values cross them. Same results as with recompute_segments.",
    )
    recompute_checkpoints: list[str] = knob(
        factory=list,
        meaning="Recompute: split before the first operator that reads the parameter of each name instead.",
        reason="Values have no names in PIR programs, parameters do. A parameter that the loss does not depend on "
        "is an error.",
    )


class Settings(ProgramKnobs):
    """Field declarations only; the other layers use `fleet_train.profile.Profile`."""

    divergence_check_steps: int = knob(
        100,
        unit="steps",
        ge=0,
        le=1_000_000_000,
        meaning="Steps between two comparisons of a digest of all parameters over the ranks, from the first step on. "
        "Saved values are also compared before every save. 0 = never.",
        reason="A difference stops the job, and nothing is saved. The error names the parameter and, of three ranks or "
        "more, those outside the majority; of two, which one was changed cannot be told. LocalSGD's ranks differ "
        "between averagings: they are compared before the first local step, and at the first averaging after this many "
        "steps.",
    )
    replay_check_steps: int = knob(
        0,
        unit="steps",
        ge=0,
        le=1_000_000_000,
        meaning="Every so many steps each rank computes its forward and backward pass twice from the same inputs, and "
        "compares its own gradients bit by bit before anything is updated. 0 = never.",
        reason="A faulty processor or memory makes a wrong gradient, which is averaged into all ranks' parameters. "
        "All ranks end instead, with an error that names rank, step and gradient. Random operators draw alike, "
        "statistics change once: the training is the same bit by bit. A checked step takes the time of both passes "
        "twice, and memory for a copy of the gradients. One process alone compares nothing, which is said.",
    )
    nonfinite: Literal["error", "skip", "ignore"] = knob(
        "error",
        meaning="A gradient of a rank that holds NaN or infinity: the job stops and names rank and step (error), no "
        "rank updates in that step (skip), or nothing is looked at (ignore).",
        reason="Each rank looks at its own gradients before they are sent; on a device, the host reads the answer a "
        "step later. skip: all ranks decide alike, by the averaged gradients; by a message where those do not say, in "
        "LocalSGD's local steps and with compressions that keep what they do not send, which is put back. The "
        "update then waits for the last bucket. With float16's loss scale an update with infinity is skipped in any "
        "case. One process alone carries out skip only.",
    )
    collective_timeout_seconds: int = knob(
        300,
        unit="seconds",
        ge=1,
        le=86_400,
        meaning="How long a rank waits for another one inside a step before it stops.",
        reason="The rank stops with an error that names the bucket and the ranks that did not arrive.",
    )
    environment: dict[str, str] = knob(
        factory=dict,
        meaning="Variables for the workers, such as NCCL_IB_DISABLE or FLAGS_fraction_of_gpu_memory_to_use.",
        reason="The launcher sets them for every worker before Paddle starts; in a script started in another way, "
        "flags are set when the optimizer is wrapped, and rank 0 reports those that were too late. A FLAGS_* name that "
        "the installed Paddle does not know is refused; names that choose ranks, devices or endpoints belong to the "
        "launcher.",
    )


DESCRIPTIVE = frozenset({"name", "description", "measured"})
"""Fields that change nothing in training: not in the digest, not counted as knobs that were set."""


def _flag(name: str, becomes: str, meaning: str, today: str) -> Knob:
    target = KNOBS[becomes]
    return replace(
        target,
        name=name,
        fate="mapped",
        meaning=meaning,
        reason=f"Read as {becomes}, from a profile or from the process environment; the profile's own knob wins. "
        f"Rank 0 says: {today}.",
        becomes=becomes,
        today=today,
        words=(),
    )


KNOBS: dict[str, Knob] = {name: knob_of(name, field) for name, field in Settings.model_fields.items()}
FLAG_KNOBS: dict[str, Knob] = {
    flag.name: flag
    for flag in (
        _flag(
            "FLAGS_fuse_parameter_memory_size",
            "fuse_grad_size_in_MB",
            "Paddle 1.8's flag: MB in one allreduce.",
            "without it the best size for the link is chosen; leave it out, unless you have measured",
        ),
        _flag(
            "FLAGS_fuse_parameter_groups_size",
            "fuse_parameter_groups_size",
            "Paddle 1.8's flag: layers in one allreduce.",
            "it counts gradients today, 1.8 counted layers; the size of a bucket is a limit, too",
        ),
        _flag(
            "FLAGS_sync_nccl_allreduce",
            "sync_nccl_allreduce",
            "Paddle 1.8's flag: wait for each allreduce.",
            "each bucket is waited for, and nothing overlaps: slower today, though the advice in 1.8 was to set it; "
            "leave it out",
        ),
    )
}
KNOBS.update(FLAG_KNOBS)
