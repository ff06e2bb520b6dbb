"""Events and copies of devices; for a GPU the calls are recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import paddle
import pytest

from fleet_train.collectives import engine as module
from fleet_train.collectives import job as choose
from fleet_train.collectives.engine import GpuDevice, HostDevice
from fleet_train.collectives.engines import StreamEngine, ThreadEngine
from fleet_train.collectives.job import make_engine
from fleet_train.collectives.methods.dense import cut_for, unflatten, views
from tests.unit.collectives.recorded import Attributed


def test_hosts_moments_are_those_of_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 7.0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now))
    earlier = HostDevice().moment()
    now = 9.5
    later = HostDevice().moment()
    assert (later.seconds_since(earlier), earlier.seconds_since(later)) == (2.5, -2.5)
    assert earlier.has_passed()


def test_copy_to_the_host_is_of_the_value_of_now() -> None:
    tensor = paddle.to_tensor([1.0, 2.0])
    copy = HostDevice().to_host(tensor)
    tensor.zero_()
    assert copy.read().tolist() == [1.0, 2.0]
    assert HostDevice().to_device(np.array([3, 4])).tolist() == [3, 4]


class Gpu:
    """The calls that make events and copies, in order; ``done`` says how many of the events have passed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.did: list[str] = []
        self.events = 0
        self.done = 0
        fake = SimpleNamespace(
            device=SimpleNamespace(Event=self._event), CUDAPinnedPlace=lambda: "pinned", to_tensor=self._tensor
        )
        monkeypatch.setattr(module, "paddle", fake)

    def _event(self, enable_timing: bool) -> Any:
        assert enable_timing, "times are asked for"
        self.events += 1
        number = self.events
        return SimpleNamespace(
            record=lambda: self.did.append(f"record {number}"),
            query=lambda: number <= self.done,
            synchronize=lambda: self.did.append(f"await {number}"),
            elapsed_time=lambda later: 250.0 * (later.number - number),
            number=number,
        )

    def _tensor(self, array: Any, place: str) -> Any:
        self.did.append(f"{place} {array}")
        return self.tensor(f"{place} {array}")

    def tensor(self, name: str) -> Any:
        def copy(place: str, blocking: bool) -> Any:
            assert blocking is False, "the host must not wait"
            self.did.append(f"copy {name} to {place}")
            return self.tensor(f"{name} on {place}")

        return SimpleNamespace(_copy_to=copy, numpy=lambda: f"array of {name}", name=name)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_a_gpus_events_give_seconds(gpu: Gpu) -> None:
    device = GpuDevice("gpu:0")
    first, second = device.moment(), device.moment()
    assert gpu.did == ["record 1", "record 2"]
    assert second.seconds_since(first) == 0.25
    gpu.done = 1
    assert (first.has_passed(), second.has_passed()) == (True, False)
    second.await_passed()
    assert gpu.did[2:] == ["await 2"]


def test_copy_to_the_host_is_waited_for_where_it_is_read(gpu: Gpu) -> None:
    copy = GpuDevice("gpu:0").to_host(gpu.tensor("loss"))
    assert gpu.did == ["copy loss to pinned", "record 1"]
    assert copy.read() == "array of loss on pinned"
    assert gpu.did[2:] == ["await 1"]


def test_pinned_memory_is_kept_until_its_copy_is_done(gpu: Gpu) -> None:
    device = GpuDevice("gpu:0")
    assert device.to_device("a").name == "pinned a on gpu:0"
    assert gpu.did == ["pinned a", "copy pinned a to gpu:0", "record 1"]
    device.to_device("b")
    assert [pinned.name for pinned, _ in device._sent] == ["pinned a", "pinned b"]
    gpu.done = 1
    device.to_device("c")
    assert [pinned.name for pinned, _ in device._sent] == ["pinned b", "pinned c"]


def test_processors_have_threads_and_gpus_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, kind in ((paddle.CPUPlace(), ThreadEngine), ("gpu:0", StreamEngine)):
        engine = make_engine(place, Attributed(), lambda: False, lambda *_: None)
        assert type(engine) is kind
        engine.stop()
    hopeless, stuck = object(), object()
    monkeypatch.setattr(choose, "Watchdog", lambda *told: SimpleNamespace(told=told, stop=lambda: None))
    engine = make_engine("gpu:0", Attributed(), hopeless, stuck)  # type: ignore[arg-type]
    assert engine._watchdog.told == (stuck, hopeless)  # type: ignore[attr-defined]
    engine.stop()


def test_buffers_are_cut_without_a_copy_on_a_host_only() -> None:
    assert (cut_for(True), cut_for(False)) == (views, unflatten)
    for cut in (views, unflatten):
        for shapes in ([(2, 3), (), (4,)], [(11,)], [(1, 11)]):
            parts = cut(paddle.arange(11, dtype="float32"), shapes)
            assert [tuple(part.shape) for part in parts] == shapes
            assert [value for part in parts for value in part.reshape([-1]).tolist()] == list(range(11))
