"""How ranks ended, and which of them was the first cause. Pure data and pure choices."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from fleet_train.errors import Preempted, WorkerFailed

_SHELL_SIGNAL_BASE = 128


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank. ``seconds`` count from the moment at which all launchers had met, on every node alike."""

    rank: int
    endpoint: str
    node_index: int
    exit_code: int | None  # None: a signal ended it, or it ended without a trace
    signal_number: int | None
    seconds: float
    asked_to_stop: bool
    log_file: str
    last_lines: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    @property
    def preempted(self) -> bool:
        """It was asked to stop, has saved its state, and stopped."""
        return self.exit_code == Preempted.exit_code

    @property
    def without_trace(self) -> bool:
        """Its wrapper was killed, so nobody wrote down how it ended."""
        return self.exit_code is None and self.signal_number is None

    @property
    def followed(self) -> bool:
        """It ended because something else had failed: we stopped it, or it reported that another rank was lost."""
        return (
            not self.succeeded
            and not self.preempted
            and (self.asked_to_stop or self.exit_code == WorkerFailed.exit_code)
        )

    @property
    def shell_code(self) -> int:
        """The exit code that a shell would show: 128 + signal; SIGKILL's for an end without a trace."""
        if self.exit_code is not None:
            return self.exit_code
        return _SHELL_SIGNAL_BASE + (self.signal_number or signal.SIGKILL)

    def how(self) -> str:
        """``exit code 3``, ``killed by SIGKILL``, ``stopped (SIGTERM)``, ..."""
        if self.without_trace:
            return "ended without a trace (its wrapper process was killed)"
        if self.signal_number is not None:
            return f"{'stopped' if self.asked_to_stop else 'killed'} by {signal_name(self.signal_number)}"
        if self.exit_code == WorkerFailed.exit_code:
            return f"exit code {self.exit_code} (another rank was lost)"
        if self.preempted:
            return f"exit code {self.exit_code} (stopped in good order)"
        return "finished" if self.succeeded else f"exit code {self.exit_code}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RankEnd:
        return cls(**{**data, "last_lines": tuple(data["last_lines"])})


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def choose_culprit(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The rank that failed first by itself; None when all succeeded or stopped in good order.

    Ranks that merely followed are considered only when nobody else failed, those that we stopped ourselves last.
    """
    failed = [end for end in ends if not end.succeeded and not end.preempted]
    return min(failed, key=lambda end: (end.asked_to_stop, end.followed, end.seconds, end.rank), default=None)


def end_from_record(record: dict[str, Any], start: float, endpoint: str, node_index: int, log_file: str) -> RankEnd:
    """The end that a worker wrapper wrote down; ``start`` is on the same monotonic clock as the record."""
    return RankEnd(
        rank=record["rank"],
        endpoint=endpoint,
        node_index=node_index,
        exit_code=record["exit_code"],
        signal_number=record["signal"],
        seconds=round(record["ended_monotonic"] - start, 3),
        asked_to_stop=record["asked_to_stop"] is not None,
        log_file=log_file,
    )


def last_lines(text: str, count: int = 15, width: int = 240) -> tuple[str, ...]:
    """The last lines that say something; of a progress bar only its last state, of a very long line its beginning."""
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    told = [line for line in lines if line]
    return tuple(line if len(line) <= width else line[: width - 3] + "..." for line in told[-count:])
