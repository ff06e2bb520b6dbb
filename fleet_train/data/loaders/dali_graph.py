"""DALI's graph: encoded images and decisions in, normalised batches out. The same graph on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleet_train.data.images.folder import ImageFolder
from fleet_train.data.images.geometry import Look
from fleet_train.data.loaders.device import new_feed_tensor
from fleet_train.errors import DataError

BATCHES_IN_DALI = 2
"""How many batches DALI prefetches itself."""


class GraphInput(NamedTuple):
    """The graph's input for one image."""

    data: NDArray[np.uint8]
    start: NDArray[np.int32]
    """Top and left of the used part, in pixels."""
    size: NDArray[np.int32]
    """Its height and width."""
    look: Look


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
        columns = zip(*(image.look[1:] for image in images), strict=True) if with_colors else ()
        return (
            [image.data for image in images],
            [image.start for image in images],
            [image.size for image in images],
            [np.int32(image.look.flip) for image in images],
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
