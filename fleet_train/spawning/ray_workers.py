"""What makes a worker of Ray one rank of a job: the variables that other engines set. No Ray, no Paddle."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from fleet_train.cluster.at_import import advise, advise_this_process, advised
from fleet_train.cluster.engines import ENGINE, STARTER
from fleet_train.cluster.store.access import JOB_ID, SECRET, SECRET_FILE
from fleet_train.launch.node import SCRUBBED, refuse_ours
from fleet_train.spawning.rank_main import cause_reported, offer

_OF_TORCHRUN = frozenset({"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"})


@dataclass(frozen=True)
class RayAttempt:
    """The settings of one attempt, the same for all workers."""

    job: str
    """Authenticates the connections of this attempt."""
    secret: str
    launched: str
    """The same in all attempts of one run: identifies its checkpoints."""
    number: int
    """0, 1, 2, ...; above 0, a trainer resumes."""
    join_timeout_seconds: float


def become_rank(
    places: Sequence[tuple[str, int]],
    rank: int,
    attempt: RayAttempt,
    profile_environment: Mapping[str, str],
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """In a worker's process, before its training function is loaded: it becomes this rank.

    ``places``: of each worker, its node's address and a port that was free there; rank 0 listens on its own. A user's
    own variables override the profile's and our advice.
    """
    refuse_ours(profile_environment)
    for name in SCRUBBED | _OF_TORCHRUN | advised(environ) | {SECRET_FILE}:
        environ.pop(name, None)
    advise(environ, {name: str(value) for name, value in profile_environment.items()})
    (master, port), (address, _) = places[0], places[rank]
    local = [index for index, (other, _) in enumerate(places) if other == address]
    variables = {
        ENGINE: "torchrun",
        STARTER: "Ray Train",
        "RANK": str(rank),
        "WORLD_SIZE": str(len(places)),
        "LOCAL_RANK": str(local.index(rank)),
        "LOCAL_WORLD_SIZE": str(len(local)),
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "FLEET_TRAIN_JOIN_TIMEOUT": f"{attempt.join_timeout_seconds:g}",
        "FLEET_TRAIN_ATTEMPT": str(attempt.number),
        "FLEET_TRAIN_LAUNCHED": attempt.launched,
        JOB_ID: attempt.job,
        SECRET: attempt.secret,
    }
    environ.update(variables)
    advise_this_process(environ)


class InWorker:
    """Wraps a worker's training function: the profile is its default, and a failure is reported to the other ranks.

    Ray catches errors of the function, so no hook of the interpreter would see them.
    """

    def __init__(self, profile: Any) -> None:
        self._profile = profile

    def __enter__(self) -> None:
        offer(self._profile)

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        if error is not None:
            cause = cause_reported(error)
            if cause is not error:  # the executor has turned it into a SystemError
                raise cause from error
        elif "fleet_train.convert.session" in sys.modules:
            sys.modules["fleet_train.convert.session"].end()
