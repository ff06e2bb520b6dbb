"""What rank 0 says of a loss."""

from __future__ import annotations

from typing import Any

from fleet_train.collectives.job import Job
from fleet_train.convert.passes.joint_batch.kinds import Findings
from fleet_train.convert.passes.program import line_of
from fleet_train.errors import ConversionError
from fleet_train.log import log_once


def say(found: Findings, job: Job) -> None:
    """Say what of a loss cannot be the joint batch's (with ``--strict`` an error), and what was taken to be so."""
    if found.assumed:
        notices = [f"{_line(operator)}: the constant is taken as {what}" for operator, what in found.assumed]
        log_once(notices, job.cluster.rank)
    if found.undecided:
        reasons: dict[str, list[str]] = {}
        for operator, reason in found.undecided:
            reasons.setdefault(reason, []).append(_line(operator))
        places = "; ".join(f"{reason}: {', '.join(dict.fromkeys(lines))}" for reason, lines in reasons.items())
        job.advise(
            ConversionError(
                f"the loss depends on the batch in a way that each rank computes with its own samples alone, not with "
                f"the joint batch ({places}); let samples meet those of all ranks, value = "
                "fleet.all_gather_samples(value), or accept it: average_over: ranks in the profile, "
                "--set average_over=ranks"
            )
        )


def _line(operator: Any) -> str:
    name = str(operator.name()).rpartition(".")[2].rstrip("_")
    line = line_of(operator)
    return f"{line}, {name}" if line else name
