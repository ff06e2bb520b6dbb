"""The knobs of a profile, each declared once: type, range, unit, default, fate, meaning and reason.

To add a knob, add a field to `Settings`; the loader, the checks, ``KNOBS``, ``strategies/schema.json``,
``docs/knobs.md``, ``fleet_train profiles`` and `DistributedStrategy` follow from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from fleet_train.profile.knobs import Knob, OnlyWith, knob, knob_of

NOT_YET = "not available yet"


class Settings(BaseModel):
    """Field declarations only; `fleet_train.profile.Profile` is the object that the other rooms use."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = knob(
        "default",
        fate="carried out",
        meaning="What messages and records call this profile; a file that sets none is called after its file name.",
        reason="Printed with the plan and kept in the run's records; it changes nothing in training.",
    )
    description: str = knob(
        "",
        fate="carried out",
        meaning="The reason for this profile in one line: for which network and cluster it is.",
        reason="Shown by `fleet_train profiles`; it changes nothing in training.",
    )
    measured: list[str] = knob(
        factory=list,
        fate="carried out",
        meaning="What was measured with this profile, a line each: on what, the figures, and the record they are from.",
        reason="Shown by `fleet_train profiles NAME` and written by tools/write_measured.py.",
    )
    nccl_comm_num: int = knob(
        1,
        fate="carried out",
        unit="communicators",
        ge=1,
        le=16,
        meaning="How many communicators send buckets side by side. Fleet's advice: 1 on one node, 2 on several.",
        reason="That many process groups, each with a thread of its own, take the buckets in turn. "
        "NCCL on GPUs, Gloo on CPUs.",
    )
    num_threads: int = knob(
        1,
        fate="mapped",
        unit="threads",
        ge=1,
        le=256,
        meaning="Executor threads of a rank. 1 runs operators one by one, more lets independent ones run together.",
        reason="1 becomes the executor's serial mode in program order, FLAGS_new_executor_serial_run=1 and "
        "FLAGS_new_executor_sequential_run=1, so that buckets start as they become ready; more becomes its thread "
        "pool, which chooses its own size. Communicators have threads of their own: nccl_comm_num + 1 is not needed.",
    )
    num_iteration_per_drop_scope: int = knob(
        30,
        fate="mapped",
        unit="steps",
        ge=1,
        le=1_000_000,
        meaning="After how many steps Fleet's executor dropped its local scopes.",
        reason="Today's executor frees an intermediate variable once its last reader has run: nothing is left to drop.",
    )
    fetch_frequency: int = knob(
        1,
        fate="carried out",
        unit="steps",
        ge=1,
        le=1_000_000,
        meaning="Fetch the loss every so many steps. 1 = every step. Fetching waits for the step, so it costs.",
        reason="By the reference trainer; in a loop of your own, fetch only `if fleet.should_fetch(step)`.",
    )
    fuse_all_reduce_ops: bool = knob(
        True,
        fate="carried out",
        meaning="Gather gradients into buckets and allreduce a bucket at a time. false = one allreduce per gradient.",
        reason="The plan puts gradients into buckets in the order in which the backward pass finishes them.",
    )
    fuse_grad_size_in_MB: float = knob(
        16.0,
        fate="carried out",
        unit="MB (2**20 bytes)",
        gt=0,
        le=4096,
        needs="fuse_all_reduce_ops",
        meaning="Largest size of a bucket. Fleet's rule of thumb: a tenth of all gradients. A larger gradient gets a "
        "bucket of its own.",
        reason="The plan closes a bucket before it would grow past this. The default is the recipe's advice, 16, not "
        "Fleet's 32.",
    )
    fuse_parameter_groups_size: int = knob(
        50,
        fate="carried out",
        unit="gradients",
        ge=1,
        le=100_000,
        needs="fuse_all_reduce_ops",
        meaning="Largest number of gradients in a bucket.",
        reason="The plan closes a bucket when it holds this many.",
    )
    last_comm_group_size_MB: float = knob(
        1.0,
        fate="carried out",
        unit="MB (2**20 bytes)",
        gt=0,
        le=4096,
        needs="fuse_all_reduce_ops",
        meaning="Largest size of the last bucket (its transfer has no computation to hide behind) and of the first one "
        "(so that communication starts early in the backward pass); never more than fuse_grad_size_in_MB.",
        reason="The plan closes the first bucket before it would grow past this, and cuts what becomes ready last into "
        "a bucket of this size. Fleet 2.x bounds the group that is sent last under this name.",
    )
    use_hierarchical_allreduce: bool = knob(
        False,
        fate="carried out",
        meaning="Reduce inside each node, allreduce between the nodes' leaders, broadcast inside each node.",
        reason="Every bucket takes three steps, and only the leaders' bytes cross between nodes. It needs "
        "several nodes with several ranks each to differ from the flat allreduce.",
    )
    hierarchical_allreduce_inter_nranks: int = knob(
        0,
        fate="carried out",
        unit="ranks",
        ge=0,
        le=1024,
        needs="use_hierarchical_allreduce",
        meaning="How many neighbouring ranks form one inner group of the hierarchical allreduce. 0 = those of a node.",
        reason="The ranks are cut into teams of this many; the first rank of a team is its leader.",
    )
    sync_nccl_allreduce: bool = knob(
        False,
        fate="carried out",
        meaning="Wait for each bucket before the next operator starts, so that nothing overlaps. For finding faults.",
        reason="The operator that starts a bucket waits for it. Results are the same bits, the step is slower.",
    )
    use_local_sgd: bool = knob(
        False,
        fate="carried out",
        meaning="Train locally and average parameters from time to time instead of gradients in every step.",
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
        reason="Clamps AdaComm's rule, which grows without bound as the learning rate falls.",
    )
    local_sgd_momentum: Literal["keep", "average", "reset"] = knob(
        "keep",
        fate="carried out",
        needs="use_local_sgd",
        meaning="What happens to the optimizer's own state when parameters are averaged.",
        reason="keep: each rank goes on with its own. average: averaged like the parameters (more bytes). reset: "
        "back to zero. Adam's bias correction goes on in all three.",
    )
    local_sgd_dtype: Literal["float32", "bfloat16"] = knob(
        "float32",
        fate="carried out",
        needs="use_local_sgd",
        meaning="What is sent when parameters are averaged: float32 values, or bfloat16 differences from the last "
        "averaging, half the bytes.",
        reason="Every rank adds the same averaged difference to the same kept copy, so that all ranks hold equal bits.",
    )
    local_sgd_overlap_steps: int = knob(
        0,
        fate="carried out",
        unit="steps",
        ge=0,
        le=1_000_000,
        needs="use_local_sgd",
        meaning="Local steps of the next period beside which an averaging travels; what it changes is added behind "
        "them. 0 = the ranks wait for it.",
        reason="Each rank adds the average minus what it sent, after the same step on every rank: its progress since "
        "then is kept. Sources: Wang, Liang and Joshi 2020 (Overlap-Local-SGD), Douillard et al. 2025 (Streaming "
        "DiLoCo).",
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
        reason="The momentum is kept on every rank, equal everywhere, and saved.",
    )
    compression: Literal["none", "bf16", "fp16", "powersgd", "dgc"] = knob(
        "none",
        fate="carried out",
        meaning="What is sent of a gradient: all of it, half the bits (bf16, fp16), low-rank factors (powersgd), "
        "or the "
        "largest elements (dgc).",
        reason="bf16: summed in bfloat16; with a hierarchical allreduce between the leaders only. fp16 is NCCL's "
        "alone: "
        "Gloo's float16 sums are inf, so it is refused on CPU. powersgd and dgc keep what they left out and add it "
        "later; that memory is not in a checkpoint. Sources: Vogels et al. 2019 (PowerSGD), Lin et al. 2018 (DGC).",
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
        reason="What does not gain is sent whole, together with the first factors.",
    )
    powersgd_warm_start: bool = knob(
        True,
        fate="carried out",
        only_with=OnlyWith("compression", ("powersgd",)),
        meaning="Start each step's power iteration from the last step's factor. false = from new random numbers.",
        reason="One iteration per step then follows the gradients; without it their large directions are found anew.",
    )
    powersgd_error_feedback: bool = knob(
        True,
        fate="carried out",
        only_with=OnlyWith("compression", ("powersgd",)),
        meaning="Add to each gradient what PowerSGD has left out of the earlier ones. false = forget it.",
        reason="Costs one copy of the compressed gradients per rank; without it training may not converge.",
    )
    dgc_sparsity: float = knob(
        0.999,
        fate="carried out",
        ge=0,
        le=0.9999,
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Share of a gradient that DGC does not send, after the ramp-up.",
        reason="Each rank sends its largest elements with their places.",
    )
    dgc_rampup_begin_step: int = knob(
        0,
        fate="carried out",
        unit="steps",
        ge=0,
        le=1_000_000_000,
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Steps with whole gradients before DGC starts.",
        reason="The momentum of these steps is kept, so that the change loses nothing.",
    )
    dgc_rampup_steps: int = knob(
        1,
        fate="carried out",
        unit="steps",
        ge=1,
        le=1_000_000_000,
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Steps over which the sparsity rises: 0.75, 0.9375, 0.984375, 0.996, then dgc_sparsity. 1 = at once.",
        reason="The stages of the paper, spread evenly; those above dgc_sparsity are left out.",
    )
    dgc_local_grad_clip_norm: float = knob(
        0.0,
        fate="carried out",
        ge=0,
        le=1_000_000,
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Clip each gradient on its rank at this L2 norm over the root of the number of ranks. 0 = no clipping.",
        reason="Before it is accumulated; the optimizer's own gradient clip is refused beside DGC.",
    )
    dgc_momentum_factor_masking: bool = knob(
        True,
        fate="carried out",
        only_with=OnlyWith("compression", ("dgc",)),
        meaning="Forget the momentum of what was sent, so that stale momentum does not carry it further.",
        reason="The velocities at the places that were selected become zero.",
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
    accumulate_steps: int = knob(
        1,
        fate="carried out",
        unit="micro-batches",
        ge=1,
        le=100_000,
        meaning="Gradient merge: micro-batches per update, their gradients averaged.",
        reason="Gradients are summed in the program and sent once per update, beside the last backward pass. A step of "
        "the script is one micro-batch; step the learning rate once per update.",
    )
    amp_level: Literal["O0", "O1", "O2"] = knob(
        "O0",
        fate="carried out",
        meaning="Mixed precision: O0 = float32, O1 = matrix products and convolutions in amp_dtype, O2 = also what "
        "follows them.",
        refused={
            "O3": "Apex's pure half precision keeps parameters in 16 bits, too, where an update smaller than "
            "1/256 of a bfloat16 parameter is lost; use O2, which keeps float32 parameters"
        },
        reason="A pass over the forward program. Parameters, gradients and communication stay float32. Apex's O3 (pure "
        "half precision) is refused: small updates would be lost.",
    )
    amp_dtype: Literal["bfloat16", "float16"] = knob(
        "bfloat16",
        fate="carried out",
        only_with=OnlyWith("amp_level", ("O1", "O2")),
        meaning="The low precision. float16 needs a GPU and a loss scale.",
        reason="float16 is refused on CPU: Paddle has no such matrix product there.",
    )
    amp_keep_batch_norm_fp32: bool = knob(
        True,
        fate="carried out",
        only_with=OnlyWith("amp_level", ("O2",)),
        meaning="Batch norm computes in float32 in O2 as well (in O1 it always does). false needs a GPU.",
        reason="Statistics and their update are float32 in any case. Refused when false on CPU, which has no bfloat16 "
        "batch norm.",
    )
    amp_init_loss_scaling: float = knob(
        32768.0,
        fate="carried out",
        ge=1,
        le=2.0**32,
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="First loss scale of float16.",
        reason="An overflow is judged after the gradients were averaged, so that all ranks skip the same updates. The "
        "scale is saved.",
    )
    amp_dynamic_loss_scaling: bool = knob(
        True,
        fate="carried out",
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Raise and lower the loss scale by itself. false = it stays amp_init_loss_scaling.",
        reason="An update with an overflow is skipped on every rank in either case.",
    )
    amp_incr_every_n_steps: int = knob(
        1000,
        fate="carried out",
        unit="updates",
        ge=1,
        le=1_000_000_000,
        needs="amp_dynamic_loss_scaling",
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Raise the loss scale after so many updates without overflow in a row.",
        reason="Fleet's default. The count is saved.",
    )
    amp_decr_every_n_nan_or_inf: int = knob(
        2,
        fate="carried out",
        unit="updates",
        ge=1,
        le=1_000_000,
        needs="amp_dynamic_loss_scaling",
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Lower the loss scale after so many overflows in a row.",
        reason="Fleet's default. The count is saved.",
    )
    amp_incr_ratio: float = knob(
        2.0,
        fate="carried out",
        gt=1,
        le=1024,
        needs="amp_dynamic_loss_scaling",
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Raise the loss scale to so many times what it was.",
        reason="Fleet's default; powers of two change no digit of a gradient.",
    )
    amp_decr_ratio: float = knob(
        0.8,
        fate="carried out",
        gt=0,
        le=0.99,
        needs="amp_dynamic_loss_scaling",
        only_with=OnlyWith("amp_dtype", ("float16",)),
        meaning="Lower the loss scale to this share of what it was, but not below 1.",
        reason="Fleet's default.",
    )
    sync_batch_norm: bool = knob(
        False,
        fate="carried out",
        meaning="Batch norm over the batches of all ranks, forward and backward.",
        reason="On GPUs by Paddle's operator, on CPU composed of operators that exchange sums. Two small exchanges per "
        "layer and step, which nothing hides.",
    )
    recompute_segments: int = knob(
        0,
        fate="carried out",
        unit="segments",
        ge=0,
        le=10_000,
        meaning="Recompute: cut the forward pass into so many pieces and keep only what crosses a cut; the rest is "
        "computed again in the backward pass. 0 = off.",
        reason="Operators are cloned in front of their gradients; results are the same bit by bit. Random "
        "operators run "
        "once. Saves memory, costs up to a second forward pass.",
    )
    recompute_every_blocks: int = knob(
        0,
        fate="carried out",
        unit="blocks",
        ge=0,
        le=10_000,
        meaning="Recompute: cut in front of every so many blocks instead. A block begins where a weight of two or more "
        "dimensions is read. 0 = off.",
        reason="Cuts follow the layers, so that little crosses a cut. Same results as with recompute_segments.",
    )
    recompute_checkpoints: list[str] = knob(
        factory=list,
        fate="carried out",
        meaning="Recompute: cut in front of the first operator that reads the parameter of each name instead.",
        reason="Values have no names in today's programs, parameters do. A name that the loss does not depend on is an "
        "error.",
    )
    divergence_check_steps: int = knob(
        100,
        fate="carried out",
        unit="steps",
        ge=0,
        le=1_000_000_000,
        meaning="Compare a digest of all parameters over the ranks at the first step and every so many steps. 0 "
        "= never.",
        reason="A drift stops the job and names the parameter and the rank. With LocalSGD: at every averaging instead.",
    )
    collective_timeout_seconds: int = knob(
        300,
        fate="carried out",
        unit="seconds",
        ge=1,
        le=86_400,
        meaning="How long a rank waits for another one inside a step before it stops.",
        reason="The rank stops with an error that names the bucket and the ranks that did not come.",
    )
    environment: dict[str, str] = knob(
        factory=dict,
        fate="carried out",
        meaning="Variables for the workers, such as NCCL_IB_DISABLE or FLAGS_fraction_of_gpu_memory_to_use.",
        reason="Set for every worker before Paddle starts. A FLAGS_* name that the installed Paddle does not know is "
        "refused; names that choose ranks, devices or endpoints belong to the launcher.",
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
