"""``fluid.io.DataLoader.from_generator``: batches for ``exe.run(feed=...)`` from a Python generator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from fleet_train.compat.feeding import DataFeeder
from fleet_train.errors import ConversionError

Feed = dict[str, np.ndarray[Any, Any]]


class GeneratorLoader:
    """Yields ``[{input name: array}]`` for each batch; every ``for`` starts the generator again.

    Batches are made in the loop's own thread. Faster loading: ``paddle.io.DataLoader`` over a dataset.
    """

    def __init__(self, feed_list: Sequence[Any]) -> None:
        self._names = [str(value.name) for value in feed_list]
        self._feeder = DataFeeder(feed_list)
        self._batches: Callable[[], Iterator[Feed]] | None = None

    def set_sample_generator(
        self, reader: Callable[[], Iterable[Any]], batch_size: int, drop_last: bool = True, places: Any = None
    ) -> GeneratorLoader:
        """``reader()`` yields one sample at a time."""
        del places

        def batches() -> Iterator[list[Any]]:
            batch = list[Any]()
            for sample in reader():
                batch.append(sample)
                if len(batch) == batch_size:
                    yield batch
                    batch = []
            if batch and not drop_last:
                yield batch

        return self.set_sample_list_generator(batches)

    def set_sample_list_generator(
        self, reader: Callable[[], Iterable[Sequence[Any]]], places: Any = None
    ) -> GeneratorLoader:
        """``reader()`` yields lists of samples, as ``paddle.batch`` does."""
        del places
        self._batches = lambda: (self._feeder.feed(batch) for batch in reader())
        return self

    def set_batch_generator(self, reader: Callable[[], Iterable[Any]], places: Any = None) -> GeneratorLoader:
        """``reader()`` yields whole batches: one array for each input."""
        del places
        self._batches = lambda: (self._named(batch) for batch in reader())
        return self

    def __call__(self) -> Iterator[list[Feed]]:
        return iter(self)

    def __iter__(self) -> Iterator[list[Feed]]:
        if self._batches is None:
            raise ConversionError("from_generator: set a generator first: loader.set_batch_generator(reader)")
        return ([feed] for feed in self._batches())

    def _named(self, batch: Any) -> Feed:
        arrays = batch if isinstance(batch, (list, tuple)) else [batch]
        if len(arrays) != len(self._names):
            raise ConversionError(f"from_generator: a batch has {len(arrays)} arrays for {len(self._names)} inputs")
        return {name: np.asarray(array) for name, array in zip(self._names, arrays, strict=True)}


def from_generator(
    feed_list: Sequence[Any] | None = None,
    capacity: int | None = None,
    use_double_buffer: bool = True,
    iterable: bool = True,
    return_list: bool = False,
    use_multiprocess: bool = False,
    drop_last: bool = True,
) -> GeneratorLoader:
    """A loader for the inputs of a program. ``capacity`` and the buffers chose a speed, ``drop_last`` was about several
    devices of one process; they are not looked at.

    Raises ConversionError for loaders that are part of the program (``iterable=False``) and for ``return_list=True``.
    """
    del capacity, use_double_buffer, use_multiprocess, drop_last
    if not iterable:
        raise ConversionError(
            "from_generator: iterable=False fed the program internally; write `for data in loader():`"
        )
    if return_list:
        raise ConversionError(
            "from_generator: return_list=True is for dynamic mode; leave it out and feed what the loader yields"
        )
    if not feed_list:
        raise ConversionError("from_generator: give feed_list, the inputs of the program")
    return GeneratorLoader(feed_list)
