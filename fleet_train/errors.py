"""Every error that fleet_train raises on purpose, and the exit code of each.

FleetTrainError                  1  an error of fleet_train without a more specific class
├── DataWorkersLost              1  data worker processes keep dying, or hang; a restart may help
├── PaddleUnusable               3  Paddle is missing, too old, or switched to the old IR
├── ProfileError                 4  a profile or strategy asks for something that cannot be done
├── ClusterError                 5  the launch flags or the environment describe no usable cluster
│   └── JoinTimeout              6  ranks did not arrive within the timeout
├── ConversionError              7  the program cannot be converted as asked
├── ScheduleMismatch             8  ranks disagree on what will be communicated
├── CheckpointError              9  saved state is missing, cut off, altered, or of another model
├── DataError                   10  the training data cannot be used as asked
├── WorkerFailed                11  another rank failed, left, or did not answer in time
│   ├── LinkFailed              11  ranks that are alive could not communicate: no rank is to blame
│   └── RankFailed              11  a rank that ``fleet_train.spawn`` has started has failed
├── Preempted                   12  stopped gracefully because it was asked to (SIGTERM); start it again to continue
├── NotFinite                   13  the loss or the weights have become NaN or infinite
├── NotSaved                    14  the training ended, but its last state could not be saved, or not everywhere
└── ComputeFault                15  two results from the same inputs: a fault of the machine; a restart may help

Exit code 2 is the command line's own (usage). A failed rank's own exit code is passed on by the launcher.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GUIDE = "docs/from-other-frameworks.md"
"""The page about lines for PyTorch, Apex, Horovod and DALI, to which messages point."""

# Characters that move the cursor, change colours or the title, or reverse the text direction; surrogates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text for terminals and logs: control characters as ``\\x1b``; line ends and tabs are unchanged."""
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_line(text: str) -> str:
    """A name within a line as `printable` shows it, with line ends and tabs as escapes, too, so that it cannot forge a
    line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


@dataclass(frozen=True)
class Absence:
    """A member that did not arrive in time, and its state: ``did not arrive at step 4 within 2 s``."""

    member: int
    kind: str
    """``missing`` (it may still be running), ``elsewhere`` (it waits at another point), ``left`` (its process
    disconnected properly) or ``lost``."""
    what: str


_printed: set[str] = set()


def is_news(error: BaseException) -> bool:
    """Whether this process asks for the first time with an error of this text: a watchdog and the computing thread may
    end the process with the same one."""
    text = str(error)
    is_new = text not in _printed
    _printed.add(text)
    return is_new


class FleetTrainError(Exception):
    """Base class: the message says what was given, the rule, and the fix."""

    exit_code = 1
    absent: tuple[Absence, ...] = ()
    """The members whose absence caused this error; empty if there are none or another rank has reported them."""
    failed_rank: int | None = None
    """The rank whose failure it is, where all ranks raise the error of one; None: the rank that raises it."""

    def __str__(self) -> str:
        # Messages contain names from files and from the network.
        return printable(super().__str__())


class PaddleUnusable(FleetTrainError):
    """The installed Paddle cannot run static PIR programs with host operators."""

    exit_code = 3


class ProfileError(FleetTrainError):
    """A profile or a strategy object asks for something unknown, contradictory or refused."""

    exit_code = 4


class ClusterError(FleetTrainError):
    """The launch flags or the environment do not describe a usable cluster."""

    exit_code = 5


class JoinTimeout(ClusterError):
    """Some ranks did not arrive within the timeout; the message lists them with their hosts."""

    exit_code = 6


class ConversionError(FleetTrainError):
    """The program, the optimizer, or the order of calls does not allow the conversion."""

    exit_code = 7


class ScheduleMismatch(FleetTrainError):
    """Ranks disagree on world size, versions, profile or communication plan."""

    exit_code = 8


class CheckpointError(FleetTrainError):
    """Saved state is missing, cut off, altered, or belongs to another model."""

    exit_code = 9


class DataError(FleetTrainError):
    """The training data cannot be read or sharded as asked."""

    exit_code = 10


class DataWorkersLost(FleetTrainError):
    """Worker processes that decode images keep dying, or one can neither answer nor be killed."""


class WorkerFailed(FleetTrainError):
    """Another rank failed, left early, or did not answer in time; the message names it."""

    exit_code = 11


class LinkFailed(WorkerFailed):
    """Ranks that are alive could not communicate, or could not form a group: a restart may succeed."""


class RankFailed(WorkerFailed):
    """A spawned rank failed: ``rank``, its ``rank_exit_code`` or ``signal_number``, and its ``traceback`` as text.

    It is the rank that failed first; the message contains the traceback and the secondary failures.
    """

    def __init__(
        self, message: str, rank: int, rank_exit_code: int | None, signal_number: int | None, traceback: str
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.rank_exit_code = rank_exit_code
        self.signal_number = signal_number
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[RankFailed], tuple[object, ...]]:
        return type(self), (*self.args, self.rank, self.rank_exit_code, self.signal_number, self.traceback)


class Preempted(FleetTrainError):
    """Training was asked to stop (SIGTERM, SIGUSR1, ``fleet.request_stop``) and has saved its state."""

    exit_code = 12


class NotFinite(FleetTrainError):
    """The loss or the weights have become NaN or infinite; the message names step, rank and samples."""

    exit_code = 13


class NotSaved(FleetTrainError):
    """The training has ended or was stopped, but its last checkpoint, or a copy that was asked for, is missing."""

    exit_code = 14


class ComputeFault(FleetTrainError):
    """A rank computed two results from the same inputs: its machine is at fault. The message names rank, step and
    gradient."""

    exit_code = 15


_USAGE = 2  # the exit code of argparse and click
MISTAKES = frozenset({_USAGE}) | {
    kind.exit_code
    for kind in (PaddleUnusable, ProfileError, ConversionError, CheckpointError, DataError, NotFinite, NotSaved)
}
"""Exit codes after which another start, with the same files and flags, would fail again."""
