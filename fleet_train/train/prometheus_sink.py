"""The newest record for Prometheus to scrape: `/metrics` on a port of rank 0's machine."""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Family

from fleet_train import __version__, fleet
from fleet_train.cluster.network import port_owner
from fleet_train.errors import ClusterError, FleetTrainError, printable
from fleet_train.train.agree import ask_first_worker
from fleet_train.train.metrics import MetricSink, NullSink, Scalars, Settings

_METRICS_ASK_AGAIN_SECONDS = 1.0
"""Pause between two questions to the job's store which ranks are gone: scrapes may come more often."""

DEFAULT_HOST = "127.0.0.1"
PATH = "/metrics"

Gone = Callable[[], Mapping[int, str]]
"""Ranks that have left or are lost, from `fleet.gone_workers`."""


class PrometheusSink(NullSink):
    """Serves the last written record, of which Prometheus stores neither texts nor images.

    For your own loop: `open_prometheus`, or on rank 0 this and `write`.
    """

    def __init__(self, port: int, host: str = DEFAULT_HOST, gone: Gone | None = None) -> None:
        """`port` 0: any free one; see `address`. Raises ClusterError if it cannot listen, naming the process that
        does."""
        self._lock = threading.Lock()
        self._shown = Snapshot(info={"version": __version__})
        self._reported_at: dict[int, float] = {}
        self._gone = gone
        self._last_gone: tuple[float, Mapping[int, str] | None] = (float("-inf"), {})
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ClusterError(_why_not(host, port, error)) from None
        self.port = int(self._server.server_port)
        self.address = f"http://{host}:{self.port}{PATH}"

    def write(self, step: int, scalars: Scalars) -> None:
        with self._lock:
            curves = {**self._shown.curves, **scalars}
            self._shown = replace(self._shown, step=step, recorded_at=time.time(), curves=curves)

    def ranks(self, step_ms: Sequence[float], wait_ms: Sequence[float]) -> None:
        """Take each rank's times, 0 for a rank without a report since the last record; its earlier value stays."""
        now = time.monotonic()
        with self._lock:
            reporting = [rank for rank, value in enumerate(step_ms) if value > 0 or len(step_ms) == 1]
            # From the first record on, every rank has an age.
            self._reported_at = dict.fromkeys(range(len(step_ms)), now) | self._reported_at
            self._reported_at |= dict.fromkeys(reporting, now)
            if len(step_ms) > 1:
                self._shown = replace(
                    self._shown,
                    rank_step_ms=self._shown.rank_step_ms | {rank: step_ms[rank] for rank in reporting},
                    rank_wait_ms=self._shown.rank_wait_ms | {rank: wait_ms[rank] for rank in reporting},
                )

    def hparams(self, settings: Settings, metrics: Sequence[str]) -> None:
        """The profile's and the model's name become labels."""
        del metrics
        labels = {name: str(settings[name]) for name in ("profile", "model") if name in settings}
        with self._lock:
            self._shown = replace(self._shown, info=self._shown.info | labels)

    def close(self) -> None:
        """Close the server within a bounded time; a second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def collect(self) -> Iterator[Family]:
        """The metrics of a scrape, as a registry of the Prometheus client asks for them."""
        now = time.monotonic()
        with self._lock:
            shown, reported_at = self._shown, dict(self._reported_at)
        gone = self._ask_who_is_gone()
        ages = {rank: now - at for rank, at in reported_at.items()}
        is_up = {} if gone is None else {rank: rank not in gone for rank in ages}
        return families(replace(shown, rank_age_seconds=ages, rank_up=is_up))

    def _ask_who_is_gone(self) -> Mapping[int, str] | None:
        """Ask which ranks are gone, and why; None if unknown: the job's store does not answer."""
        asked_at, gone = self._last_gone
        if time.monotonic() - asked_at < _METRICS_ASK_AGAIN_SECONDS:
            return gone
        try:
            gone = self._gone() if self._gone is not None else {}
        except FleetTrainError:
            gone = None
        self._last_gone = time.monotonic(), gone
        return gone


def open_prometheus(port: int, host: str = DEFAULT_HOST) -> MetricSink:
    """Open a `PrometheusSink` with the other ranks' state on rank 0, a `NullSink` elsewhere. All ranks call it; if it
    cannot listen, it raises ClusterError on all."""
    made: list[MetricSink] = []
    ask_first_worker(lambda: made.append(PrometheusSink(port, host, fleet.gone_workers)))
    return made[0] if made else NullSink()


# The names, units and meanings of metrics; docs/watching.md lists them. They follow Prometheus' rules
# (prometheus.io/docs/practices/naming): base units, the unit last, `_total` for counters.

PREFIX = "fleet_train_"
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Metric:
    """A family of Prometheus's metrics. A curve's value over `divisor` is in the base unit."""

    name: str
    meaning: str
    divisor: float = 1.0

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"


_MS = 1000.0
# Curve -> metric; None: another metric says it.
OF_CURVES: dict[str, Metric | None] = {
    "train/loss": Metric("loss", "Loss of the joint batch at the newest record."),
    "train/epoch_loss": Metric("epoch_loss", "Mean of the fetched losses of the last epoch, over all ranks."),
    "train/epoch": Metric("epochs_total", "Finished epochs."),
    "train/learning_rate": Metric("learning_rate", "Learning rate of the next step."),
    "train/gradient_norm": Metric("gradient_norm", "Global norm of the averaged gradients, before clipping."),
    "train/loss_scale": Metric("loss_scale", "Loss scale of float16 mixed precision."),
    "test/loss": Metric("test_loss", "Loss of the last evaluation."),
    "test/accuracy": Metric("test_accuracy_ratio", "Accuracy of the last evaluation, 0 to 1."),
    "test/top5_accuracy": Metric("test_top5_accuracy_ratio", "Top-5 accuracy of the last evaluation, 0 to 1."),
    "speed/samples_per_second": Metric("samples_per_second", "Samples per second over all ranks."),
    "speed/step_ms": Metric("step_seconds", "Mean time of a step on rank 0.", _MS),
    "speed/data_ms": Metric("step_data_seconds", "Of it, waiting for the batch.", _MS),
    "speed/compute_ms": Metric("step_compute_seconds", "Of it, computing.", _MS),
    "speed/exposed_communication_ms": Metric(
        "step_exposed_communication_seconds", "Of it, waiting for other ranks' gradients.", _MS
    ),
    "speed/data_wait_share": Metric("step_data_ratio", "Share of a step that waits for the batch, 0 to 1."),
    "speed/compute_share": Metric("step_compute_ratio", "Share of a step that computes, 0 to 1."),
    "speed/exposed_communication_share": Metric(
        "step_exposed_communication_ratio", "Share of a step that waits for other ranks' gradients, 0 to 1."
    ),
    "communication/sent_bytes": Metric("sent_bytes_total", "Payload that rank 0 has sent in steps."),
    "communication/bytes_per_second": None,
    "communication/gate_wait_ms": Metric(
        "step_barrier_wait_seconds", "Rank 0's wait for the last rank to reach a step, per step.", _MS
    ),
    "communication/local_sgd_period": Metric("local_sgd_period_steps", "Steps between two averagings of LocalSGD."),
    "ranks/median_step_ms": Metric("rank_step_median_seconds", "Median of the ranks' own step times.", _MS),
    "ranks/slowest_step_ms": Metric("rank_step_slowest_seconds", "Largest of the ranks' own step times.", _MS),
    "checkpoint/copies": Metric("checkpoint_copies_total", "Checkpoints that other nodes have written or got."),
    "checkpoint/copies_failed": Metric("checkpoint_copy_failures_total", "Attempts to copy a checkpoint that failed."),
}
INFO = Metric("info", "Always 1; its labels describe the run.")
STEPS = Metric("steps_total", "Finished steps, including those before a resume.")
RANKS = Metric("ranks", "Ranks of the job.")
RECORDED = Metric("last_record_timestamp_seconds", "Unix time of the newest record.")
RANK_UP = Metric("rank_up", "1: connected to the job's store; 0: has left or is lost.")
RANK_AGE = Metric("rank_last_report_age_seconds", "Time since rank 0 read a report of this rank's step times.")
RANK_STEP = Metric("rank_step_seconds", "The rank's own time of a step, for which others may wait.", _MS)
RANK_WAIT = Metric("rank_wait_seconds", "The rank's wait for the others, per step.", _MS)
OTHERS = (INFO, STEPS, RANKS, RECORDED, RANK_UP, RANK_AGE, RANK_STEP, RANK_WAIT)
# A counter is `steps_total` in one of Prometheus' formats, and `steps` in the other.
_TAKEN = {
    name
    for metric in (*OTHERS, *filter(None, OF_CURVES.values()))
    for name in (metric.name, metric.name.removesuffix("_total"))
}
# Each rank's curves; `RANK_STEP` and `RANK_WAIT` say it for any number of ranks.
_OF_ONE_RANK = re.compile(r"ranks/(step|wait)_ms/\d+")


@dataclass
class Snapshot:
    """The values of a scrape. Sequences are by rank; times of ranks in milliseconds."""

    step: int | None = None
    recorded_at: float = 0.0
    """The time of the record, in Unix seconds."""
    curves: dict[str, float] = field(default_factory=dict)
    """The newest value of each curve."""
    info: dict[str, str] = field(default_factory=dict)
    rank_step_ms: dict[int, float] = field(default_factory=dict)
    rank_wait_ms: dict[int, float] = field(default_factory=dict)
    rank_age_seconds: dict[int, float] = field(default_factory=dict)
    rank_up: dict[int, bool] = field(default_factory=dict)


def families(shown: Snapshot) -> Iterator[Family]:
    """The collected metrics, except those without a value."""
    yield from _family(INFO, [(shown.info, 1.0)])
    if shown.step is not None:
        yield from _family(STEPS, [({}, shown.step)])
        yield from _family(RECORDED, [({}, shown.recorded_at)])
    of_metric: dict[str, list[tuple[Metric, str, float]]] = {}
    for tag, value in shown.curves.items():
        if (metric := metric_of(tag)) is not None:
            of_metric.setdefault(metric.name, []).append((metric, tag, value))
    for (metric, _, value), *others in of_metric.values():
        if others:
            same = Metric(metric.name, "Newest values of curves whose names differ in punctuation.")
            yield from _family(same, [({"curve": tag}, each) for _, tag, each in of_metric[metric.name]])
        else:
            yield from _family(metric, [({}, value)])
    if shown.rank_age_seconds:
        yield from _family(RANKS, [({}, len(shown.rank_age_seconds))])
    yield from _by_rank(RANK_UP, shown.rank_up)
    yield from _by_rank(RANK_AGE, shown.rank_age_seconds)
    yield from _by_rank(RANK_STEP, shown.rank_step_ms)
    yield from _by_rank(RANK_WAIT, shown.rank_wait_ms)


def metric_of(tag: str) -> Metric | None:
    """A curve of a user's own loop gets a name made from its tag: `my/curve` is `fleet_train_my_curve`, or with `own_`
    before `my` if that is the name of a metric of this table."""
    if tag in OF_CURVES:
        return OF_CURVES[tag]
    if _OF_ONE_RANK.fullmatch(tag):
        return None
    name = re.sub(r"[^a-zA-Z0-9_]", "_", tag)
    return Metric(f"own_{name}" if name in _TAKEN else name, f"Newest value of {printable(tag)}.")


def _by_rank(metric: Metric, values: Mapping[int, float]) -> Iterator[Family]:
    return _family(metric, [({"rank": str(rank)}, value) for rank, value in sorted(values.items())])


def _family(metric: Metric, samples: Iterable[tuple[Labels, float]]) -> Iterator[Family]:
    samples = list(samples)
    if not samples:
        return
    labels = list(samples[0][0])
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(f"{PREFIX}{metric.name}", metric.meaning, labels=labels)
    for texts, value in samples:
        family.add_metric([printable(texts[name]) for name in labels], value / metric.divisor)
    yield family


def _why_not(host: str, port: int, error: Exception) -> str:
    where = f"--prometheus_port {port} on {host}"
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"{where}: the port is in use by {port_owner(port, host)}; choose another --prometheus_port"
    return (
        f"{where}: cannot listen there ({getattr(error, 'strerror', None) or error}); --prometheus_host takes an "
        "address of rank 0's machine, or 0.0.0.0 for all"
    )
