"""What a profile is called, how its program runs, and how gradients are sent: the first knobs of the table."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from fleet_train.profile.knobs import knob


class CommunicationKnobs(BaseModel):
    """Buckets, communicators, teams; names and executor before them."""

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
        reason="That many process groups of Gloo, each with a thread of its own, take the buckets in turn. On NCCL "
        "more than 1 is mapped to 1, and said: kernels of two communicators could wait for each other for ever.",
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
        meaning="Fetch the loss every so many steps. 1 = every step. Fetching waits for the step, so it costs. The "
        "loop decides: one of your own that names the loss in every `fetch_list` gets it in every step.",
        reason="By the reference trainer, and by a loop of your own that asks `fleet.should_fetch(step)`.",
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
    barrier_every_steps: int = knob(
        1,
        fate="carried out",
        unit="synchronous steps",
        ge=1,
        le=1_000_000,
        meaning="How often the ranks meet in the job's store before they send: 1 = at every synchronous step. More "
        "spares very short steps the meeting. Stop requests and the ranks' times travel with it, so a stop is known "
        "up to that many steps later, less one. Between two meetings a missing rank is named all the same, but how "
        "long it is waited for is not ours on Gloo: a rank that pauses for more than 30 s between two of them fails "
        "the job. On NCCL it is waited for as long as `collective_timeout_seconds` says.",
        reason="With more than 1 a barrier stands before the first two steps of a program, every so many steps, the "
        "first one after a call that all ranks make together (saves, evaluations that gather, fleet.barrier_worker, "
        "the comparisons of `divergence_check_steps`) or after another program's steps, and each one for as long as "
        "the slowest rank's step takes more than 1 s. Averagings of LocalSGD keep theirs; so do the forward passes of "
        "synchronised batch norm.",
    )
