"""The rendezvous store of one spawn: on this machine's loopback address, on a port chosen by the kernel, with a
separate secret, so that two concurrent spawns cannot interfere."""

from __future__ import annotations

import contextlib
import secrets

from fleet_train.cluster.failure_report import FailureReport
from fleet_train.cluster.store.client import StoreClient
from fleet_train.cluster.store.protocol.access import Access
from fleet_train.cluster.store.servers.server import StoreServer
from fleet_train.errors import FleetTrainError

HOST = "127.0.0.1"
_ROUND = "0"
_ANSWER_SECONDS = 5.0


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
                self.endpoint, 0, group="spawn", timeout_seconds=_ANSWER_SECONDS, watched=False, access=access
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
        found = []
        with contextlib.suppress(FleetTrainError):
            for told, at in self._client.failures():
                with contextlib.suppress(TypeError, KeyError):
                    found.append(FailureReport.from_json(told).at(at - self._zero))
        return found

    def tell_ended(self, rank: int) -> None:
        """Report that the others need not wait for this rank: its call has returned."""
        with contextlib.suppress(FleetTrainError):
            self._client.ended("rank", rank)

    def close(self) -> None:
        self._client.close()
        self._server.stop()
