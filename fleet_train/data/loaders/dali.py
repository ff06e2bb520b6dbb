"""NVIDIA DALI as the decoder: one graph that runs on the CPU or, decoding with nvJPEG, on the GPU.

The samples of a batch, the part of each image and its mirroring are decided here, by the same sampler and random
numbers as without DALI; so a job may change its loader between two runs. Pixels differ slightly (another resize filter
and colour arithmetic).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fleet_train.data.core.datasets import Arrays, Indices
from fleet_train.data.core.prefetch import Prefetcher
from fleet_train.data.core.rng import Draws
from fleet_train.data.core.sampler import BatchSampler
from fleet_train.data.images.corrupt import CorruptImages
from fleet_train.data.images.decode import ImageDecoder, UnreadableImage, opened
from fleet_train.data.images.folder import ImageFolder
from fleet_train.data.images.geometry import DRAWS_PER_IMAGE, Look, center_box, random_box, random_look
from fleet_train.data.loaders.dali_graph import (
    BATCHES_IN_DALI,
    GraphInput,
    batch_source,
    copy_to_paddle,
    import_dali,
    make_pipeline,
)
from fleet_train.data.loaders.device import device_index
from fleet_train.data.loaders.threads import Loader
from fleet_train.errors import DataError
from fleet_train.files import open_regular


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
        self._corrupt = dataset.corrupt_images()
        self._decoder = ImageDecoder(dataset.settings, augment, sampler.seed)
        self._augment = augment
        self._threads = threads
        self._prefetch_depth = prefetch_depth
        self._place = place

    @property
    def corrupt(self) -> CorruptImages:
        return self._corrupt

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
            index = self._corrupt.skip(wanted)
            while True:
                try:
                    images.append(self._image(index))
                    break
                except UnreadableImage as reason:
                    index = self._corrupt.replacement(index, self.images.paths[index], str(reason))
            indices[row] = index
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
        look = Look(False, 1.0, 1.0, 1.0) if plain else random_look(settings, draws)
        start, size = np.array([top, left], np.int32), np.array([bottom - top, right - left], np.int32)
        return GraphInput(np.frombuffer(data, np.uint8), start, size, look)

    def _own(self, decoded: Any) -> Any:
        """Copy the batch from DALI's memory, which the next run overwrites."""
        if device_index(self._place) is None:
            return np.array(decoded.as_array())
        return copy_to_paddle(decoded, self._place)

    def _find_corrupt(self, first_step: int, error: RuntimeError) -> None:
        """Count the unreadable images of the steps that the pipeline may have been processing; if there are none,
        raise."""
        known = len(self._corrupt)
        out = np.empty(self.images.sample_shape, np.float32)
        for step in range(first_step, min(len(self), first_step + BATCHES_IN_DALI + 1)):
            for wanted in self.indices(step).tolist():
                index = self._corrupt.skip(wanted)
                try:
                    self._decoder.decode(self.images.path(index), index, self.sampler.epoch, out)
                except UnreadableImage as reason:
                    self._corrupt.replacement(index, self.images.paths[index], str(reason))
        if len(self._corrupt) == known:
            raise DataError(
                f"DALI failed on images that Pillow can read; try --loader workers. DALI reports: {error}"
            ) from error
