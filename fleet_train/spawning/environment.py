"""What a spawn needs before its ranks start: not to be a rank itself, and a store where they meet.

The store is on this machine's loopback address, on a port chosen by the kernel, with a separate secret, so that two
concurrent spawns cannot interfere. Spawning from a rank is an error, of two kinds.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Mapping

from fleet_train import timeouts
from fleet_train.cluster.engines import detect
from fleet_train.cluster.store.access import Access
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.reports import FailureReport
from fleet_train.cluster.store.server import StoreServer
from fleet_train.errors import ClusterError, FleetTrainError

_loading = ""
"""The function that this rank is about to call; empty once it is loaded."""


class CalledWhileImported(ClusterError):
    """``spawn`` is called at the top level of a module that the ranks import."""


def finding(train: str) -> None:
    """This process is a rank that imports the modules of ``train``; "" when it is done."""
    global _loading
    _loading = train


def refuse_within_a_rank(environ: Mapping[str, str]) -> None:
    """Raise ClusterError if this process is a rank itself, of any launcher."""
    if _loading:
        module, place = _caller()
        raise CalledWhileImported(
            f"fleet_train.spawn is called at the top level of {module} ({place}), which every rank imports to find "
            f'{_loading}; put the call below `if __name__ == "__main__":`, or into a function'
        )
    number = environ.get("PADDLE_TRAINER_ID", "")
    if environ.get("FLEET_TRAIN_STORE") or environ.get("PADDLE_TRAINERS_NUM", "1") not in ("", "1"):
        raise ClusterError(
            f"fleet_train.spawn was called in rank {number or '?'} of a job, and a rank cannot start ranks; "
            "call it from a script or a notebook that no launcher has started, or call the function itself here"
        )
    started = detect(environ)
    if started is not None and started.count > 1:
        raise ClusterError(
            f"fleet_train.spawn was called in process {started.index} of {started.count} that {started.engine} has "
            "started, each of which would start a separate job; call fleet.init in them instead, or set "
            "FLEET_TRAIN_ENGINE=none if that is intended"
        )


def _caller() -> tuple[str, str]:
    """(module, file:line) of the code that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("fleet_train."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "?")), f"{frame.f_code.co_filename}:{frame.f_lineno}"


HOST = "127.0.0.1"
_ROUND = "0"


class SpawnStore:
    """``job``: the id of its connections; ``secret``: authenticates them."""

    def __init__(self, ranks: int) -> None:
        self.job = f"spawn-{secrets.token_hex(6)}"
        self.secret = secrets.token_hex(24)
        access = Access(self.job, self.secret.encode(), HOST)
        self._server = StoreServer(HOST, 0, access, members=ranks).start()
        try:
            self._server.open_root(_ROUND)
            self._client = StoreClient.connect(
                self.endpoint,
                0,
                group="spawn",
                timeout_seconds=timeouts.SPAWN_ANSWER_SECONDS,
                watched=False,
                access=access,
            )
            self._zero = self._client.clock()
        except BaseException:
            self._server.stop()
            raise

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def endpoint(self) -> str:
        return f"{self._server.endpoint}/{_ROUND}"

    def reports(self) -> list[FailureReport]:
        """The ranks' reports so far, in seconds since the store was created; anything else is skipped."""
        with contextlib.suppress(FleetTrainError):
            return FailureReport.of_store(self._client.failures(), self._zero)
        return []

    def report_ended(self, rank: int) -> None:
        """Report that the others need not wait for this rank: its call has returned."""
        with contextlib.suppress(FleetTrainError):
            self._client.ended("rank", rank)

    def close(self) -> None:
        self._client.close()
        self._server.stop()
