"""A plan as text for people."""

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
        f"per step: {plan.collectives_per_step} collectives, {plan.gradient_bytes / 2**20:.3f} MB of gradients, "
        f"{plan.sent_bytes_per_step / 2**20:.3f} MB sent by each rank in flat rings",
        f"digest: {plan.digest}",
        "",
        "what each knob did:",
    ]
    lines += [f"  {note.knob}: {note.effect}" for note in plan.notes]
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _how(bucket: Bucket) -> str:
    return bucket.algorithm if bucket.compression == "none" else f"{bucket.algorithm}, {bucket.compression}"
