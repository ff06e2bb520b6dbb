"""Agreements of all ranks: they continue or stop for the same reason, make the same number of steps, and deal alike."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from fleet_train import errors, fleet, timeouts
from fleet_train.convert.session import current_shares
from fleet_train.data import agree_steps


def ask_first_worker(question: Callable[[], Any]) -> Any:
    """Rank 0's answer (a JSON value) on every rank; if the call raises there, it raises on every rank.

    Otherwise the other ranks would wait in the next collective after an error on rank 0.
    """
    answer: dict[str, Any] = {}
    if fleet.is_first_worker():
        try:
            answer = {"value": question()}
        except errors.FleetTrainError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except OSError as error:
            way_out = "make that writable, with room left, or give another folder"
            answer = {"error": "CheckpointError", "message": f"rank 0 cannot use its disk: {error}; {way_out}"}
    answer = share(answer)
    if "error" in answer:
        raised: errors.FleetTrainError = getattr(errors, answer["error"])(answer["message"])
        raised.failed_rank = 0
        raise raised
    return answer["value"]


def share(value: Any) -> Any:
    """Rank 0's JSON value on every rank."""
    return fleet.gather(value)[0]


def agreed_steps(steps: int) -> int:
    """The number of steps that every rank can make; no rank ever waits for one that has finished."""
    counts = fleet.gather(steps)
    return agree_steps(counts, "truncate") if any(counts) else 0


def together(work: Callable[[], Any] | None, most_seconds: float) -> list[dict[str, Any]]:
    """Run ``work`` on the ranks that pass it; its JSON value, or the problem, by rank. All ranks call it.

    It may take long: it runs in a thread, while all ranks synchronize every second, so that no rank times out.
    CheckpointError on every rank, naming the ranks that have not finished, after ``most_seconds``.
    """
    deadline = time.monotonic() + most_seconds
    outcome: dict[str, Any] = {"value": None, "problem": None}

    def run() -> None:
        assert work is not None
        try:
            outcome["value"] = work()
        except (errors.FleetTrainError, OSError) as error:
            outcome["problem"] = str(error)
        except BaseException as error:
            outcome["problem"] = repr(error)

    thread = threading.Thread(target=run, name="fleet_train copies", daemon=True)
    if work is not None:
        thread.start()
    while True:
        if work is not None:
            thread.join(timeouts.RANKS_SYNC_SECONDS)
        mine = {"done": not thread.is_alive(), "is_late": time.monotonic() > deadline}
        states: list[dict[str, Any]] = fleet.gather(mine | outcome)
        endpoints = fleet.worker_endpoints()
        busy = [f"rank {rank} ({endpoints[rank]})" for rank, each in enumerate(states) if not each["done"]]
        if not busy:
            return states
        if any(each["is_late"] for each in states):
            late = errors.CheckpointError(
                f"{', '.join(busy)} has not read, sent or removed a checkpoint within {most_seconds:g} s: its disk "
                "does not answer, or is too slow. Give a slow disk longer (--checkpoint_timeout)"
            )
            late.failed_rank = [each["done"] for each in states].index(False)
            raise late


class Dealing:
    """Lets the loader of a loop deal by the profile's ``batch_shares``, which change between epochs. All ranks make the
    same calls.

    Raises DataError for a loader that cannot deal unlike shares.
    """

    def __init__(self, loader: Any) -> None:
        self._sampler: Any = getattr(loader, "sampler", None)
        if current_shares().are_equal:
            return
        if not hasattr(self._sampler, "deal"):
            what = type(loader if self._sampler is None else self._sampler).__name__
            raise errors.DataError(
                f"batch_shares: {fleet.profile().batch_shares} needs a ShardedBatchSampler (--shard_by sample), which "
                f"deals each joint batch; {what} does not: use batch_shares: equal, or feed fleet.batch_size(GLOBAL) "
                "samples in a loop of your own"
            )
        self.deal()

    def deal(self) -> None:
        """Before an epoch is opened."""
        shares = current_shares()
        if not shares.are_equal:
            shares.is_used = True
            self._sampler.deal(shares.now)

    def after_epoch(self) -> str | None:
        """Agree on the shares of the next epoch; returns what to say if they change."""
        shares = current_shares()
        if shares.are_equal:
            return None
        said = shares.adjust(self._sampler.batch_size * fleet.worker_num())
        self.deal()
        return said
