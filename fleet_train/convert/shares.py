"""``batch_shares``: the parts of the joint batch that the ranks take, as the profile asks and as they compute."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from statistics import median

from fleet_train.cluster.shares import bounded, dealt, measured_shares, part_of
from fleet_train.collectives.job import Job
from fleet_train.errors import DataError, ProfileError
from fleet_train.log import log_once
from fleet_train.profile import Profile

_FIRST_CALLS = 10
"""Calls of ``fleet.batch_size`` before the first measurement."""


class BatchShares:
    """The shares of all ranks, the same on every rank. Raises ProfileError for numbers that do not fit the ranks."""

    def __init__(self, job: Job, profile: Profile) -> None:
        self._job, self._profile = job, profile
        self.is_auto = profile.batch_shares == "auto"
        self._calls = 0
        self.is_used = False
        """Whether somebody deals by them."""
        self._most = self._numbers("max_share", profile.max_share)
        try:
            self.now = tuple(bounded(self._numbers("batch_shares", profile.batch_shares), self._most))
            """Parts of 1, by rank."""
        except DataError as error:
            raise ProfileError(f"{error}; use larger bounds, or none") from None
        job.clock.last_ms.clear()  # of another training

    def _numbers(self, knob: str, given: str | float | list[float]) -> list[float]:
        """A number for each rank; 1 for what is no number, and for one process."""
        ranks = self._job.world_size
        if ranks == 1 or not isinstance(given, list):
            return [float(given) if isinstance(given, int | float) and ranks > 1 else 1.0] * ranks
        if len(given) != ranks:
            raise ProfileError(
                f"{knob}: {given} has {len(given)} numbers, and the job {ranks} ranks; give one for each, or "
                f"{'auto' if knob == 'batch_shares' else 'one number for all'}"
            )
        return [float(each) for each in given]

    @property
    def are_equal(self) -> bool:
        """Whether each rank takes the same part in the whole training."""
        return self._job.world_size == 1 or self._profile.batch_shares == "equal"

    def part(self, samples: int) -> slice:
        """This rank's place in a joint batch of so many samples. With ``auto`` all ranks call it once for each step, on
        the thread that trains: at times they measure and agree in it.

        Raises DataError for fewer samples than ranks.
        """
        self.is_used = True
        done, self._calls = self._calls, self._calls + 1
        if self.is_auto and self._job.world_size > 1:
            if threading.current_thread() is not threading.main_thread():
                raise DataError(
                    "fleet.batch_size with batch_shares: auto is called on another thread than the one that trains: "
                    "its ranks agree in it; call it in the loop, before the step"
                )
            every = self._profile.batch_shares_steps
            if done and (done % every == 0 or done == min(every, _FIRST_CALLS)):
                log_once(filter(None, [self.adjust(samples)]), self._job.cluster.rank)
        return part_of(samples, self.now, self._job.cluster.rank)

    def adjust(self, samples: int) -> str | None:
        """With ``auto``, go over to shares with which all ranks compute equally long, if that is worth it; returns what
        to say about a change. All ranks call it between the same two steps. ``samples``: of a joint batch.

        A rank's time is the median of its own time in the steps since the last call.
        """
        if not self.is_auto or self._job.world_size == 1:
            return None
        last = self._job.clock.last_ms
        mine = round(median(last), 3) if last else 0.0
        last.clear()
        with self._job.inside("batch_shares: auto"):
            of_ranks = self._job.all_gather(f"step times {self._job.count('step times')}", mine)
        times = [of_ranks[rank] for rank in range(self._job.world_size)]
        shares = measured_shares(dealt(samples, self.now), times, self._most)
        if shares is None:
            return None
        self.now = tuple(shares)
        return f"batch_shares: {self.in_words()}; a step took them {_listed(times)} ms of their own before"

    def record(self) -> list[float] | None:
        """What a checkpoint keeps; None for equal shares."""
        return None if self.are_equal else list(self.now)

    def resume(self, saved: Sequence[float] | None) -> list[str]:
        """With ``auto``, go on with the shares of a checkpoint; returns what to say."""
        if self.are_equal or saved is None or not self.is_auto:
            return []
        if len(saved) != len(self.now):
            return [f"batch_shares: the checkpoint has those of {len(saved)} ranks; they are measured anew"]
        fits = all(share <= most for share, most in zip(saved, self._most, strict=True))
        self.now = tuple(saved if fits else bounded(saved, self._most))  # max_share may be lower now
        return [f"batch_shares: {self.in_words()}"]

    def in_words(self) -> str:
        """``rank 0 takes 80 %, rank 1 20 %`` of the joint batch."""
        parts = [f"rank {rank} {'takes ' * (rank == 0)}{100 * part:.0f} %" for rank, part in enumerate(self.now)]
        return f"{', '.join(parts)} of the joint batch"


def _listed(times: Sequence[float]) -> str:
    return ", ".join(f"{each:.0f}" for each in times)
