"""Events on a device's calculation stream, and values that the host reads in a later step than they come from."""

from __future__ import annotations

import time
from typing import Any, Protocol

import paddle


class Moment(Protocol):
    """A point of the calculation stream."""

    def has_passed(self) -> bool:
        """Whether everything enqueued before it is done."""

    def await_passed(self) -> None:
        """Block the host until then."""

    def seconds_since(self, earlier: Any) -> float:
        """The time between two points that have both passed."""


class HostCopy(Protocol):
    """A tensor's value on its way to the host."""

    def read(self) -> Any:
        """A numpy array. Waits for what was enqueued before the copy; call it a step later."""


class Device(Protocol):
    """Where the program computes."""

    def moment(self) -> Moment:
        """The current end of the calculation stream."""

    def to_host(self, tensor: Any) -> HostCopy:
        """Start copying ``tensor`` at the current end of the stream; the host does not wait."""

    def to_device(self, array: Any) -> Any:
        """A tensor of a numpy array's values, usable by work enqueued from now on; the host does not wait.

        ``paddle.to_tensor`` copies from pageable memory, which waits until the device is idle.
        """


class HostMoment:
    """On a CPU every call has finished when it returns: the wall clock replaces the stream."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def has_passed(self) -> bool:
        return True

    def await_passed(self) -> None:
        return

    def seconds_since(self, earlier: Any) -> float:
        return float(self.at - earlier.at)


class Copied:
    """A copy that is already complete."""

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
    """A copy into pinned memory, followed by an event."""

    def __init__(self, tensor: Any) -> None:
        self._copy = tensor._copy_to(paddle.CUDAPinnedPlace(), False)
        self._copied = GpuMoment()

    def read(self) -> Any:
        self._copied.await_passed()
        return self._copy.numpy()


class GpuDevice:
    """A GPU; only ``PinnedCopy.read`` blocks."""

    def __init__(self, place: Any) -> None:
        self._place = place
        self._sent: list[tuple[Any, GpuMoment]] = []
        """Pinned memory that copies may still read, each with the event after its copy."""

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
