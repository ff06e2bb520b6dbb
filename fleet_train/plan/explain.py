"""A plan as readable text."""

from __future__ import annotations

from fleet_train.plan.plan import Bucket, CommPlan


def explain(plan: CommPlan) -> str:
    """Buckets, bytes and collectives per step, and what each knob did."""
    lines = [
        f"profile {plan.profile_name or '(defaults)'}: {_count(plan.world_size, 'rank')} on "
        f"{_count(plan.node_num, 'node')}, {_count(plan.communicators, 'communicator')}",
        "",
        f"{'bucket':>6}  {'gradients':>9}  {'MB':>9}  {'dtype':<9} {'communicator':>12}  {'algorithm':<12} names",
    ]
    for bucket in plan.buckets:
        names = f"{bucket.gradients[0].name} .. {bucket.gradients[-1].name}"
        lines.append(
            f"{bucket.index:>6}  {len(bucket.gradients):>9}  {bucket.nbytes / 2**20:>9.3f}  {bucket.dtype:<9} "
            f"{bucket.communicator:>12}  {_how(bucket):<12} "
            f"{names if len(bucket.gradients) > 1 else bucket.gradients[0].name}"
        )
    lines += [
        "",
        *_per_update(plan),
        f"digest: {plan.digest}",
        "",
        "effect of each knob:",
    ]
    lines += [f"  {note.knob}: {note.effect}" for note in plan.notes]
    return "\n".join(lines)


def _per_update(plan: CommPlan) -> list[str]:
    """Collectives and bytes; with LocalSGD those of an averaging, and separately of the warm-up."""
    gradients = f"{_collectives(plan, True)}, {_sent(plan, True)} for {_mb(plan.gradient_bytes)} MB of gradients"
    lines = [f"per update: {gradients}"]
    if plan.averaging is not None:
        averaging = (
            f"{_collectives(plan, False)} every {plan.averaging.period} updates, {_sent(plan, False)} per update"
        )
        lines = [f"in the warm-up, per update: {gradients}", f"after it: {averaging}"]
    if plan.statistics:
        number = _count(len(plan.statistics) * plan.accumulate_steps, "collective")
        lines.append(f"of these for synchronised batch norm: {number}, not overlapped")
    return lines


def _collectives(plan: CommPlan, warm_up: bool) -> str:
    return _count(len(plan.phases(warm_up)), "collective")


def _sent(plan: CommPlan, warm_up: bool) -> str:
    sent = plan.sent_by_rank(warm_up)
    low, high = _mb(min(sent)), _mb(max(sent))
    return f"{high} MB sent by each rank" if low == high else f"{low} to {high} MB sent by a rank"


def _mb(nbytes: float) -> str:
    return f"{nbytes / 2**20:.3f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _how(bucket: Bucket) -> str:
    return bucket.algorithm if bucket.compression == "none" else f"{bucket.algorithm}, {bucket.compression}"
