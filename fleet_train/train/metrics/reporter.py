"""Reports a running job: measurements become tags, settings become texts. docs/watching.md has the tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import yaml

from fleet_train import fleet
from fleet_train.plan import explain
from fleet_train.profile import Profile
from fleet_train.train.components.evaluation import Evaluation
from fleet_train.train.components.straggler import StragglerWatch
from fleet_train.train.components.throughput import Speed
from fleet_train.train.metrics.console import Progress
from fleet_train.train.metrics.images import confusion_picture, mistakes_picture
from fleet_train.train.metrics.sinks import MetricSink

if TYPE_CHECKING:
    from fleet_train.train.checkpoint.position import Position

# More curves are unreadable; the slowest and the median rank are always included.
MOST_RANKS_WITH_CURVES = 16
_COMPARED = ("test/accuracy", "test/loss")
# The place of a run and how it was started do not affect what it learns.
_NO_SETTING = {
    *("output_dir", "resume", "resume_uncompared", "overwrite", "accept_changed_data", "stop_after_epochs"),
    *("prometheus_port", "prometheus_host"),
}


class Communication(Protocol):
    """The result of `fleet.communication()`."""

    @property
    def steps(self) -> int: ...
    @property
    def exposed_ms(self) -> float: ...
    @property
    def gate_wait_ms(self) -> float: ...
    @property
    def bytes_sent(self) -> float: ...
    @property
    def local_sgd_period(self) -> int: ...
    @property
    def rank_step_ms(self) -> list[float]: ...
    @property
    def rank_wait_ms(self) -> list[float]: ...


class Reporter:
    """One per trainer, on every rank: non-reporting ranks have sinks and a progress display that do nothing."""

    def __init__(self, sinks: MetricSink, progress: Progress, straggler_factor: float) -> None:
        self._sinks = sinks
        self._progress = progress
        self._stragglers = StragglerWatch(fleet.worker_endpoints(), straggler_factor)
        self._sent_bytes = 0.0

    def describe(self, step: int, description: Mapping[str, Any], evaluates: bool) -> None:
        """Report the run once at the start: settings to compare runs by, the profile and the plan to read."""
        profile, plan = fleet.profile(), fleet.plan()
        chosen = {} if plan is None else chosen_settings(plan.chosen)
        where = {"ranks": fleet.worker_num(), "nodes": fleet.node_num()}
        settings = {**where, **profile_settings(profile), **chosen, **description}
        plain = {
            name: value
            for name, value in settings.items()
            if isinstance(value, (bool, int, float, str)) and name not in _NO_SETTING
        }
        self._sinks.hparams(plain, [*(_COMPARED if evaluates else ()), "train/loss", "speed/samples_per_second"])
        self._sinks.text(step, "profile/settings", profile_text(profile, chosen))
        self._sinks.text(step, "plan/table", "one process: nothing is sent" if plan is None else explain(plan))

    def begin_stretch(self) -> None:
        """Called when training continues after something else, whose time does not count as step time."""
        self._communication()

    def _communication(self) -> Communication:
        """Since the last reading; sent bytes are counted for every reader."""
        read = fleet.communication()
        self._sent_bytes += max(read.steps, 1) * read.bytes_sent
        return read

    def interval(
        self, at: Position, loss: float, learning_rate: float | None, speed: Speed, more: Mapping[str, float]
    ) -> None:
        """Report finished steps; ``more`` is recorded with them. All ranks call it after the same step."""
        communication = self._communication()
        scalars = {"train/loss": loss, "train/epoch": float(at.epoch), **speed_scalars(speed, communication), **more}
        if fleet.worker_num() > 1:
            scalars["communication/sent_bytes"] = self._sent_bytes
        if learning_rate is not None:
            scalars["train/learning_rate"] = learning_rate
        scale = fleet.loss_scale()
        if scale is not None:
            scalars["train/loss_scale"] = scale
        self._sinks.write(at.updates, scalars)
        of_ranks = getattr(self._sinks, "ranks", None)
        if of_ranks is not None:
            of_ranks(communication.rank_step_ms, communication.rank_wait_ms)
        said = self._stragglers.look(communication.rank_step_ms, communication.rank_wait_ms)
        if said is not None:
            self._progress.say(said)

    def saved(self, at: Position, scalars: Mapping[str, float]) -> None:
        """Report the last checkpoint of this call, if there are metrics of it."""
        if scalars:
            self._sinks.write(at.updates, scalars)

    def evaluated(self, at: Position, evaluation: Evaluation, epoch_loss: float) -> None:
        """Report an evaluation; its confusion matrix and its mistakes, if any, become images."""
        scalars = {f"test/{name}": value for name, value in evaluation.values.items()}
        self._sinks.write(at.updates, {**scalars, "train/epoch": float(at.epoch), "train/epoch_loss": epoch_loss})
        if evaluation.confusion is not None:
            self._sinks.image(at.updates, "test/confusion", confusion_picture(evaluation.confusion))
        if evaluation.mistakes:
            self._sinks.image(at.updates, "test/mistakes", mistakes_picture(evaluation.mistakes))


def speed_scalars(speed: Speed, communication: Communication) -> dict[str, float]:
    """Where the time of a step went, on this rank and over the ranks. Compute is the rest."""
    data_ms = speed.step_ms * speed.data_wait_share
    exposed_ms = min(communication.exposed_ms, speed.step_ms - data_ms)
    compute_ms = speed.step_ms - data_ms - exposed_ms
    scalars = {
        "speed/samples_per_second": speed.samples_per_second,
        "speed/step_ms": speed.step_ms,
        "speed/data_ms": data_ms,
        "speed/compute_ms": compute_ms,
        "speed/data_wait_share": speed.data_wait_share,
        "speed/compute_share": compute_ms / speed.step_ms,
    }
    if len(communication.rank_step_ms) == 1:
        return scalars
    return {
        **scalars,
        "speed/exposed_communication_ms": exposed_ms,
        "speed/exposed_communication_share": exposed_ms / speed.step_ms,
        "communication/bytes_per_second": 1000 * communication.bytes_sent / speed.step_ms,
        "communication/gate_wait_ms": communication.gate_wait_ms,
        "communication/local_sgd_period": float(communication.local_sgd_period),
        **rank_scalars(communication.rank_step_ms, communication.rank_wait_ms),
    }


def rank_scalars(rank_step_ms: Sequence[float], rank_wait_ms: Sequence[float]) -> dict[str, float]:
    """Curves of the ranks; empty for an interval without a barrier, in which ranks have reported nothing."""
    if min(rank_step_ms) <= 0:
        return {}
    scalars = {"ranks/median_step_ms": median(rank_step_ms), "ranks/slowest_step_ms": max(rank_step_ms)}
    if len(rank_step_ms) <= MOST_RANKS_WITH_CURVES:
        scalars |= {f"ranks/step_ms/{rank}": step_ms for rank, step_ms in enumerate(rank_step_ms)}
        scalars |= {f"ranks/wait_ms/{rank}": wait_ms for rank, wait_ms in enumerate(rank_wait_ms)}
    return scalars


def profile_settings(profile: Profile) -> dict[str, Any]:
    """The profile's name, and each knob that is not at its default."""
    default = Profile()
    changed = {name: value for name, value in profile if value != getattr(default, name)}
    return {"profile": profile.name} | {
        name: value for name, value in changed.items() if name not in ("name", "description", "measured", "environment")
    }


def chosen_settings(lines: str) -> dict[str, Any]:
    """The chosen numbers of the profile's open settings, by knob; ``lines``: `CommPlan.chosen`."""
    chosen: dict[str, Any] = yaml.safe_load(f"{{{lines}}}")
    return chosen


def profile_text(profile: Profile, chosen: Mapping[str, Any]) -> str:
    """The profile as a YAML file that reproduces the run, except for the values of variables, which may be secrets."""
    return yaml.safe_dump(profile.shown_settings() | dict(chosen), sort_keys=False, allow_unicode=True).rstrip()
