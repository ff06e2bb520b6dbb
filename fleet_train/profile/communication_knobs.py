"""The name of a profile, how its program runs, and how gradients are sent: the first knobs of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, create_model, field_validator

from fleet_train.profile.knobs import AUTO, Auto, OnlyWith, knob
from fleet_train.profile.methods import COMPRESSIONS, FAMILIES, NOT_HERE
from fleet_train.profile.methods.outer import OUTER_OPTIMIZERS, WITH_MOMENTUM


class CommunicationKnobs(BaseModel):
    """Knobs of a profile's name and executor, of buckets, communicators and local groups."""

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
        "them, written by `tools/bench.py quote`.",
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
    collective_stream: Literal["auto", "calc", "own"] = knob(
        AUTO,
        meaning="On NCCL, where collectives run. calc: on the calculation stream, where nothing can be read too early, "
        "and nothing overlaps. own: on a stream of each communicator, beside the backward pass. auto: calc, "
        "until a record of a GPU shows that own is right.",
        reason="own proves itself: in a program's first 3 steps each collective is repeated on the calculation stream, "
        "whose result is used; if one differs, all ranks go on with calc, and rank 0 says where. On Gloo, whose calls "
        "block the host, they are the same, which is said.",
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
    force_hierarchical_allreduce: bool = knob(
        False,
        needs="use_hierarchical_allreduce",
        meaning="Carry out the hierarchical allreduce on NCCL, too.",
        reason="Without it the allreduce is flat on NCCL, which is said: NCCL itself uses the links between and inside "
        "nodes, and three steps in turn stall the calculation stream. On Gloo it changes nothing.",
    )
    sharding: bool = knob(
        False,
        meaning="Each rank keeps the optimizer's state of its share of the parameters only, and updates only them "
        "(ZeRO). Parameters are those of a job without it.",
        reason="A bucket's gradients are summed at the owners of its parameters, who run the update and send the new "
        "values to the others. A parameter is cut by rows where a bucket would otherwise be uneven by more than 20 %. "
        "Source: Rajbhandari et al. 2020.",
    )
    sharding_stage: int = knob(
        2,
        fate="mapped",
        ge=1,
        le=2,
        needs="sharding",
        meaning="ZeRO's stage: 1 shares the optimizer's state, 2 also frees gradients once their owners have them.",
        refused={3: "shares the parameters themselves, but here every rank computes with all of them; use 2"},
        reason="The executor frees a gradient after its last reader, the operator that starts its bucket, so stage 1 "
        "is carried out as stage 2.",
    )
    sharding_degree: int = knob(
        0,
        unit="ranks",
        ge=0,
        le=1024,
        needs="sharding",
        meaning="How many neighbouring ranks share one copy of the state; their sums are averaged with the other "
        "groups'. 0 = all ranks.",
        reason="It divides the number of ranks. That of a node keeps the exchange of parameters inside the node.",
    )
    sparse_embeddings: bool | Auto = knob(
        AUTO,
        meaning="Send of an embedding's gradient the rows that a step has touched, not the whole table. true: of every "
        "embedding that can be sent so; false: none; auto: those where it pays, decided anew by what steps touch.",
        reason="The ranks gather how many rows each has, then indices and values, and add them in float32 in the order "
        "of ranks: the sum of whole tables but for the order of its terms. A step whose rows take more bytes than the "
        "table sends the table. Optimizers get a dense gradient; plain SGD updates the touched rows alone.",
    )
    sync_nccl_allreduce: bool = knob(
        False,
        meaning="Wait for each bucket before the next operator starts, so that nothing overlaps. For debugging: Fleet "
        "1.8's advice was to set it for speed, today it is slower.",
        reason="The operator that starts a bucket waits for it. Results are bit-equal, the step is slower.",
    )
    overlap_next_step: bool = knob(
        False,
        meaning="Update parameters in the next step, each right before its first use, so that gradients are sent under "
        "the next forward pass, too. Losses, variables and checkpoints have the same bits.",
        reason="A run of the program waits for the averages of the run before, bucket by bucket, updates, and computes "
        "on; learning rate and loss scale are those of the step whose gradients they are. Whatever reads a variable "
        "between two steps (a save, an evaluation, a fetch of a parameter, fleet.flush()) makes the update first. With "
        "one process there is nothing to overlap. Source: Peng et al. 2019 (ByteScheduler), for the order.",
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
        "timeout is `collective_timeout_seconds`, and the value is 10 unless it is set: the host, which is ahead of "
        "the device, waits at a barrier.",
        reason="With more than 1, these steps have a barrier: the first 3 of a program, every n-th one (n is this "
        "value), the first one after a call that all ranks make together (saves, evaluations that gather, "
        "fleet.barrier_worker, the comparisons of `divergence_check_steps`) or after another program's steps, and "
        "every step while the slowest rank's step takes more than 1 s. Averagings of LocalSGD keep theirs; so do the "
        "forward passes of synchronised batch norm. Exchanges of `average_over: samples` wait for the step's; "
        "each has its own with gradient merge or synchronised batch norm, and while steps take more than 5 s.",
    )

    @field_validator(
        "nccl_comm_num", "fuse_grad_size_in_MB", "last_comm_group_size_MB", "sparse_embeddings", mode="wrap"
    )
    @classmethod
    def _auto_or_a_number(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        """Check a value that may be ``auto``: the range is for numbers."""
        return AUTO if isinstance(value, str) and value == AUTO else read(value)


# The knobs of LocalSGD and of momentum over its periods.


if TYPE_CHECKING:
    OuterName = str
else:
    OuterName = Literal[tuple(OUTER_OPTIMIZERS)]
_WITH_MOMENTUM = OnlyWith("outer_optimizer", WITH_MOMENTUM, default_fits=True)


class LocalSgdKnobs(CommunicationKnobs):
    """Knobs that say when parameters are averaged, what is sent, and how the average is used."""

    use_local_sgd: bool = knob(
        False,
        meaning="Train locally and average parameters periodically, instead of gradients in every step.",
        reason="After the warm-up no gradient is sent; the parameters (and batch-norm statistics) are averaged at the "
        "end of a period, before every save, and by fleet.synchronize_parameters(). Source: Stich 2018, Lin 2018.",
    )
    local_sgd_is_warm_steps: int = knob(
        100,
        unit="steps",
        ge=0,
        le=1_000_000_000,
        needs="use_local_sgd",
        meaning="Synchronous steps before LocalSGD starts. Fleet's advice: up to the first drop of the learning rate.",
        reason="In these steps gradients are averaged as without LocalSGD.",
    )
    local_sgd_steps: int = knob(
        2,
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
        needs="use_local_sgd",
        meaning="How the period changes: constant; doubling from 1 up to local_sgd_steps; adaptive to learning "
        "rate and loss.",
        reason="Adaptive is AdaComm's rule, ceil(sqrt(lr0 / lr * loss / loss0) * local_sgd_steps), with the loss "
        "averaged over the ranks, kept within 1 .. local_sgd_max_steps. Source: Wang and Joshi 2018.",
    )
    local_sgd_max_steps: int = knob(
        64,
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
        needs="use_local_sgd",
        meaning="What happens to the optimizer's own state when parameters are averaged.",
        reason="keep: each rank keeps its own. average: averaged like the parameters (more bytes). reset: "
        "back to zero. Adam's bias correction continues in all three.",
    )
    local_sgd_dtype: Literal["float32", "bfloat16", "int8", "int4"] = knob(
        "float32",
        needs="use_local_sgd",
        meaning="What is sent when parameters are averaged: float32 values, or differences from the last averaging in "
        "bfloat16 (half the bytes), int8 (a quarter) or int4 (an eighth).",
        reason="Every rank adds the same averaged difference to the same kept copy, so that all ranks hold equal bits. "
        "int8 and int4 round according to `quantised_rounding` and keep the rounding errors for the next averaging.",
    )
    local_sgd_overlap_steps: int = knob(
        0,
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
        needs="use_local_sgd",
        meaning="Which layers form a fragment: every n-th one (strided), or neighbours (sequential).",
        reason="The paper found strided slightly better: each fragment has early and late layers.",
    )
    outer_optimizer: OuterName = knob(
        "none",
        needs="use_local_sgd",
        meaning="Momentum over periods: "
        + ", ".join(f"{name} ({OUTER_OPTIMIZERS[name].words})" for name in WITH_MOMENTUM)
        + ".",
        reason="Applied to the difference between the last averaged parameters and the new average. Sources: "
        + ", ".join(OUTER_OPTIMIZERS[name].source for name in WITH_MOMENTUM)
        + ".",
    )
    outer_lr: float = knob(
        1.0,
        gt=0,
        le=100,
        needs="use_local_sgd",
        only_with=_WITH_MOMENTUM,
        meaning="Learning rate of the outer optimizer. DiLoCo's advice: 0.7; SlowMo's: 1.",
        reason="1 with outer_momentum 0 is plain averaging.",
    )
    outer_momentum: float = knob(
        0.0,
        ge=0,
        le=0.999,
        needs="use_local_sgd",
        only_with=_WITH_MOMENTUM,
        meaning="Momentum of the outer optimizer. DiLoCo's advice: 0.9; SlowMo's: 0.4 to 0.8.",
        reason="Every rank keeps the momentum, equal on all; it is saved.",
    )


# The knobs of gradient compression: which one, and the settings that the listed compressions have.


if TYPE_CHECKING:
    CompressionName = str
else:
    CompressionName = Literal[tuple(COMPRESSIONS)]


def _sent_parts() -> str:
    """What compressions send: ``all of it, half the bits (bf16, fp16), ..., or low-rank factors (powersgd)``."""
    names: dict[str, list[str]] = {}
    for compression in COMPRESSIONS.values():
        names.setdefault(compression.words, []).append(compression.name)
    first, *parts = (f"{words} ({', '.join(own)})" for words, own in names.items())
    return f"{first.partition(' (')[0]}, {', '.join(parts[:-1])}, or {parts[-1]}"


def _compression_reason() -> str:
    *most, last = (compression.name for compression in COMPRESSIONS.values() if compression.has_error_feedback)
    sources = ", ".join(family.sources for family in FAMILIES if family.sources)
    return " ".join(
        [
            *(family.reason for family in FAMILIES if family.reason),
            f"{', '.join(most)} and {last} keep what is not sent and add it later; checkpoints contain it.",
            f"Sources: {sources}.",
        ]
    )


class CompressionChoice(LocalSgdKnobs):
    """The knob that says what is sent of a gradient, after those of LocalSGD."""

    compression: CompressionName = knob(
        "none",
        meaning=f"What is sent of a gradient: {_sent_parts()}.",
        reason=_compression_reason(),
        refused=NOT_HERE,
    )


if TYPE_CHECKING:
    CompressionKnobs = CompressionChoice
else:
    _settings = dict.fromkeys(each.knobs for each in COMPRESSIONS.values() if each.knobs is not None)
    CompressionKnobs = create_model("CompressionKnobs", __base__=(*reversed(_settings), CompressionChoice))
"""The choice, and the settings of all compressions, whose own files read them. The last base's fields come first."""
