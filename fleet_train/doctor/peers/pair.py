"""Measurements between this node and another one, over an authenticated connection."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from fleet_train.cluster.store.protocol.wire import ProtocolError
from fleet_train.doctor.facts import Echo, Stream
from fleet_train.doctor.peers import streams
from fleet_train.doctor.peers.channel import WORD_SECONDS, Channel

_PINGS = 40
_PINGS_SECONDS = 0.4


def echo(channel: Channel, target: int, clock: Callable[[], float]) -> Echo:
    """Median round trip of a small message; how far this node's clock is ahead, from the fastest one (as NTP)."""
    times: list[float] = []
    best = (float("inf"), 0.0)
    began = time.perf_counter()
    while len(times) < 3 or (len(times) < _PINGS and time.perf_counter() - began < _PINGS_SECONDS):
        before, start = clock(), time.perf_counter()
        told = channel.ask({"do": "ping"})[0].get("clock")
        took = time.perf_counter() - start
        if not isinstance(told, (int, float)):
            raise ProtocolError("no clock")
        times.append(took)
        best = min(best, (took, before + took / 2 - told))
    return Echo(target, statistics.median(times), best[1], best[0] / 2)


def stream(channel: Channel, source: int, target: int, outgoing: bool, seconds: float) -> Stream:
    """Raises TimeoutError if bytes do not arrive, OSError, ProtocolError."""
    do = "stream to you" if outgoing else "stream to me"
    alone = channel.ask({"do": do, "seconds": seconds})[0].get("ready") is True
    if outgoing:
        sent = streams.send(channel.sock, seconds)
        channel.sock.settimeout(WORD_SECONDS)
        told = channel.hear()[0]
        speed, best = _number(told.get("speed")), _number(told.get("best"))
        return Stream(source, target, speed, best, sent.segments, sent.retransmits, alone=alone)
    channel.say({"do": "go"})
    received = streams.receive(channel.sock, seconds)
    channel.sock.settimeout(WORD_SECONDS)
    told = channel.hear()[0]
    segments, retransmits = int(_number(told.get("segments"))), int(_number(told.get("retransmits")))
    return Stream(source, target, received.mean, received.best, segments, retransmits, alone=alone)


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value < 1e15:
        raise ProtocolError("no number")
    return float(value)
