"""Records what a rank does while a program runs: every collective, launch, wait and barrier, with step and thread."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paddle

from fleet_train.cluster import StoreClient
from fleet_train.collectives.exchange import GradientExchange
from tests.parallel.knob_effects_seen import Event


class Watch:
    """Stands before Paddle's collectives, the exchange and the store from its making on."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.step = 0
        self.holds = 0.0
        """For how many seconds at most a collective waits until no launch operator is under way."""
        self._idle = threading.Event()
        self._idle.set()
        for kind in ("all_reduce", "all_gather", "reduce", "broadcast"):
            stream = paddle.distributed.stream
            setattr(stream, kind, self._collective(kind, getattr(stream, kind)))
        GradientExchange.launch = self._launch(GradientExchange.launch)  # type: ignore[method-assign]
        StoreClient._meet = self._meet(StoreClient._meet)  # type: ignore[method-assign]

    def begin(self, holds: float) -> None:
        self.events, self.step, self.holds = [], 0, holds

    def _note(self, what: str, **details: Any) -> None:
        self.events.append(Event(what, self.step, threading.get_ident(), **details))

    def _collective(self, kind: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, group: Any = None, **options: Any) -> Any:
            tensor = args[1] if kind == "all_gather" else args[0]
            dtype = str(tensor.dtype).removeprefix("paddle.")
            nbytes = int(tensor.size) * tensor.element_size()
            self._note(kind, nbytes=nbytes, dtype=dtype, group=group.id, ranks=tuple(group.ranks))
            self._idle.wait(self.holds)
            if dtype == "float16":  # whose sums are infinite in Gloo: taken in float32 here
                wide = tensor.cast("float32")
                result = real(wide, group=group, **options)
                paddle.assign(wide.cast("float16"), output=tensor)
            else:
                result = real(*args, group=group, **options)
            self._note("sent", group=group.id)
            return result

        return call

    def _launch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def launch(exchange: Any, index: int, *args: Any) -> Any:
            self._note("launch", name=str(index))
            self._idle.clear()
            try:
                return real(exchange, index, *args)
            finally:
                self._idle.set()
                self._note("launched", name=str(index))

        return launch

    def _meet(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def meet(client: Any, kind: str, name: str, header: Any, body: bytes, count: int, *rest: Any) -> Any:
            self._note("meet", name=name, seconds=rest[0])
            return real(client, kind, name, header, body, count, *rest)

        return meet


@contextmanager
def variables(settings: dict[str, str]) -> Iterator[None]:
    """Variables of the process's environment for the body; what it leaves in there is taken out again."""
    before = dict(os.environ)
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
