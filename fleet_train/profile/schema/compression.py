"""The knobs of gradient compression."""

from __future__ import annotations

from typing import Literal

from fleet_train.profile.knobs import OnlyWith, knob
from fleet_train.profile.schema.local_sgd import LocalSgdKnobs

_QUANTISED = OnlyWith("compression", ("int8", "int4"), either=("local_sgd_dtype", ("int8", "int4")))


class CompressionKnobs(LocalSgdKnobs):
    """What is sent of a gradient."""

    compression: Literal["none", "bf16", "fp16", "int8", "int4", "powersgd", "dgc"] = knob(
        "none",
        fate="carried out",
        meaning="What is sent of a gradient: all of it, half the bits (bf16, fp16), a quarter (int8), an eighth "
        "(int4), low-rank factors (powersgd), or the largest elements (dgc).",
        reason="bf16: summed in bfloat16; with a hierarchical allreduce between the leaders only. fp16 is NCCL's "
        "alone: Gloo's float16 sums are inf, so it is refused on CPU. int8 and int4: integers with a scale per block, "
        "summed in float32 (with a hierarchical allreduce between the leaders only). They, powersgd and dgc keep what "
        "is not sent and add it later; checkpoints contain it. Sources: Seide et al. 2014 (error feedback), Dettmers "
        "et al. 2021 (block scales), Vogels et al. 2019 (PowerSGD), Lin et al. 2018 (DGC).",
    )
    compression_declines: bool = knob(
        True,
        fate="carried out",
        only_with=OnlyWith("compression", ("int8", "int4")),
        meaning="Send bfloat16 or float32 instead of int8 or int4 where the plan predicts shorter steps on this "
        "link. false = always send the requested compression.",
        reason="Encoding takes processor time, which a fast link does not save. The link is that of link_gigabits "
        "and link_latency_ms, measured if they are not given; rank 0 prints what was declined.",
    )
    quantised_block_size: int = knob(
        512,
        fate="carried out",
        unit="elements",
        ge=32,
        le=65536,
        only_with=_QUANTISED,
        meaning="Elements that share a scale in int8 or int4; a multiple of 32. Smaller = closer to the "
        "values, more bytes: a scale takes 4.",
        reason="A block's scale is its largest absolute value over 127 (int8) or 7 (int4).",
    )
    quantised_error_feedback: bool = knob(
        True,
        fate="carried out",
        only_with=_QUANTISED,
        meaning="Add earlier rounding errors to what int8 or int4 sends. false = forget them.",
        reason="Costs one copy of the sent values per rank, kept in checkpoints; without it int4 may not converge.",
    )
    quantised_rounding: Literal["nearest", "stochastic"] = knob(
        "nearest",
        fate="carried out",
        only_with=_QUANTISED,
        meaning="How int8 and int4 round: to the nearest level, or up with the probability of the fractional part.",
        reason="stochastic has the exact value as its mean, for use without error feedback; its random numbers depend "
        "only on parameter, rank and step, so that a resumed run draws the same ones. nearest has the smaller error.",
    )
    powersgd_rank: int = knob(
        1,
        fate="carried out",
        unit="columns",
        ge=1,
        le=1024,
        only_with=OnlyWith("compression", ("powersgd",)),
        meaning="Columns of PowerSGD's two factors. Higher = more bytes, closer to the gradient.",
        reason="A gradient [n, m] is sent as n + m numbers per column.",
    )
    powersgd_start_step: int = knob(
        0,
        fate="carried out",
        unit="steps",
        ge=0,
        le=1_000_000_000,
        only_with=OnlyWith("compression", ("powersgd",)),
        meaning="Steps with whole gradients before PowerSGD starts.",
        reason="Early gradients change fast; PyTorch's advice is a tenth of the training.",
    )
    powersgd_min_compression: float = knob(
        2.0,
        fate="carried out",
        unit="times",
        ge=0,
        le=1_000_000,
        only_with=OnlyWith("compression", ("powersgd",)),
        meaning="A gradient is compressed when its factors are at least this many times smaller than itself.",
        reason="Other gradients are sent whole, together with the first factors.",
    )
    powersgd_warm_start: bool = knob(
        True,
        fate="carried out",
        only_with=OnlyWith("compression", ("powersgd",)),
        meaning="Start each step's power iteration from the last step's factor. false = from new random numbers.",
        reason="One iteration per step then follows the gradients; without it each step starts again from "
        "random factors.",
    )
    powersgd_error_feedback: bool = knob(
        True,
        fate="carried out",
        only_with=OnlyWith("compression", ("powersgd",)),
        meaning="Add to each gradient what PowerSGD left out of earlier ones. false = forget it.",
        reason="Costs one copy of the compressed gradients per rank; without it training may not converge.",
    )
    dgc_sparsity: float = knob(
        0.999,
        fate="carried out",
        ge=0,
        le=0.9999,
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Share of a gradient that DGC does not send, after the ramp-up.",
        reason="Each rank sends its largest elements with their indices.",
    )
    dgc_rampup_begin_step: int = knob(
        0,
        fate="carried out",
        unit="steps",
        ge=0,
        le=1_000_000_000,
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Steps with whole gradients before DGC starts.",
        reason="The momentum of these steps is kept, so that the switch loses nothing.",
    )
    dgc_rampup_steps: int = knob(
        1,
        fate="carried out",
        unit="steps",
        ge=1,
        le=1_000_000_000,
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Steps over which the sparsity rises: 0.75, 0.9375, 0.984375, 0.996, then dgc_sparsity. 1 = at once.",
        reason="The stages of the paper, spread evenly; those above dgc_sparsity are skipped.",
    )
    dgc_local_grad_clip_norm: float = knob(
        0.0,
        fate="carried out",
        ge=0,
        le=1_000_000,
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Clip each gradient on its rank at this L2 norm over the root of the number of ranks. 0 = no clipping.",
        reason="Before it is accumulated; the optimizer's own gradient clip is refused with DGC.",
    )
    dgc_momentum_factor_masking: bool = knob(
        True,
        fate="carried out",
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Clear the momentum of sent elements, so that stale momentum does not accumulate.",
        reason="The velocities at the selected indices become zero.",
    )
    dgc_min_elements: int = knob(
        16384,
        fate="carried out",
        unit="elements",
        ge=0,
        le=1_000_000_000,
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Gradients with fewer elements are sent whole.",
        reason="All of them in one allreduce. Selecting from small ones costs more time than it saves; Fleet's bound.",
    )
