"""The name of a profile, how its program runs, and how gradients are sent: the first knobs of the table."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, field_validator

from fleet_train.profile.knobs import AUTO, Auto, OnlyWith, knob


class CommunicationKnobs(BaseModel):
    """Buckets, communicators, local groups; names and executor before them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    name: str = knob(
        "default",
        meaning="The profile's name in messages and records. Default: the file's name.",
        reason="Printed with the plan and kept in the run's records; it changes nothing in training.",
    )
    description: str = knob(
        "",
        meaning="The purpose of this profile in one line: its network and cluster.",
        reason="Shown by `fleet_train profiles`; it changes nothing in training.",
    )
    measured: list[str] = knob(
        factory=list,
        meaning="Measurements of this profile, a line each: on what, the numbers, and their record.",
        reason="Shown by `fleet_train profiles NAME`. Those of the catalogue's profiles are in `measured.json` beside "
        "them, written by tools/write_measured.py.",
    )
    nccl_comm_num: int | Auto = knob(
        AUTO,
        unit="communicators",
        ge=1,
        le=16,
        meaning="How many communicators send buckets in parallel. auto: chosen together with the size of buckets. "
        "Fleet's advice: 1 on one node, 2 on several.",
        reason="This many Gloo process groups, each with its own thread, send the buckets in turn. On NCCL more "
        "than 1 is mapped to 1, with a message: kernels of two communicators could deadlock.",
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
        "pool, which chooses its own size. Communicators have their own threads: nccl_comm_num + 1 is not needed.",
    )
    num_iteration_per_drop_scope: int = knob(
        30,
        fate="mapped",
        unit="steps",
        ge=1,
        le=1_000_000,
        meaning="After how many steps Fleet's executor dropped its local scopes.",
        reason="The current executor frees an intermediate variable after its last reader: no scope is left to drop.",
    )
    fetch_frequency: int = knob(
        1,
        unit="steps",
        ge=1,
        le=1_000_000,
        meaning="Steps between two fetches of the loss. 1 = every step. Fetching waits for the step, which costs time. "
        "The loop decides: with the loss in every `fetch_list`, your own loop fetches it in every step.",
        reason="Applied by the reference trainer, and by your own loop if it asks `fleet.should_fetch(step)`.",
    )
    fuse_all_reduce_ops: bool = knob(
        True,
        meaning="Gather gradients into buckets and allreduce a bucket at a time. false = one allreduce per gradient.",
        reason="The plan puts gradients into buckets in the order in which the backward pass finishes them.",
    )
    fuse_grad_size_in_MB: float | Auto = knob(
        AUTO,
        unit="MB (2**20 bytes)",
        gt=0,
        le=4096,
        needs="fuse_all_reduce_ops",
        meaning="Largest size of a bucket. A larger gradient gets a bucket of its own. auto: the best size by "
        "predicted step time for these gradients on this link. Fleet's rule of thumb: a tenth of all gradients.",
        reason="The plan closes a bucket before it would grow past this. auto: the link is measured briefly "
        "before the first step (link_gigabits, link_latency_ms), all ranks choose the same, and rank 0 prints it.",
    )
    fuse_parameter_groups_size: int = knob(
        50,
        unit="gradients",
        ge=1,
        le=100_000,
        needs="fuse_all_reduce_ops",
        meaning="Largest number of gradients in a bucket.",
        reason="The plan closes a bucket when it holds this many.",
    )
    last_comm_group_size_MB: float | Auto = knob(
        AUTO,
        unit="MB (2**20 bytes)",
        gt=0,
        le=4096,
        needs="fuse_all_reduce_ops",
        meaning="Largest size of the last bucket (its transfer overlaps no computation) and of the first one "
        "(so that communication starts early in the backward pass); never more than fuse_grad_size_in_MB. auto: chosen "
        "together with that.",
        reason="The plan closes the first bucket before it would grow past this, and puts the last gradients into a "
        "bucket of this size. Fleet 2.x bounds the group that is sent last under this name.",
    )
    link_gigabits: float = knob(
        0.0,
        unit="10^9 bits per second",
        ge=0,
        le=10_000,
        meaning="Bandwidth from a node to other nodes, per direction; on one node, from one rank to another. It "
        "decides the auto values. 0 = measure.",
        reason="All ranks time a few allreduces before the first step, for a fraction of a second, and take the "
        "slowest rank's numbers. Planning without a cluster, which cannot measure, takes 1 between nodes and 10 "
        "inside one.",
    )
    link_latency_ms: float = knob(
        0.0,
        unit="milliseconds",
        ge=0,
        le=10_000,
        meaning="Latency of one message of a collective on that link, for any size. 0 = measure.",
        reason="As link_gigabits; if both are given, nothing is measured. Planning without a cluster takes 0.1 between "
        "nodes and 0.03 inside one.",
    )
    use_hierarchical_allreduce: bool = knob(
        False,
        meaning="Reduce inside each node, allreduce between the nodes' leaders, broadcast inside each node.",
        reason="Every bucket takes three phases, and only the leaders' bytes cross between nodes. It needs "
        "several nodes with several ranks each to differ from the flat allreduce.",
    )
    hierarchical_allreduce_inter_nranks: int = knob(
        0,
        unit="ranks",
        ge=0,
        le=1024,
        needs="use_hierarchical_allreduce",
        meaning="How many neighbouring ranks form one inner group of the hierarchical allreduce. 0 = those of a node.",
        reason="The ranks are divided into local groups of this size; the first rank of a local group is its leader.",
    )
    sync_nccl_allreduce: bool = knob(
        False,
        meaning="Wait for each bucket before the next operator starts, so that nothing overlaps. For debugging.",
        reason="The operator that starts a bucket waits for it. Results are bit-equal, the step is slower.",
    )
    barrier_every_steps: int = knob(
        1,
        unit="synchronous steps",
        ge=1,
        le=1_000_000,
        meaning="Synchronous steps between two barriers in the job's store: 1 = a barrier at every synchronous step. "
        "More saves time if steps are very short. The barrier carries stop requests and the ranks' times, so a stop "
        "is known up to that many steps later, less one. Between two barriers a missing rank is still named, but Gloo "
        "sets the timeout: a rank that pauses for more than 30 s between two barriers fails the job. On NCCL the "
        "timeout is `collective_timeout_seconds`.",
        reason="With more than 1, these steps have a barrier: the first two of a program, every n-th one (n is this "
        "value), the first one after a call that all ranks make together (saves, evaluations that gather, "
        "fleet.barrier_worker, the comparisons of `divergence_check_steps`) or after another program's steps, and "
        "every step while the slowest rank's step takes more than 1 s. Averagings of LocalSGD keep theirs; so do the "
        "forward passes of synchronised batch norm.",
    )

    @field_validator("nccl_comm_num", "fuse_grad_size_in_MB", "last_comm_group_size_MB", mode="wrap")
    @classmethod
    def _auto_or_a_number(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        """The range is for numbers."""
        return AUTO if isinstance(value, str) and value == AUTO else read(value)


# The knobs of LocalSGD and of momentum over its periods.


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


# The knobs of gradient compression.


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
        False,
        fate="carried out",
        only_with=OnlyWith("compression", ("int8", "int4")),
        meaning="Send bfloat16 or float32 instead of int8 or int4 where the plan predicts shorter steps on this "
        "link. false = send the requested compression; rank 0 says where it probably does not pay.",
        reason="Encoding takes processor time, which a fast link does not save. The link is that of link_gigabits "
        "and link_latency_ms, measured if they are not given: with true, a run's numbers depend on that measurement. "
        "`recommend` tries what pays.",
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
