"""Reports a running job: measurements become tags, settings become texts. docs/watching.md has the tags.

`Reporter` gives sinks what `StepMeter` measures and `fleet.communication()` counts; `StragglerWatch` names the rank
that the others wait for; evaluations become pictures, drawn with Pillow.
"""

from __future__ import annotations

import base64
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import yaml
from numpy.typing import NDArray

from fleet_train import fleet
from fleet_train.cluster.flight import trace
from fleet_train.cluster.flight.ring import read_ring, recorder
from fleet_train.cluster.flight.timeline import common_steps, timelines
from fleet_train.plan import explain
from fleet_train.profile import Profile
from fleet_train.train.evaluation import Evaluation, Mistake
from fleet_train.train.metrics import MetricSink
from fleet_train.train.progress import Progress
from fleet_train.train.step_picture import step_picture

if TYPE_CHECKING:
    from fleet_train.convert.fleet import Communication
    from fleet_train.train.checkpoint.position import Position

_STRAGGLER_SECONDS = 5.0
"""The least time for which a rank must be slower than the others: less may be a checkpoint, or load for a moment."""


# More curves are unreadable; the slowest and the median rank are always included.
MOST_RANKS_WITH_CURVES = 16
_COMPARED = ("test/accuracy", "test/loss")
# The place of a run and how it was started do not affect what it learns.
_NO_SETTING = {
    *("output_dir", "resume", "resume_uncompared", "overwrite", "accept_changed_data", "stop_after_epochs"),
    *("prometheus_port", "prometheus_host", "trace"),
}
_SIDE_PIXELS = 640
_MARGIN = 56
_MOST_CLASSES_WITH_NUMBERS = 20
_TILE, _GAP = 112, 8
_HIT, _MISS = (36, 105, 189), (201, 68, 44)
Item = TypeVar("Item")


class Reporter:
    """One per trainer, on every rank: non-reporting ranks have sinks and a progress display that do nothing."""

    def __init__(self, sinks: MetricSink, progress: Progress, straggler_factor: float) -> None:
        self._sinks = sinks
        self._progress = progress
        deals = fleet.profile().batch_shares == "auto"
        self._stragglers = StragglerWatch(fleet.worker_endpoints(), straggler_factor, deals=deals)
        self._sent_bytes = 0.0
        self._shown: trace.Trace | None = None

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
        """The communication since the last reading; sent bytes are counted for every reader."""
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
        if fleet.profile().batch_shares != "equal" and fleet.worker_num() <= MOST_RANKS_WITH_CURVES:
            scalars |= {f"ranks/share/{rank}": share for rank, share in enumerate(fleet.batch_shares())}
        scale = fleet.loss_scale()
        if scale is not None:
            scalars["train/loss_scale"] = scale
        self._sinks.write(at.updates, scalars)
        of_ranks = getattr(self._sinks, "ranks", None)
        if of_ranks is not None:
            of_ranks(communication.rank_step_ms, communication.rank_wait_ms)
        message = self._stragglers.check(communication.rank_step_ms, communication.rank_wait_ms)
        if message is not None:
            self._progress.say(message)

    def traced(self, at: Position) -> None:
        """Show a step of the trace that has ended, once. All ranks call it after the same step."""
        ended = trace.current
        if ended is None or ended is self._shown or not ended.data:
            return
        self._shown = ended
        packed = base64.b64encode(zlib.compress(ended.of_last_step())).decode()
        rings = [read_ring(zlib.decompress(base64.b64decode(each))) for each in fleet.gather(packed)]
        ranks = timelines(ring for ring in rings if ring is not None)
        if fleet.is_first_worker() and (steps := common_steps(ranks)):
            self._sinks.image(at.updates, "timeline/step", step_picture(ranks, steps[-1]))

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
    """The parts of a step's time, on this rank and over the ranks, by tag. Compute is the rest."""
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


class StragglerWatch:
    """Checks each interval and reports only changes.

    A rank is a straggler when it is the slowest, and slower than `factor` times the median step of the others, in
    `intervals` consecutive intervals of at least `seconds` in total: anything shorter may be a checkpoint or temporary
    load.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        factor: float,
        intervals: int = 3,
        seconds: float = _STRAGGLER_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        *,
        deals: bool = False,
    ) -> None:
        """`endpoints`: host:port by rank. `factor` 0 = never report. `deals`: ranks get samples as they compute."""
        self._deals = deals
        self._endpoints = endpoints
        self._factor = factor
        self._intervals = intervals
        self._seconds = seconds
        self._clock = clock
        self._kept_up: Counter[int] = Counter()
        """Intervals in which a rank was as fast as the others."""
        self._suspect: int | None = None
        self._in_a_row, self._since = 0, clock()
        self._named: int | None = None

    def check(self, rank_step_ms: Sequence[float], rank_wait_ms: Sequence[float]) -> str | None:
        """Look at one interval: each rank's own time of a step and its time at barriers, ms per step; returns the
        message, if any.

        Ranks without a report (0 ms: no barrier in the interval, as between two averagings) are ignored.
        """
        if not self._factor or len(rank_step_ms) < 2 or min(rank_step_ms) <= 0:
            return None
        rank = max(range(len(rank_step_ms)), key=lambda each: rank_step_ms[each])
        others = [each for each in range(len(rank_step_ms)) if each != rank]
        times_slower = rank_step_ms[rank] / median(rank_step_ms[each] for each in others)
        suspect = rank if times_slower > self._factor else None
        self._kept_up.update({rank, *others} - {suspect})
        if suspect != self._suspect:
            self._suspect, self._in_a_row, self._since = suspect, 0, self._clock()
        self._in_a_row += 1
        is_lasting = self._in_a_row >= self._intervals and self._clock() - self._since >= self._seconds
        if suspect == self._named or not is_lasting:
            return None
        before, self._named = self._named, suspect
        if suspect is None:
            return f"{self._describe(before)} keeps up with the others again"
        waited = sum(rank_wait_ms[each] / (rank_wait_ms[each] + rank_step_ms[each]) for each in others) / len(others)
        return (
            f"{self._describe(suspect)} takes {times_slower:.1f}x the median step of the others; "
            f"they waited {100 * waited:.0f} % of their time for it; {self._cause(rank)}"
        )

    def _cause(self, rank: int) -> str:
        """Whether a straggler is a slower machine, or one that has become slow."""
        if self._kept_up[rank] >= self._intervals:
            then = ", if it lasts its share falls with the next epoch" if self._deals else ""
            return f"it kept up with them before: look there for load, heat or a fault{then}"
        how = "its share falls with the next epoch" if self._deals else "batch_shares: auto would give it fewer samples"
        return f"it never kept up: a slower machine; {how}"

    def _describe(self, rank: int | None) -> str:
        return "no rank" if rank is None else f"rank {rank} ({self._endpoints[rank]})"


class Speed(NamedTuple):
    """The speed of the steps since the last reading."""

    samples_per_second: float
    """Samples per second over all ranks."""
    step_ms: float
    """Milliseconds of an update: with gradient merge, of all its micro-batches."""
    data_wait_share: float
    """The share of time spent on waiting for data: 0 = data was always ready, 1 = only waiting."""


class StepMeter:
    """Counts batches of one rank and samples of all between two readings; all ranks have the same number of batches.

    ``batches_per_step``: those that a rank takes for one update; above 1 with gradient merge.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, *, batches_per_step: int = 1) -> None:
        self._batches_per_step = batches_per_step
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now and reset the counts."""
        self._began = self._clock()
        self.batches = 0
        self._samples = 0
        self._waited = 0.0

    def timed(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield the same batches, and count the time to get each one as waiting."""
        source = iter(batches)
        while True:
            asked = self._clock()
            try:
                with recorder.event("loader"):
                    batch = next(source)
            except StopIteration:
                return
            self._waited += self._clock() - asked
            yield batch

    def count(self, samples: int) -> None:
        """Count one finished batch with this many samples of all ranks."""
        self.batches += 1
        self._samples += samples

    def read(self) -> Speed:
        """The speed since the interval began; does not end it."""
        seconds = max(self._clock() - self._began, 1e-9)
        return Speed(
            self._samples / seconds,
            1000.0 * seconds * self._batches_per_step / max(1, self.batches),
            min(1.0, self._waited / seconds),
        )


def confusion_picture(confusion: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Counts [classes, classes] (row: true class, column: predicted) as a picture, uint8 [height, width, 3].

    A stronger colour means a larger share of the row: blue on the diagonal, red elsewhere. Up to 20 classes have
    their counts in the cells.
    """
    from PIL import Image, ImageDraw, ImageFont

    classes = len(confusion)
    cell = max(1, _SIDE_PIXELS // classes)
    side = cell * classes
    picture = Image.new("RGB", (side + _MARGIN + 16, side + _MARGIN + 16), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    shares = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    for row, column in np.ndindex(classes, classes):
        left, top = _MARGIN + column * cell, _MARGIN + row * cell
        colour = _blend(_HIT if row == column else _MISS, float(shares[row, column]), row == column)
        draw.rectangle((left, top, left + cell - 1, top + cell - 1), fill=colour)
        if classes <= _MOST_CLASSES_WITH_NUMBERS and confusion[row, column]:
            ink = "white" if row == column and shares[row, column] > 0.5 else "black"
            centre = (left + cell / 2, top + cell / 2)
            draw.text(centre, str(confusion[row, column]), fill=ink, font=font, anchor="mm")
    _label_axes(draw, font, classes, cell)
    return np.asarray(picture)


def _blend(colour: tuple[int, int, int], share: float, is_hit: bool) -> tuple[int, int, int]:
    # One miss must be visible next to ninety-nine hits.
    weight = share if is_hit else share**0.5
    red, green, blue = (round(244 + (channel - 244) * weight) for channel in colour)
    return red, green, blue


def _label_axes(draw: Any, font: Any, classes: int, cell: int) -> None:
    side, step = cell * classes, max(1, -(-classes // _MOST_CLASSES_WITH_NUMBERS))
    draw.text((_MARGIN + side / 2, 14), "predicted class", fill="black", font=font, anchor="mm")
    draw.text((6, 40), "true", fill="black", font=font, anchor="lm")
    for index in range(0, classes, step):
        middle = _MARGIN + index * cell + cell / 2
        draw.text((middle, 40), str(index), fill="black", font=font, anchor="mm")
        draw.text((_MARGIN - 12, middle), str(index), fill="black", font=font, anchor="rm")


def mistakes_picture(mistakes: Sequence[Mistake], columns: int = 6) -> NDArray[np.uint8]:
    """Images in rows, below each its true and its predicted class: uint8 [height, width, 3].

    Each image is stretched from its darkest to its lightest value: the network's normalisation is not undone.
    """
    from PIL import Image, ImageDraw, ImageFont

    rows = -(-len(mistakes) // columns)
    width, height = _TILE + 2 * _GAP, _TILE + 3 * _GAP + 14
    picture = Image.new("RGB", (columns * width, rows * height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(14)
    for index, mistake in enumerate(mistakes):
        left, top = index % columns * width + _GAP, index // columns * height + _GAP
        low, span = mistake.image.min(), max(float(np.ptp(mistake.image)), 1e-9)
        levels = ((mistake.image - low) / span * 255).astype(np.uint8).transpose(1, 2, 0)
        tile = Image.fromarray(np.broadcast_to(levels, (*levels.shape[:2], 3)).copy())
        picture.paste(tile.resize((_TILE, _TILE), Image.Resampling.NEAREST), (left, top))
        caption = f"{mistake.true_class}, not {mistake.predicted_class} ({mistake.confidence:.2f})"
        draw.text((left + _TILE / 2, top + _TILE + _GAP), caption, fill="black", font=font, anchor="mt")
    return np.asarray(picture)
