"""The knobs of LocalSGD and of momentum over its periods."""

from __future__ import annotations

from typing import Literal

from fleet_train.profile.knobs import OnlyWith, knob
from fleet_train.profile.schema.communication import CommunicationKnobs


class LocalSgdKnobs(CommunicationKnobs):
    """When parameters are averaged, what is sent, and how the average is used."""

    use_local_sgd: bool = knob(
        False,
        fate="carried out",
        meaning="Train locally and average parameters periodically, instead of gradients in every step.",
        reason="After the warm-up no gradient is sent; the parameters (and batch-norm statistics) are averaged at the "
        "end of a period, before every save, and by fleet.synchronize_parameters(). Source: Stich 2018, Lin 2018.",
    )
    local_sgd_is_warm_steps: int = knob(
        100,
        fate="carried out",
        unit="steps",
        ge=0,
        le=1_000_000_000,
        needs="use_local_sgd",
        meaning="Synchronous steps before LocalSGD starts. Fleet's advice: up to the first drop of the learning rate.",
        reason="In these steps gradients are averaged as without LocalSGD.",
    )
    local_sgd_steps: int = knob(
        2,
        fate="carried out",
        unit="steps",
        ge=1,
        le=1_000_000,
        needs="use_local_sgd",
        meaning="Local updates between two averagings. 1 = every step. Fleet's advice: 2 or 4.",
        reason="The period of a constant schedule, the longest one of a doubling schedule, the first one of an "
        "adaptive schedule.",
    )
    local_sgd_schedule: Literal["constant", "doubling", "adaptive"] = knob(
        "constant",
        fate="carried out",
        needs="use_local_sgd",
        meaning="How the period changes: constant; doubling from 1 up to local_sgd_steps; adaptive to learning "
        "rate and loss.",
        reason="Adaptive is AdaComm's rule, ceil(sqrt(lr0 / lr * loss / loss0) * local_sgd_steps), with the loss "
        "averaged over the ranks, kept within 1 .. local_sgd_max_steps. Source: Wang and Joshi 2018.",
    )
    local_sgd_max_steps: int = knob(
        64,
        fate="carried out",
        unit="steps",
        ge=1,
        le=1_000_000,
        needs="use_local_sgd",
        only_with=OnlyWith("local_sgd_schedule", ("adaptive",)),
        meaning="Longest period of an adaptive schedule.",
        reason="Limits AdaComm's rule, which grows without bound as the learning rate falls.",
    )
    local_sgd_momentum: Literal["keep", "average", "reset"] = knob(
        "keep",
        fate="carried out",
        needs="use_local_sgd",
        meaning="What happens to the optimizer's own state when parameters are averaged.",
        reason="keep: each rank keeps its own. average: averaged like the parameters (more bytes). reset: "
        "back to zero. Adam's bias correction continues in all three.",
    )
    local_sgd_dtype: Literal["float32", "bfloat16", "int8", "int4"] = knob(
        "float32",
        fate="carried out",
        needs="use_local_sgd",
        meaning="What is sent when parameters are averaged: float32 values, or differences from the last averaging in "
        "bfloat16 (half the bytes), int8 (a quarter) or int4 (an eighth).",
        reason="Every rank adds the same averaged difference to the same kept copy, so that all ranks hold equal bits. "
        "int8 and int4 round according to `quantised_rounding` and keep the rounding errors for the next averaging.",
    )
    local_sgd_overlap_steps: int = knob(
        0,
        fate="carried out",
        unit="steps",
        ge=0,
        le=1_000_000,
        needs="use_local_sgd",
        meaning="Local steps of the next period that overlap an averaging; its change is added after them. "
        "0 = the ranks wait for it.",
        reason="Each rank adds the average minus what it sent, after the same step on every rank: its progress since "
        "then is kept. Sources: Wang, Liang and Joshi 2020 (Overlap-Local-SGD), Douillard et al. 2025 (Streaming "
        "DiLoCo).",
    )
    local_sgd_fragments: int = knob(
        1,
        fate="carried out",
        unit="fragments",
        ge=1,
        le=1024,
        needs="use_local_sgd",
        meaning="Parts of the parameters that are averaged in turn, each once in local_sgd_steps. 1 = all at once. "
        "More need a constant schedule, and local_sgd_momentum: keep.",
        reason="Whole layers, spread evenly over a period, so that the link is used evenly and no averaging takes "
        "long. Each has its own outer momentum. Running statistics are sent with the last one. Source: Douillard "
        "et al. 2025 (Streaming DiLoCo).",
    )
    local_sgd_fragment_pattern: Literal["strided", "sequential"] = knob(
        "strided",
        fate="carried out",
        needs="use_local_sgd",
        meaning="Which layers form a fragment: every n-th one (strided), or neighbours (sequential).",
        reason="The paper found strided slightly better: each fragment has early and late layers.",
    )
    outer_optimizer: Literal["none", "slowmo", "diloco"] = knob(
        "none",
        fate="carried out",
        needs="use_local_sgd",
        meaning="Momentum over periods: slowmo (slow momentum), diloco (Nesterov on the averaged difference).",
        reason="Applied to the difference between the last averaged parameters and the new average. Sources: "
        "Wang et al. 2019 (SlowMo), Douillard et al. 2023 (DiLoCo).",
    )
    outer_lr: float = knob(
        1.0,
        fate="carried out",
        gt=0,
        le=100,
        needs="use_local_sgd",
        only_with=OnlyWith("outer_optimizer", ("slowmo", "diloco"), default_fits=True),
        meaning="Learning rate of the outer optimizer. DiLoCo's advice: 0.7; SlowMo's: 1.",
        reason="1 with outer_momentum 0 is plain averaging.",
    )
    outer_momentum: float = knob(
        0.0,
        fate="carried out",
        ge=0,
        le=0.999,
        needs="use_local_sgd",
        only_with=OnlyWith("outer_optimizer", ("slowmo", "diloco"), default_fits=True),
        meaning="Momentum of the outer optimizer. DiLoCo's advice: 0.9; SlowMo's: 0.4 to 0.8.",
        reason="Every rank keeps the momentum, equal on all; it is saved.",
    )
