"""Moments on a device's calculation stream, and values that the host reads later: never in the step they come from."""

from __future__ import annotations

import time
from typing import Any, Protocol

import paddle


class Moment(Protocol):
    """A point of the calculation stream."""

    def has_passed(self) -> bool:
        """Whether everything that was enqueued before it is done."""

    def await_passed(self) -> None:
        """Block the host until then."""

    def seconds_since(self, earlier: Any) -> float:
        """Between two moments that have passed."""


class HostCopy(Protocol):
    """A tensor's value on its way to the host."""

    def read(self) -> Any:
        """A numpy array. Waits for what was enqueued before the copy; call it a step later."""


class Device(Protocol):
    """Where the program computes."""

    def moment(self) -> Moment:
        """The point that the calculation stream is at for what is enqueued now."""

    def to_host(self, tensor: Any) -> HostCopy:
        """Begin to copy ``tensor``, as it is for what is enqueued now; the host goes on."""

    def to_device(self, array: Any) -> Any:
        """A tensor of a numpy array's values for what is enqueued now; the host goes on.

        ``paddle.to_tensor`` copies from pageable memory, which waits for all that the device has to do.
        """


class HostMoment:
    """On a CPU what was called is done: the wall clock is the stream."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def has_passed(self) -> bool:
        return True

    def await_passed(self) -> None:
        return

    def seconds_since(self, earlier: Any) -> float:
        return float(self.at - earlier.at)


class Copied:
    """A copy that is there already."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def read(self) -> Any:
        return self._array


class HostDevice:
    """The CPU."""

    def moment(self) -> HostMoment:
        return HostMoment()

    def to_host(self, tensor: Any) -> Copied:
        return Copied(tensor.numpy().copy())

    def to_device(self, array: Any) -> Any:
        return paddle.to_tensor(array)


class GpuMoment:
    """An event on the calculation stream. Source: ``paddle.device.Event``, cudaEventRecord and cudaEventElapsedTime."""

    def __init__(self) -> None:
        self.event = paddle.device.Event(enable_timing=True)
        self.event.record()

    def has_passed(self) -> bool:
        return bool(self.event.query())

    def await_passed(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Any) -> float:
        return float(earlier.event.elapsed_time(self.event)) / 1e3


class PinnedCopy:
    """A copy into pinned memory, behind which an event stands."""

    def __init__(self, tensor: Any) -> None:
        self._copy = tensor._copy_to(paddle.CUDAPinnedPlace(), False)
        self._copied = GpuMoment()

    def read(self) -> Any:
        self._copied.await_passed()
        return self._copy.numpy()


class GpuDevice:
    """A GPU of Paddle's; nothing here blocks but ``PinnedCopy.read``."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self._sent: list[tuple[Any, GpuMoment]] = []
        """Pinned memory that copies may still read, each with the moment behind its copy."""

    def moment(self) -> GpuMoment:
        return GpuMoment()

    def to_host(self, tensor: Any) -> PinnedCopy:
        return PinnedCopy(tensor)

    def to_device(self, array: Any) -> Any:
        self._sent = [(pinned, copied) for pinned, copied in self._sent if not copied.has_passed()]
        pinned = paddle.to_tensor(array, place=paddle.CUDAPinnedPlace())
        tensor = pinned._copy_to(self._place, False)
        self._sent.append((pinned, GpuMoment()))
        return tensor
