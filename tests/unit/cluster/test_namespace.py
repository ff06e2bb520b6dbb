"""The state of one namespace at its root, on a virtual clock: no sockets, no waiting."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fleet_train.cluster.store import namespace
from fleet_train.cluster.store.namespace import Root, StoreNamespace
from fleet_train.cluster.store.wire import (
    ProtocolError,
)
from tests.support.connections import BARRIER, Heard, arrive, in_virtual_time, root_here


def ask(at: StoreNamespace, header: dict[str, Any], body: bytes = b"") -> tuple[dict[str, Any], Any]:
    """The answer to what needs no waiting: its header, and its body read."""
    answers: list[tuple[dict[str, Any], Any]] = []
    at.ask(header, body, lambda head, text: answers.append((head, json.loads(text) if text else None)))
    assert len(answers) == 1
    return answers[0]


def join(root: Root, member: int, machine: str = "m", group: str = "rank") -> dict[str, Any]:
    return ask(root, {"do": "join", "group": group, "member": member, "via": [machine, f"{group} {member}"]})[0]


@in_virtual_time
async def test_barriers_are_numbered_and_other_kinds_are_not() -> None:
    root = root_here()
    for number in (1, 2):
        one, two = Heard(), Heard()
        arrive(root, one, 0, 2)
        assert one.frames == []
        arrive(root, two, 1, 2)
        assert one.frames == two.frames == [({"slowest": 1.0, "stop": None, "number": number, "to": BARRIER}, b"")]
    arrive(root, one, 0, 1, kind="all_gather", body=b"x")
    assert one.headers[-1] == {"to": ["rank", "all_gather", "step 1"]}
    arrive(root, one, 0, 1, group="supervisor")
    assert one.headers[-1]["number"] == 1  # every group has an order of its own
    assert not root.pending


@in_virtual_time
async def test_who_does_not_come_in_time_is_named_and_who_gave_up_is_not_blamed() -> None:
    root = root_here()
    patient, hasty = Heard(), Heard()
    arrive(root, patient, 0, 4, timeout=5.0)
    arrive(root, hasty, 2, 4, timeout=2.0)
    await asyncio.sleep(1.9)
    assert hasty.frames == []
    await asyncio.sleep(0.2)
    assert hasty.headers == [{"error": "timeout", "missing": [[1, 1], [3, 3]], "to": BARRIER}]
    assert patient.frames == []
    await asyncio.sleep(2.8)
    assert patient.frames == []
    await asyncio.sleep(0.2)
    assert patient.headers == [{"error": "timeout", "missing": [[1, 1], [3, 3]], "to": BARRIER}]
    assert not root.pending


@in_virtual_time
async def test_members_that_say_another_number_of_members_are_told_both() -> None:
    root, one, two = root_here(), Heard(), Heard()
    arrive(root, one, 3, 8)
    arrive(root, two, 5, 9)
    assert one.headers == two.headers == [{"error": "count", "counts": [[3, 8], [5, 9]], "to": BARRIER}]


@in_virtual_time
async def test_members_at_different_barriers_are_told_a_second_later() -> None:
    root = root_here()
    one, two, other = Heard(), Heard(), Heard()
    arrive(root, other, 0, 3, group="supervisor", name="facts")
    arrive(root, one, 0, 2, name="a", call="fleet.save")
    arrive(root, two, 1, 2, name="b")
    await asyncio.sleep(0.9)
    assert one.frames == two.frames == []
    await asyncio.sleep(0.2)
    where = [[[[0, 0]], "a", "fleet.save"], [[[1, 1]], "b", ""]]
    assert [(header["error"], json.loads(body)) for header, body in one.frames + two.frames] == [("crossed", where)] * 2
    assert other.frames == []


@in_virtual_time
async def test_a_coincidence_is_no_mistake_and_is_looked_at_again() -> None:
    root, one, two, three = root_here(), Heard(), Heard(), Heard()
    arrive(root, one, 0, 3, name="a")
    arrive(root, two, 1, 3, name="b")
    await asyncio.sleep(5.0)  # the third may come to either
    assert one.frames == two.frames == []
    arrive(root, three, 2, 3, name="b")
    await asyncio.sleep(0.9)
    assert one.frames == []
    await asyncio.sleep(0.2)
    assert [heard.headers[0]["error"] for heard in (one, two, three)] == ["crossed"] * 3
    # Afterwards the same is seen again.
    arrive(root, one, 0, 2, name="a")
    arrive(root, two, 1, 2, name="b")
    await asyncio.sleep(1.1)
    assert len(one.frames) == len(two.frames) == 2


@in_virtual_time
async def test_a_value_that_does_not_fit_is_refused_and_leaves_the_one_before() -> None:
    root = root_here()
    half = bytes(32 << 20)
    assert [root.put(key, half) for key in "ab"] == [True, True]
    assert not root.put("c", b"x")
    assert root.put("a", half)  # in place of the old one
    assert root.put("a", half[:-1])
    assert root.put("c", b"7")
    assert not root.put("d", b"x")
    assert not root.put("c", b"10")
    assert ask(root, {"do": "get", "key": "c"}) == ({}, 7)
    assert ask(root, {"do": "set", "key": "e"}, b"1") == ({"error": "full"}, None)
    assert ask(root, {"do": "keys", "prefix": ""}) == ({}, ["a", "b", "c"])


@in_virtual_time
async def test_keys_are_bounded_and_listed_by_their_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "_MOST_KEYS", 3)
    root = root_here()
    assert [root.put(key, b"1") for key in ("ab", "b", "ac", "d")] == [True, True, True, False]
    assert root.put("b", b"2")
    assert ask(root, {"do": "keys", "prefix": "a"}) == ({}, ["ab", "ac"])
    assert [ask(root, {"do": "get", "key": key}) for key in "bd"] == [({}, 2), ({}, None)]


@in_virtual_time
async def test_a_failure_ends_every_barrier_and_the_first_one_stands() -> None:
    root, one, two, late = root_here(), Heard(), Heard(), Heard()
    arrive(root, one, 0, 2)
    arrive(root, two, 0, 2, group="supervisor")
    await asyncio.sleep(2.5)
    first, second = {"message": "first"}, {"message": "second"}
    for report in (first, second):
        assert ask(root, {"do": "fail"}, json.dumps(report).encode()) == ({}, None)
    for heard in (one, two):
        assert [(header["error"], json.loads(body)) for header, body in heard.frames] == [("failed", first)]
    arrive(root, late, 1, 2)
    assert json.loads(late.frames[0][1]) == first
    await asyncio.sleep(1.0)
    assert ask(root, {"do": "failures", "known": 0})[1] == [[first, 2.5], [second, 2.5]]
    assert ask(root, {"do": "failures", "known": 1})[1] == [[second, 2.5]]
    assert ask(root, {"do": "clock"}) == ({}, 3.5)
    for number in range(260):
        ask(root, {"do": "fail"}, json.dumps({"message": str(number)}).encode())
    kept = ask(root, {"do": "failures", "known": 254})[1]
    assert [report["message"] for report, _ in kept] == ["252", "253"], "so many are kept"


@in_virtual_time
async def test_whoever_is_gone_is_named_to_those_who_wait_for_it_only() -> None:
    root = root_here()
    for member in range(4):
        assert join(root, member, "far" if member > 1 else "near") == {}
    assert join(root, 2, "far", group="supervisor") == {}
    waiting, other, done, beside = Heard(), Heard(), Heard(), Heard()
    arrive(root, waiting, 0, 4, call="fleet.all_reduce")
    arrive(root, done, 1, 4, call="fleet.all_reduce")
    arrive(root, other, 0, 2, name="of two")
    arrive(root, beside, 1, 3, group="supervisor")
    root.depart("rank 1", "left")
    assert waiting.frames == []  # member 1 had arrived
    assert json.loads(other.frames[0][1]) == [[[[1, 1]], "left"]]
    root.depart("far", "its connection broke")
    header, body = waiting.frames[0]
    assert header == {"error": "gone", "call": "fleet.all_reduce", "to": BARRIER}
    assert json.loads(body) == [[[[2, 3]], "its connection broke"]]
    assert json.loads(beside.frames[0][1]) == [[[[2, 2]], "its connection broke"]], "a machine's, in every group"
    assert ask(root, {"do": "gone", "group": "rank"})[1] == [[[[1, 1]], "left"], [[[2, 3]], "its connection broke"]]
    assert ask(root, {"do": "gone", "group": "other"})[1] == []


@in_virtual_time
async def test_the_first_reason_for_which_a_member_is_gone_stands() -> None:
    root = root_here()
    join(root, 0)
    root.depart("rank 0", "left")
    root.depart("rank 0", "its connection broke")
    assert ask(root, {"do": "gone", "group": "rank"})[1] == [[[[0, 0]], "left"]]
    join(root, 1)
    root.depart("rank 1", "lost")
    ask(root, {"do": "ended", "group": "rank", "member": 1})
    assert ask(root, {"do": "gone", "group": "rank"})[1] == [[[[0, 0]], "left"], [[[1, 1]], "lost"]]
    assert join(root, 1) == {}
    assert ask(root, {"do": "gone", "group": "rank"})[1] == [[[[0, 0]], "left"]]


@in_virtual_time
async def test_a_process_that_has_ended_without_joining_is_not_waited_for() -> None:
    root = root_here()
    waiting = Heard()
    join(root, 0)
    arrive(root, waiting, 0, 2)
    assert ask(root, {"do": "ended", "group": "rank", "member": 0}) == ({}, None)  # it is here: its connection will say
    assert waiting.frames == []
    assert ask(root, {"do": "ended", "group": "rank", "member": 1}) == ({}, None)
    assert json.loads(waiting.frames[0][1]) == [[[[1, 1]], "left"]]


@in_virtual_time
async def test_a_member_may_join_once_in_each_group() -> None:
    root = root_here()
    assert join(root, 3) == {}
    assert join(root, 3) == {"error": "twice"}
    assert join(root, 3, group="supervisor") == {}
    with pytest.raises(ProtocolError, match="member"):
        join(root, 1 << 17)
    assert join(root, (1 << 17) - 1) == {}


@in_virtual_time
async def test_what_cannot_be_asked_is_refused() -> None:
    for header in ({"do": "dance"}, {"do": "get"}, {"do": "get", "key": "k" * 501}, {"do": "failures", "known": 257}):
        with pytest.raises(ProtocolError):
            ask(root_here(), header)
    ask(root_here(), {"do": "get", "key": "k" * 500})


@in_virtual_time
async def test_a_member_reads_the_times_of_all_up_to_one_of_the_last_eight_barriers() -> None:
    root = root_here()
    for number in range(1, 13):
        arrive(root, Heard(), 0, 2, told=[number, 10 * number, 0.5])
        arrive(root, Heard(), 1, 2, told=[number, 20 * number, 0.25])

    def times(number: int) -> Any:
        return ask(root, {"do": "times", "group": "rank", "number": number})[1]

    assert times(12) == times(13) == [[0, [12.0, 120.0, 0.5]], [1, [12.0, 240.0, 0.25]]]
    assert times(5) == [[0, [5.0, 50.0, 0.5]], [1, [5.0, 100.0, 0.25]]]
    assert times(4) == []  # further back nothing is known any more
    assert ask(root, {"do": "times", "group": "supervisor", "number": 1})[1] == []
