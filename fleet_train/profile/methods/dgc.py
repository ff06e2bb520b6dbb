"""Only the largest elements of each gradient: Deep Gradient Compression.

Source: Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed
Training", ICLR 2018; names are Fleet's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from fleet_train.profile.knobs import OnlyWith, knob
from fleet_train.profile.methods.base import (
    FLOAT_BYTES,
    NOT_WITH_LOCAL_SGD,
    Bucket,
    CodingCosts,
    CollectiveSpec,
    Compression,
    Family,
    TensorSpec,
    goes,
    refused,
)

SPARSE_BYTES = 8
"""A float32 value and its int32 index."""
_RAMP_UP = (0.75, 0.9375, 0.984375, 0.996)
_DGC = OnlyWith("compression", ("dgc",))


class DgcKnobs(BaseModel):
    """The settings of DGC, except for the momentum, which it takes over from the optimizer."""

    dgc_sparsity: float = knob(
        0.999,
        ge=0,
        le=0.9999,
        only_with=_DGC,
        meaning="Share of a gradient that DGC does not send, after the ramp-up.",
        reason="Each rank sends its largest elements with their indices.",
    )
    dgc_rampup_begin_step: int = knob(
        0,
        unit="steps",
        ge=0,
        le=1_000_000_000,
        only_with=_DGC,
        meaning="Steps with whole gradients before DGC starts.",
        reason="The momentum of these steps is kept, so that the switch loses nothing.",
    )
    dgc_rampup_steps: int = knob(
        1,
        unit="steps",
        ge=1,
        le=1_000_000_000,
        only_with=_DGC,
        meaning="Steps over which the sparsity rises: 0.75, 0.9375, 0.984375, 0.996, then dgc_sparsity. 1 = at once.",
        reason="The stages of the paper, spread evenly; those above dgc_sparsity are skipped.",
    )
    dgc_local_grad_clip_norm: float = knob(
        0.0,
        ge=0,
        le=1_000_000,
        only_with=_DGC,
        meaning="Clip each gradient on its rank at this L2 norm over the root of the number of ranks. 0 = no clipping.",
        reason="Before it is accumulated; the optimizer's own gradient clip is refused with DGC.",
    )
    dgc_momentum_factor_masking: bool = knob(
        True,
        only_with=_DGC,
        meaning="Clear the momentum of sent elements, so that stale momentum does not accumulate.",
        reason="The velocities at the selected indices become zero.",
    )
    dgc_min_elements: int = knob(
        16384,
        unit="elements",
        ge=0,
        le=1_000_000_000,
        only_with=_DGC,
        meaning="Gradients with fewer elements are sent whole.",
        reason="All of them in one allreduce. Selecting from small ones costs more time than it saves; Fleet's bound.",
    )


@dataclass(frozen=True)
class DgcSettings:
    """Top-k compression, as the knobs of the same names say."""

    momentum: float = 0.9
    """The optimizer's, applied here before the selection. The optimizer after it must have none."""
    use_nesterov: bool = False
    rampup_begin_step: int = 0
    rampup_step: int = 1
    """Steps over which the sparsities are spread evenly; the last one holds from then on."""
    sparsity: tuple[float, ...] = (0.999,)
    """Shares of each gradient that are not sent."""
    local_grad_clip_norm: float | None = None
    """Bound of the L2 norm of one gradient's average: each rank clips its own at this / sqrt(ranks). None = no clip."""
    min_elements: int = 16384
    momentum_factor_masking: bool = True


def dgc_settings(profile: Any, momentum: float = 0.0, use_nesterov: bool = False) -> DgcSettings:
    """The profile's settings of DGC, with the momentum taken over from the optimizer."""
    knobs: DgcKnobs = profile
    stages = tuple(stage for stage in _RAMP_UP if stage < knobs.dgc_sparsity) if knobs.dgc_rampup_steps > 1 else ()
    return DgcSettings(
        momentum=momentum,
        use_nesterov=use_nesterov,
        rampup_begin_step=knobs.dgc_rampup_begin_step,
        rampup_step=knobs.dgc_rampup_steps,
        sparsity=(*stages, knobs.dgc_sparsity),
        local_grad_clip_norm=knobs.dgc_local_grad_clip_norm or None,
        min_elements=knobs.dgc_min_elements,
        momentum_factor_masking=knobs.dgc_momentum_factor_masking,
    )


def is_sparse(gradient: TensorSpec, settings: DgcSettings) -> bool:
    """Whether DGC selects from this gradient, rather than sending it whole."""
    return gradient.elements >= max(1, settings.min_elements)


def sparsity_at(step: int, settings: DgcSettings) -> float | None:
    """The share that is not sent in ``step`` (the first is 0); None while gradients are sent whole.

    Source: Paddle's dgc operator (``get_period_sparcity``).
    """
    since = step - settings.rampup_begin_step
    if since < 0:
        return None
    index = since * len(settings.sparsity) // settings.rampup_step
    return settings.sparsity[min(index, len(settings.sparsity) - 1)]


def kept_elements(elements: int, sparsity: float) -> int:
    """How many of a gradient's elements are sent: at least one."""
    # Rounded first: 1000 * (1 - 0.999) is 1.0000000000000009 or 0.9999999999999998, by the order of operations.
    return max(1, min(elements, int(round(elements * (1.0 - sparsity), 6))))


def dgc_kept_elements(bucket: Bucket, settings: DgcSettings, step: int) -> tuple[int, int]:
    """(elements selected by each rank, elements sent whole) of a bucket in ``step``."""
    sparsity = sparsity_at(step, settings)
    if sparsity is None:
        return 0, bucket.elements
    sparse = [gradient.elements for gradient in bucket.gradients if is_sparse(gradient, settings)]
    return sum(kept_elements(elements, sparsity) for elements in sparse), bucket.elements - sum(sparse)


class Dgc(Compression):
    """One all-gather of (value, index) pairs, and one allreduce of the gradients that are sent whole."""

    def sent(
        self, bucket: Bucket, profile: Any, hierarchical: bool, step: int | None = None
    ) -> tuple[CollectiveSpec, ...]:
        del hierarchical
        at = self.steps_to_full_strength(profile) if step is None else step
        selected, whole = dgc_kept_elements(bucket, dgc_settings(profile), at)
        sparse = (CollectiveSpec("allgather", SPARSE_BYTES * selected, SPARSE_BYTES),) if selected else ()
        return sparse + ((CollectiveSpec("allreduce", FLOAT_BYTES * whole, FLOAT_BYTES),) if whole else ())

    def steps_to_full_strength(self, profile: Any) -> int:
        knobs: DgcKnobs = profile
        return knobs.dgc_rampup_begin_step + knobs.dgc_rampup_steps


DGC = Dgc(
    "dgc",
    "the largest elements",
    family=Family(
        "dgc",
        "DGC",
        with_buckets=goes("a bucket takes one all-gather"),
        with_local_groups=refused(
            "the ranks' largest elements are gathered, not summed", "leave use_hierarchical_allreduce off"
        ),
        with_local_sgd=NOT_WITH_LOCAL_SGD,
        sources="Lin et al. 2018 (DGC)",
    ),
    knobs=DgcKnobs,
    has_error_feedback=True,
    keeps_nan=True,
    short_warm_up={"dgc_rampup_begin_step": 2, "dgc_rampup_steps": 4},
    on_purpose="what dgc has not sent yet is sent later; random gradients have no large elements: the worst case",
    costs=CodingCosts(0.25e-9, 2.4e-9, 7e-9, 3.7e-9),
    ranks_in="fleet_train.collectives.methods.dgc:make_method",
    numpy_in="fleet_train.plan.simulate_methods:dgc",
)
