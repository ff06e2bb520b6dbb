"""``train_from_dataset`` and its datasets of text files in the MultiSlot format, for programs of Paddle 3 (PIR).

Paddle's own fail there before the first batch. A line is a sample: for each input ``count value value ...``, separated
by spaces. Which files a rank reads is the script's choice, as in Fleet: ``set_filelist(fleet.split_files(files))``.
"""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from fleet_train.compat.parameters import dtype_of
from fleet_train.compat.programs import DataFeeder, Feed
from fleet_train.convert import session
from fleet_train.convert.calls import values_of_all
from fleet_train.convert.strategy import ArgumentError
from fleet_train.errors import ConversionError
from fleet_train.log import log_once

Sample = tuple[np.ndarray[Any, Any], ...]

_THREADS = "is mapped: one thread reads, one process per device computes"
_OFF: dict[str, tuple[Any, str]] = {
    "input_type": (0, "samples are read from lines; leave it at 0"),
    "fs_name": ("", "files are read from local or mounted folders; leave it out, or fetch them in pipe_command"),
    "fs_ugi": ("", "files are read from local or mounted folders; leave it out, or fetch them in pipe_command"),
    "download_cmd": ("cat", "files are read from local or mounted folders; leave it out"),
    "data_feed_type": ("MultiSlotInMemoryDataFeed", "the MultiSlot format is the only one; leave it out"),
    "parse_ins_id": (False, "lines have no identifiers here; leave it out"),
    "parse_content": (False, "lines have no content field here; leave it out"),
}
_MAPPED = {
    "thread_num": _THREADS,
    "queue_num": _THREADS,
    "fleet_send_batch_size": "is mapped: samples are not sent between ranks",
    "fleet_send_sleep_seconds": "is mapped: samples are not sent between ranks",
}


class UnknownCall(ConversionError, AttributeError):
    """A call of Paddle's datasets that has no equal here. Also an AttributeError, so that ``hasattr`` works."""


class QueueDataset:
    """Reads its files while training, in their order. ``init`` is the form of 2.x, ``set_...`` that of 1.8."""

    def __init__(self) -> None:
        self._batch_size = 1
        self._inputs: list[Any] = []
        self._files: list[str] = []
        self._command = "cat"

    def init(
        self,
        batch_size: int = 1,
        thread_num: int = 1,
        use_var: Sequence[Any] = (),
        pipe_command: str = "cat",
        **settings: Any,
    ) -> None:
        """Set the settings of Paddle 2.x at once; what cannot be carried out is refused by its name."""
        self.set_batch_size(batch_size)
        self.set_use_var(use_var)
        self.set_pipe_command(pipe_command)
        self.update_settings(thread_num=thread_num, **settings)

    def update_settings(self, **settings: Any) -> None:
        """Change settings of ``init``."""
        for name, value in settings.items():
            if name in ("batch_size", "use_var", "pipe_command"):
                getattr(self, f"set_{name}")(value)
            elif name in _MAPPED:
                if value != 1:
                    _note(f"{name}={value} {_MAPPED[name]}")
            elif name not in _OFF:
                raise ArgumentError(f"{type(self).__name__}: unknown setting {name}={value!r}; leave it out")
            elif value != _OFF[name][0]:
                raise ArgumentError(f"{type(self).__name__}: {name}={value!r}: {_OFF[name][1]}")

    def set_batch_size(self, batch_size: int) -> None:
        """Set the samples per step and rank; the last batch may have fewer."""
        if batch_size < 1:
            raise ArgumentError(f"set_batch_size was given {batch_size}; a batch has at least 1 sample")
        self._batch_size = batch_size

    def set_use_var(self, var_list: Sequence[Any]) -> None:
        """Set the inputs, in the order of the slots of a line."""
        self._inputs = list(var_list)

    def set_filelist(self, filelist: Sequence[str]) -> None:
        """Set the files of this rank."""
        self._files = [str(path) for path in filelist]

    def set_pipe_command(self, pipe_command: str) -> None:
        """Set a shell command that turns a file (its standard input) into lines in the MultiSlot format."""
        self._command = pipe_command

    def set_thread(self, thread_num: int) -> None:
        """Accept how many threads Paddle read and trained with."""
        self.update_settings(thread_num=thread_num)

    def set_hdfs_config(self, fs_name: str, fs_ugi: str) -> None:
        """Refuse the settings of HDFS, unless both are empty."""
        self.update_settings(fs_name=fs_name, fs_ugi=fs_ugi)

    def __getattr__(self, name: str) -> Any:
        setting = name.removeprefix("set_")
        if setting != name and setting in _OFF | _MAPPED:
            return lambda value: self.update_settings(**{setting: value})
        known = name in vars(InMemoryDataset)
        reason = "use an InMemoryDataset" if known else "there is no such call; pipe_command prepares the samples"
        raise UnknownCall(f"{type(self).__name__}.{name}: {reason}")

    def batches(self) -> Iterator[Feed]:
        """Feeds for the executor."""
        if not self._inputs:
            raise ConversionError(f"{type(self).__name__}: set_use_var([...]) names the inputs of the program first")
        feeder, samples = DataFeeder(self._inputs), iter(self._samples())
        while batch := list(islice(samples, self._batch_size)):
            yield feeder.feed(batch)

    def _samples(self) -> Iterable[Sample]:
        dtypes = [dtype_of(value) for value in self._inputs]
        for path in self._files:
            for number, line in enumerate(_lines(path, self._command), 1):
                yield _parsed(line, dtypes, f"{path}:{number}")


class InMemoryDataset(QueueDataset):
    """Reads its files in ``load_into_memory``, so that samples can be shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self._loaded: list[Sample] | None = None

    def load_into_memory(self, is_shuffle: bool = False) -> None:
        """Read this rank's files."""
        self._loaded = list(super()._samples())
        if is_shuffle:
            self.local_shuffle()

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """``load_into_memory``; it returns when all is read."""
        del thread_num
        self.load_into_memory()

    def wait_preload_done(self) -> None:
        """Do nothing: ``preload_into_memory`` has waited."""

    def local_shuffle(self) -> None:
        """Shuffle this rank's samples, by Python's ``random``: ``random.seed`` repeats it."""
        random.shuffle(self._memory())

    def global_shuffle(self, fleet: Any = None, thread_num: int = 12) -> None:
        """Do what ``local_shuffle`` does: samples stay on their rank, and rank 0 says so."""
        del thread_num
        notice = (
            "global_shuffle is mapped: each rank shuffles its own samples; to exchange them, shuffle the list of files"
        )
        if fleet is not None:
            _note(f"{notice} with the same seed on all ranks before fleet.split_files")
        self.local_shuffle()

    def get_memory_data_size(self, fleet: Any = None) -> int:
        """How many samples are in memory: of this rank, with ``fleet`` of all ranks, which then all call it."""
        size = len(self._memory())
        return size if fleet is None else sum(values_of_all("get_memory_data_size()", size))

    get_shuffle_data_size = get_memory_data_size

    def release_memory(self) -> None:
        """Forget the samples."""
        self._loaded = None

    def _samples(self) -> Iterable[Sample]:
        return self._memory()

    def _memory(self) -> list[Sample]:
        if self._loaded is None:
            raise ConversionError("InMemoryDataset: call load_into_memory() first")
        return self._loaded


class DatasetFactory:
    """``fluid.DatasetFactory`` of 1.8."""

    def create_dataset(self, datafeed_class: str = "QueueDataset") -> QueueDataset:
        """A ``QueueDataset`` or an ``InMemoryDataset``."""
        kinds = {"QueueDataset": QueueDataset, "InMemoryDataset": InMemoryDataset}
        if datafeed_class not in kinds:
            raise ArgumentError(f"create_dataset({datafeed_class!r}): use one of {', '.join(kinds)}")
        return kinds[datafeed_class]()


def train_from_dataset(
    exe: Any,
    program: Any = None,
    dataset: QueueDataset | None = None,
    scope: Any = None,
    thread: int = 0,
    debug: bool = False,
    fetch_list: Sequence[Any] | None = None,
    fetch_info: Sequence[str] | None = None,
    print_period: int = 100,
    fetch_handler: Any = None,
) -> None:
    """``exe.train_from_dataset(...)``: one pass; each rank prints its own values every ``print_period`` batches.

    All ranks of a job make the same number of steps, those of the rank with the fewest batches; rank 0 says whose
    further batches are left out. Raises ConversionError on all ranks if one of them has no batch.
    """
    feeds = _in_step(_checked("train_from_dataset", dataset, thread, debug, fetch_handler))
    _run_all(exe, program, feeds, scope, fetch_list, fetch_info, print_period)


def infer_from_dataset(
    exe: Any,
    program: Any = None,
    dataset: QueueDataset | None = None,
    scope: Any = None,
    thread: int = 0,
    debug: bool = False,
    fetch_list: Sequence[Any] | None = None,
    fetch_info: Sequence[str] | None = None,
    print_period: int = 100,
    fetch_handler: Any = None,
) -> None:
    """``exe.infer_from_dataset(...)``: one pass of a program that does not communicate.

    Each rank runs all its batches.
    """
    feeds = _checked("infer_from_dataset", dataset, thread, debug, fetch_handler)
    _run_all(exe, program, feeds, scope, fetch_list, fetch_info, print_period)


def _checked(call: str, dataset: QueueDataset | None, thread: int, debug: bool, fetch_handler: Any) -> Iterator[Feed]:
    if fetch_handler is not None:
        raise ArgumentError(f"{call}: fetch_handler is not supported; fetch_list and print_period print values")
    if not isinstance(dataset, QueueDataset):
        raise ArgumentError(f"{call}: dataset={dataset!r}: give a compat.QueueDataset or a compat.InMemoryDataset")
    if thread > 1:
        _note(f"{call}: thread={thread} {_THREADS}")
    if debug:
        _note(f"{call}: debug=True is mapped: print_period says how often values are printed")
    return dataset.batches()


def _run_all(
    exe: Any, program: Any, feeds: Iterator[Feed], scope: Any, fetch_list: Any, fetch_info: Any, print_period: int
) -> None:
    names = list(fetch_info) if fetch_info else [f"value {index}" for index in range(len(fetch_list or ()))]
    if print_period < 1 or len(names) != len(fetch_list or ()):
        raise ArgumentError(
            f"fetch_info={names} and print_period={print_period}: give a name for each of the {len(fetch_list or ())} "
            "values of fetch_list, and a period of at least 1 batch"
        )
    for step, feed in enumerate(feeds, 1):
        fetched = list(fetch_list) if fetch_list and step % print_period == 0 else []
        values = exe.run(program, feed=feed, fetch_list=fetched, scope=scope)
        if fetched:
            shown = ", ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            print(f"batch {step}, {shown}", flush=True)


_WINDOW = 16
"""Batches that ranks agree on at once."""


def _in_step(batches: Iterator[Feed]) -> Iterator[Feed]:
    """Yield as many batches as the rank with the fewest has."""
    if not session.is_open():
        yield from batches
        return
    counts, before = [_WINDOW], 0
    while min(counts) == _WINDOW:
        window = list(islice(batches, _WINDOW))
        counts = values_of_all("train_from_dataset()", len(window))
        if not min(counts) + before:
            raise ConversionError(
                f"train_from_dataset: rank {counts.index(0)} has no samples; give each rank about as many samples"
            )
        yield from window[: min(counts)]
        before += min(counts)
    if longer := [str(rank) for rank, count in enumerate(counts) if count > min(counts)]:
        last = counts.index(min(counts))
        notice = (
            f"train_from_dataset: stopped after {before} steps, when rank {last} had no batch left; further batches"
        )
        _note(f"{notice} of rank {', '.join(longer)} are left out")


def _lines(path: str, command: str) -> Iterator[bytes]:
    """The lines that the command makes of a file; Paddle's default command copies it."""
    try:
        with Path(path).open("rb") as source:
            yield from source if command == "cat" else _piped(source, path, command)
    except OSError as error:
        raise ConversionError(f"{path}: {error.strerror}; the file is in the list of set_filelist") from None


def _piped(source: IO[bytes], path: str, command: str) -> Iterator[bytes]:
    with subprocess.Popen(command, shell=True, stdin=source, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            yield from process.stdout
        finally:
            process.stdout.close()  # a command that still writes ends
        if code := process.wait():
            raise ConversionError(f"{path}: pipe_command {command!r} ended with exit code {code}; try it on this file")


def _parsed(line: bytes, dtypes: Sequence[str], where: str) -> Sample:
    words, sample = line.split(), list[np.ndarray[Any, Any]]()
    try:
        for dtype in dtypes:
            count = int(words[0])
            values, words = words[1 : count + 1], words[count + 1 :]
            if len(values) != count or count < 1:
                raise ValueError
            sample.append(np.array([word.decode() for word in values]).astype(dtype))
    except (ValueError, IndexError, OverflowError):
        sample.clear()
    if words or not sample:
        raise ConversionError(
            f"{where}: not {len(dtypes)} slots of `count value ...` ({', '.join(dtypes)}), which pipe_command must make"
        )
    return tuple(sample)


def _note(message: str) -> None:
    """Log a message once, on rank 0."""
    log_once([message], session.current().job.cluster.rank if session.is_open() else 0)
