"""The knobs of a profile, each declared once: type, range, unit, default, fate, meaning and reason.

To add a knob, add a field to the class that it belongs to, here or in the ``schema_*`` modules beside this; the loader,
the checks, ``KNOBS``, ``strategies/schema.json``, ``docs/knobs.md``, ``fleet_train profiles`` and `DistributedStrategy`
follow from it. Each class extends the one before it, so that fields keep the order of the table.
"""

from __future__ import annotations

from dataclasses import replace

from fleet_train.profile.knobs import Knob, knob, knob_of
from fleet_train.profile.schema.program import ProgramKnobs


class Settings(ProgramKnobs):
    """Field declarations only; the other layers use `fleet_train.profile.Profile`."""

    divergence_check_steps: int = knob(
        100,
        fate="carried out",
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
    collective_timeout_seconds: int = knob(
        300,
        fate="carried out",
        unit="seconds",
        ge=1,
        le=86_400,
        meaning="How long a rank waits for another one inside a step before it stops.",
        reason="The rank stops with an error that names the bucket and the ranks that did not arrive.",
    )
    environment: dict[str, str] = knob(
        factory=dict,
        fate="carried out",
        meaning="Variables for the workers, such as NCCL_IB_DISABLE or FLAGS_fraction_of_gpu_memory_to_use.",
        reason="The launcher sets them for every worker before Paddle starts; in a script started in another way, "
        "flags are set when the optimizer is wrapped, and rank 0 reports those that were too late. A FLAGS_* name that "
        "the installed Paddle does not know is refused; names that choose ranks, devices or endpoints belong to the "
        "launcher.",
    )


DESCRIPTIVE = frozenset({"name", "description", "measured"})
"""Fields that change nothing in training: not in the digest, not counted as knobs that were set."""


def _flag(name: str, becomes: str, meaning: str) -> Knob:
    target = KNOBS[becomes]
    return replace(
        target,
        name=name,
        fate="mapped",
        meaning=meaning,
        reason=f"Read as {becomes}, from a profile or from the process environment; the profile's own knob wins.",
        becomes=becomes,
        auto=False,
    )


KNOBS: dict[str, Knob] = {name: knob_of(name, field) for name, field in Settings.model_fields.items()}
FLAG_KNOBS: dict[str, Knob] = {
    flag.name: flag
    for flag in (
        _flag("FLAGS_fuse_parameter_memory_size", "fuse_grad_size_in_MB", "Paddle 1.8's flag: MB in one allreduce."),
        _flag(
            "FLAGS_fuse_parameter_groups_size",
            "fuse_parameter_groups_size",
            "Paddle 1.8's flag: gradients in one allreduce.",
        ),
        _flag("FLAGS_sync_nccl_allreduce", "sync_nccl_allreduce", "Paddle 1.8's flag: wait for each allreduce."),
    )
}
KNOBS.update(FLAG_KNOBS)
