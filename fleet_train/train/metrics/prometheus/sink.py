"""The newest record for Prometheus to scrape: `/metrics` on a port of rank 0's machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from prometheus_client.core import Metric as Family

from fleet_train import __version__, fleet
from fleet_train.errors import FleetTrainError
from fleet_train.train.components.rank0 import ask_first_worker
from fleet_train.train.metrics.prometheus.server import MetricsServer
from fleet_train.train.metrics.prometheus.table import Snapshot, families
from fleet_train.train.metrics.sinks import MetricSink, NullSink, Pixels, Scalars, Settings

DEFAULT_HOST = "127.0.0.1"
_ASK_AGAIN_SECONDS = 1.0

Gone = Callable[[], Mapping[int, str]]
"""Ranks that have left or are lost, from `fleet.gone_workers`."""


class PrometheusSink:
    """Serves the last written record. For your own loop: `open_prometheus`, or on rank 0 this and `write`."""

    def __init__(self, port: int, host: str = DEFAULT_HOST, gone: Gone | None = None) -> None:
        """`port` 0: any free one; see `address`. Raises ClusterError if it cannot listen, naming the process that
        does."""
        self._lock = threading.Lock()
        self._shown = Snapshot(info={"version": __version__})
        self._reported_at: dict[int, float] = {}
        self._gone = gone
        self._last_gone: tuple[float, Mapping[int, str] | None] = (float("-inf"), {})
        self._server = MetricsServer(host, port, self._collect)
        self.port, self.address = self._server.port, self._server.address

    def write(self, step: int, scalars: Scalars) -> None:
        with self._lock:
            curves = {**self._shown.curves, **scalars}
            self._shown = replace(self._shown, step=step, recorded_at=time.time(), curves=curves)

    def ranks(self, step_ms: Sequence[float], wait_ms: Sequence[float]) -> None:
        """0 for a rank without a report since the last record; its earlier value stays."""
        now = time.monotonic()
        with self._lock:
            told = [rank for rank, value in enumerate(step_ms) if value > 0 or len(step_ms) == 1]
            self._reported_at |= dict.fromkeys(told, now)
            self._reported_at = dict.fromkeys(range(len(step_ms)), now) | self._reported_at  # from the first record on
            if len(step_ms) > 1:
                self._shown = replace(
                    self._shown,
                    rank_step_ms=self._shown.rank_step_ms | {rank: step_ms[rank] for rank in told},
                    rank_wait_ms=self._shown.rank_wait_ms | {rank: wait_ms[rank] for rank in told},
                )

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        """The profile's and the model's name become labels."""
        del metrics
        told = {name: str(settings[name]) for name in ("profile", "model") if name in settings}
        with self._lock:
            self._shown = replace(self._shown, info=self._shown.info | told)

    def text(self, step: int, tag: str, text: str) -> None:
        """Prometheus does not store texts."""

    def image(self, step: int, tag: str, pixels: Pixels) -> None:
        """Nor images."""

    def close(self) -> None:
        self._server.close()

    def _collect(self) -> Iterator[Family]:
        now = time.monotonic()
        with self._lock:
            shown, reported_at = self._shown, dict(self._reported_at)
        ages = {rank: now - at for rank, at in reported_at.items()}
        return families(replace(shown, rank_age_seconds=ages, rank_up=self._up(reported_at)))

    def _up(self, ranks: Iterable[int]) -> dict[int, bool]:
        """Empty if unknown: the job's store does not answer."""
        gone = self._ask_who_is_gone()
        return {} if gone is None else {rank: rank not in gone for rank in ranks}

    def _ask_who_is_gone(self) -> Mapping[int, str] | None:
        asked_at, gone = self._last_gone
        if time.monotonic() - asked_at < _ASK_AGAIN_SECONDS:
            return gone
        try:
            gone = self._gone() if self._gone is not None else {}
        except FleetTrainError:
            gone = None
        self._last_gone = time.monotonic(), gone
        return gone


def open_prometheus(port: int, host: str = DEFAULT_HOST) -> MetricSink:
    """On rank 0 a `PrometheusSink` with the other ranks' state, elsewhere a `NullSink`. All ranks call it; if it cannot
    listen, it raises ClusterError on all."""
    made: list[MetricSink] = []
    ask_first_worker(lambda: made.append(PrometheusSink(port, host, fleet.gone_workers)))
    return made[0] if made else NullSink()
