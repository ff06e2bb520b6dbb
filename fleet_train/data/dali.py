"""NVIDIA DALI as the decoder: one graph that runs on the CPU or, decoding with nvJPEG, on the GPU.

The samples of a batch, the part of each image and its mirroring are decided here, by the same sampler and random
numbers as without DALI; so a job may change its loader between two runs. Pixels differ slightly (another resize filter
and colour arithmetic).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_train.data.datasets import Arrays, Draws, Indices
from fleet_train.data.decode import (
    DRAWS_PER_IMAGE,
    ImageChanges,
    ImageDecoder,
    UnreadableImage,
    center_box,
    opened,
    random_box,
    random_changes,
)
from fleet_train.data.images import CorruptImages, ImageFolder
from fleet_train.data.loader import Loader, Prefetcher, device_index, new_feed_tensor
from fleet_train.data.sampler import BatchSampler
from fleet_train.errors import DataError
from fleet_train.files import open_regular

BATCHES_IN_DALI = 2
"""How many batches DALI prefetches itself."""


class GraphInput(NamedTuple):
    """The graph's input for one image."""

    data: NDArray[np.uint8]
    start: NDArray[np.int32]
    """Top and left of the used part, in pixels."""
    size: NDArray[np.int32]
    """Height and width of the used part, in pixels."""
    changes: ImageChanges


class DaliLoader(Loader):
    """One rank's batches of an image folder through DALI.

    Args:
        threads: of DALI's CPU operators.
        place: `fleet.place()`; a GPU decodes with nvJPEG and keeps the images there. None = CPU.
    """

    def __init__(
        self,
        dataset: ImageFolder,
        sampler: BatchSampler,
        augment: str = "crop_flip",
        threads: int = 2,
        prefetch_depth: int = 2,
        *,
        place: Any = None,
    ) -> None:
        super().__init__(dataset, sampler)
        import_dali()
        self.images = dataset
        self.corrupt: CorruptImages = dataset.corrupt_images()
        self._decoder = ImageDecoder(dataset.settings, augment, sampler.seed)
        self._augment = augment
        self._threads = threads
        self._prefetch_depth = prefetch_depth
        self._place = place

    def epoch(self, epoch: int, consumed_samples: int = 0) -> Prefetcher[Arrays]:
        self.sampler.set_epoch(epoch, consumed_samples)
        return Prefetcher(self._batches(), self._prefetch_depth)

    def _batches(self) -> Iterator[Arrays]:
        step = 0
        while step < len(self):
            try:
                for feed in self._decoded(step):
                    yield feed
                    step += 1
            except RuntimeError as error:
                # DALI fails a whole batch, and with it the pipeline, without naming the image.
                self._find_corrupt(step, error)

    def _decoded(self, first_step: int) -> Iterator[Arrays]:
        """The batches from that step on, from a new pipeline."""
        taken: list[Indices] = []

        def read(step: int) -> list[GraphInput]:
            images, indices = self._read(first_step + step)
            taken.append(indices)
            return images

        steps = len(self) - first_step
        with_colors = self._augment == "crop_flip_color"
        pipeline = make_pipeline(
            batch_source(read, steps, with_colors),
            max_batch_size=max(len(self.indices(step)) for step in {0, len(self) - 1}),
            threads=self._threads,
            device=device_index(self._place),
            images=self.images,
            with_colors=with_colors,
        )
        for step in range(steps):
            (decoded,) = pipeline.run()
            yield {"features": self._own(decoded), "labels": self.images.labels[taken[step]]}

    def _read(self, step: int) -> tuple[list[GraphInput], Indices]:
        """The images of one step and their dataset indices, unreadable ones replaced."""
        images: list[GraphInput] = []
        indices = np.array(self.indices(step))
        for row, wanted in enumerate(indices.tolist()):
            indices[row], image = self.images.first_readable(wanted, self.corrupt, self._image)
            images.append(image)
        return images, indices

    def _image(self, index: int) -> GraphInput:
        path = self.images.path(index)
        with opened(path) as header, open_regular(path) as file:  # reads no pixels
            width, height = header.size
            data = file.read()
        draws = Draws(self.sampler.seed, self.sampler.epoch, np.array([index])).uniform(DRAWS_PER_IMAGE)[0].tolist()
        settings = self.images.settings
        plain = self._augment == "none"
        box = center_box(width, height, settings) if plain else random_box(width, height, settings, draws)
        left, top, right, bottom = (round(edge) for edge in box)
        changes = ImageChanges(False, 1.0, 1.0, 1.0) if plain else random_changes(settings, draws)
        start, size = np.array([top, left], np.int32), np.array([bottom - top, right - left], np.int32)
        return GraphInput(np.frombuffer(data, np.uint8), start, size, changes)

    def _own(self, decoded: Any) -> Any:
        """Copy the batch from DALI's memory, which the next run overwrites."""
        if device_index(self._place) is None:
            return np.array(decoded.as_array())
        return copy_to_paddle(decoded, self._place)

    def _find_corrupt(self, first_step: int, error: RuntimeError) -> None:
        """Count the unreadable images of the steps that the pipeline may have been processing; if there are none,
        raise."""
        known = len(self.corrupt)
        out = np.empty(self.images.sample_shape, np.float32)
        for step in range(first_step, min(len(self), first_step + BATCHES_IN_DALI + 1)):
            for wanted in self.indices(step).tolist():
                index = self.corrupt.skip(wanted)
                try:
                    self._decoder.decode(self.images.path(index), index, self.sampler.epoch, out)
                except UnreadableImage as reason:
                    self.corrupt.replacement(index, self.images.paths[index], str(reason))
        if len(self.corrupt) == known:
            raise DataError(
                f"DALI failed on images that Pillow can read; try --loader workers. DALI reports: {error}"
            ) from error


def copy_to_paddle(batch: Any, place: Any) -> Any:
    """A DALI batch (CPU or GPU) as a tensor that can be fed to the executor."""
    from nvidia.dali.plugin.paddle import feed_ndarray, to_paddle_type

    dense = batch.as_tensor()
    tensor = new_feed_tensor()
    tensor._set_dims(dense.shape())
    feed_ndarray(dense, tensor._mutable_data(place, to_paddle_type(dense)))
    return tensor


def batch_source(
    read: Callable[[int], list[GraphInput]], steps: int, with_colors: bool
) -> Callable[[], tuple[list[Any], ...]]:
    """DALI requests the next batch without a number; StopIteration ends the epoch."""
    numbers = iter(range(steps))

    def next_batch() -> tuple[list[Any], ...]:
        images = read(next(numbers))
        columns = zip(*(image.changes[1:] for image in images), strict=True) if with_colors else ()
        return (
            [image.data for image in images],
            [image.start for image in images],
            [image.size for image in images],
            [np.int32(image.changes.flip) for image in images],
            *([np.float32(value) for value in column] for column in columns),
        )

    return next_batch


def make_pipeline(
    source: Callable[[], tuple[list[Any], ...]],
    max_batch_size: int,
    threads: int,
    device: int | None,
    images: ImageFolder,
    with_colors: bool,
) -> Any:
    """Encoded images, parts and random changes in; float32 [batch, 3, size, size] out."""
    dali = import_dali()
    fn, types = dali.fn, dali.types
    settings = images.settings
    decoding, rest = ("cpu", "cpu") if device is None else ("mixed", "gpu")
    pipeline = dali.Pipeline(
        batch_size=max_batch_size,
        num_threads=threads,
        device_id=device,
        prefetch_queue_depth=BATCHES_IN_DALI,
    )
    kinds = [types.UINT8, types.INT32, types.INT32, types.INT32] + [types.FLOAT] * (3 if with_colors else 0)
    dimensions = [1, 1, 1, 0, 0, 0, 0][: len(kinds)]
    with pipeline:
        encoded, start, size, flip, *colors = fn.external_source(
            source, num_outputs=len(kinds), batch=True, dtype=kinds, ndim=dimensions
        )
        part = fn.decoders.image_slice(
            encoded, start, size, axis_names="HW", device=decoding, output_type=types.RGB, adjust_orientation=False
        )
        scaled = fn.resize(
            part,
            device=rest,
            resize_x=settings.image_size,
            resize_y=settings.image_size,
            interp_type=types.INTERP_TRIANGULAR,
        )
        if with_colors:
            brightness, contrast, saturation = colors
            scaled = fn.color_twist(
                scaled, device=rest, brightness=brightness, contrast=contrast, saturation=saturation
            )
        pipeline.set_outputs(
            fn.crop_mirror_normalize(
                scaled,
                device=rest,
                mirror=flip,
                mean=[255 * value for value in settings.mean],
                std=[255 * value for value in settings.std],
                dtype=types.FLOAT,
                output_layout="CHW",
            )
        )
    pipeline.build()
    return pipeline


def import_dali() -> Any:
    try:
        import nvidia.dali
        import nvidia.dali.fn
    except ImportError as error:
        raise DataError(
            f"--loader dali needs NVIDIA DALI, which cannot be imported ({error}); run: "
            "python -m pip install -r requirements-dali.txt, or use --loader workers"
        ) from error
    return nvidia.dali
