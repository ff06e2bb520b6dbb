"""The protocol between members and the store, byte by byte: member sets, fields, payloads, reports, greetings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from fleet_train.cluster import Cluster
from fleet_train.cluster.cluster import Rank, below, parent_of, subtree
from fleet_train.cluster.store.access import Access, Caller, Refused, accept, access_of, challenge
from fleet_train.cluster.store.reports import (
    NO_RANK,
    FailureReport,
    Messages,
    checked_report,
    report_of_exit,
    reports_of,
    with_absent,
)
from fleet_train.cluster.store.wire import (
    Decoder,
    Fields,
    ProtocolError,
    Reduced,
    TooLarge,
    Values,
    all_members,
    each_member,
    encode,
    first_member,
    from_ranges,
    pack,
    pack_times,
    parse,
    shortened,
    to_ranges,
    unpack,
    unpack_times,
)
from fleet_train.errors import (
    Absence,
    CheckpointError,
    ClusterError,
    DataError,
    FleetTrainError,
    JoinTimeout,
    LinkFailed,
    ScheduleMismatch,
    WorkerFailed,
)
from tests.support.connections import arrival

# sets of members


@pytest.mark.parametrize(
    ("who", "ranges"),
    [
        ([], []),
        ([0], [[0, 0]]),
        ([1, 2, 3], [[1, 3]]),
        ([0, 2, 3, 7], [[0, 0], [2, 3], [7, 7]]),
        ([100_000, 131_071], [[100_000, 100_000], [131_071, 131_071]]),
    ],
)
def test_sets_are_bits_in_memory_and_ranges_on_the_wire(who: list[int], ranges: list[list[int]]) -> None:
    mask = sum(2**member for member in who)
    assert to_ranges(mask) == ranges
    assert list(each_member(mask)) == who
    assert from_ranges(ranges) == mask
    assert not who or first_member(mask) == who[0]


@pytest.mark.parametrize(
    "told", [None, "0-3", [[0]], [[0, 1, 2]], [0, 1], [[0, 4]], [[-1, 2]], [[3, 2]], [[0, True]], [[0.0, 1]], [(0, 1)]]
)
def test_what_is_no_range_of_four_members_is_refused(told: object) -> None:
    with pytest.raises(ProtocolError):
        from_ranges(told, 4)


def test_a_tree_of_servers() -> None:
    assert [all_members(count) for count in (0, 1, 4)] == [0, 1, 15]
    assert [parent_of(node, 2) for node in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    assert [list(subtree(node, count, 2)) for node, count in ((1, 7), (1, 4))] == [[1, 3, 4], [1, 3]]
    assert list(subtree(0, 1)) == [0]
    assert below(1, [[0, 1], [2], [3], [4], [5, 6]], 2) == 0b1110100
    assert [parent_of(node) for node in (1, 32, 33, 64, 65)] == [0, 0, 1, 1, 2]


# fields


FIELDS = Fields({"text": "abc", "whole": 7, "half": 0.5, "yes": True, "one": 1, "none": None})


def test_fields_have_types() -> None:
    assert FIELDS.text("text", most=3) == "abc"
    assert FIELDS.text("missing", "otherwise") == "otherwise"
    assert (FIELDS.integer("whole", 7, 7), FIELDS.number("half"), FIELDS.number("whole", 7)) == (7, 0.5, 7.0)
    assert (FIELDS.flag("yes"), FIELDS.flag("one"), FIELDS.flag("missing")) == (True, False, False)
    assert (FIELDS.optional_seconds("none"), FIELDS.optional_seconds("half")) == (None, 0.5)
    assert Fields({"s": 0.0}).optional_seconds("s") == 0.05


@pytest.mark.parametrize(
    "read",
    [
        lambda: FIELDS.text("text", most=2),
        lambda: FIELDS.text("whole"),
        lambda: FIELDS.text("missing"),
        lambda: FIELDS.integer("whole", 8, 9),
        lambda: FIELDS.integer("whole", 0, 6),
        lambda: FIELDS.integer("half", 0, 9),
        lambda: FIELDS.integer("yes", 0, 9),
        lambda: FIELDS.number("whole", 6),
        lambda: FIELDS.number("yes"),
        lambda: Fields({"n": -0.1}).number("n"),
        lambda: Fields({"s": 2e7}).optional_seconds("s"),
    ],
)
def test_fields_have_bounds(read: Callable[[], object]) -> None:
    with pytest.raises(ProtocolError):
        read()


def test_headers_are_whole_objects() -> None:
    assert parse(b'{"a":1}') == {"a": 1}
    for text in (b"[1]", b"{} ", b"{}{}", b"", b"{", b'{"a":NaN}', b"\xff{}", b"[" * 100_000):
        with pytest.raises(ProtocolError):
            parse(text)
    assert encode({"a": 1}, b"xyz") == b'\x00\x00\x00\x07\x00\x00\x00\x03{"a":1}xyz'


@pytest.mark.parametrize("filling", [b"", b"x" * (1 << 16)])
def test_a_body_that_looks_like_a_frame_is_a_body(filling: bytes) -> None:
    """Also where it comes in a packet of its own."""
    inner = encode({"do": "fail"}, filling)
    outer = encode({"do": "set"}, inner)
    decoder = Decoder()
    assert list(decoder.feed(outer[: -len(inner)])) == []
    (frame,) = decoder.feed(inner)
    assert (parse(frame[0]), bytes(frame[1])) == ({"do": "set"}, inner)
    assert [parse(head) for head, _ in decoder.feed(inner + outer)] == [{"do": "fail"}, {"do": "set"}]


def test_text_is_fit_for_a_terminal() -> None:
    assert shortened("a\tb\nc\x1b[31m\rd") == "a\tb\nc\\x1b[31m\\rd"
    assert shortened("abcd", 4) == "abcd"
    assert shortened("abcde", 4) == "abcd... (5 characters)"


# values


def gathered(*values: bytes) -> Values:
    """The values of members 0, 1, ..."""
    together = Values()
    for member, value in enumerate(values):
        together.add(arrival(1 << member, len(values), {}, pack({value: 1 << member}) if value else b""))
    return together


def test_values_travel_once_with_the_members_that_have_them() -> None:
    packed = gathered(b"same", b"", b"same", b"other").part()[1]
    index = b"[[[[0,0],[2,2]],4],[[[3,3]],5]]"
    assert packed == bytes([0, 0, 0, len(index)]) + index + b"sameother"
    assert unpack(packed) == [(0b101, b"same"), (0b1000, b"other")]
    assert unpack(b"") == []
    for body in (packed[:3], packed[:10], packed[:-1], packed + b"x", b"\x00\x02\x00\x01" + packed[4:]):
        with pytest.raises(ProtocolError):
            unpack(body)
    for index in (b"{}", b"[1]", b"[[[[0,0]]]]", b"[[[[0,0]],0]]", b"[[[[0,4]],1]]", b"[[[[0,0]],true]]", b"[" * 9999):
        with pytest.raises(ProtocolError):
            unpack(len(index).to_bytes(4, "big") + index + b"x", 4)


def test_a_part_that_is_said_again_replaces_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    together = gathered(b"a", b"b")
    together.add(arrival(0b10, 2, {}, pack({b"a": 0b10})))
    assert together.masks == {b"a": 0b11}
    monkeypatch.setattr("fleet_train.cluster.store.wire.MOST_GATHERED_BYTES", 10)
    above = Values()
    for value in (b"12345", b"1234567", b"123"):
        above.add(arrival(0b1, 2, *gathered(value).part()))
    above.add(arrival(0b10, 2, {}, pack({b"1234567": 0b10})))  # ten bytes in all
    assert unpack(above.part()[1]) == [(0b1, b"123"), (0b10, b"1234567")]
    with pytest.raises(TooLarge):
        above.add(arrival(0b10, 2, {}, pack({b"12345678": 0b10})))
    with pytest.raises(ProtocolError, match="other members than declared"):
        Values().add(arrival(0b10, 2, *gathered(b"x").part()))


# reports


def checked(value: object) -> dict[str, Any]:
    return checked_report(json.dumps(value).encode())


def test_reports_are_small_and_of_known_types() -> None:
    report = {"message": "a\x1b", "lines": ["x"] * 101, "ok": None, "share": 0.5, "n": 1 << 53, "k" * 101: True}
    kept = {"message": "a\\x1b", "lines": ["x"] * 100, "ok": None, "share": 0.5, "n": 1 << 53, "k" * 100: True}
    assert checked(report) == kept
    assert checked({"message": "m" * 9000})["message"] == "m" * 8000 + "... (9000 characters)"
    longest = '{"a":"' + "x" * ((1 << 18) - len('{"a":""}')) + '"}'
    assert checked_report(longest.encode())["a"].startswith("xxx")
    with pytest.raises(ProtocolError, match="too long"):
        checked_report(longest.encode() + b" ")


@pytest.mark.parametrize("value", [{}, [1], ["x", 1], (1 << 53) + 1, -(1 << 53) - 1])
def test_a_report_of_something_else_is_refused(value: object) -> None:
    with pytest.raises(ProtocolError):
        checked({"a": value})


@pytest.mark.parametrize(
    ("code", "kept"), [(0, 1), (1, 1), (256, 1), (257, 1), (258, 2), (-9, 247), ("7", 1), (True, 1)]
)
def test_a_report_never_has_the_exit_code_of_success(code: object, kept: int) -> None:
    assert checked({"exit_code": code}) == {"exit_code": kept}


# greetings


def greeted(ours: Access, theirs: Access) -> None:
    """Both sides, once they have said what they have to. Raises Refused, of either."""
    caller, asked = Caller(ours, {"namespace": "0", "group": "rank", "member": 1}), challenge(theirs)
    hello = caller.heard(asked)
    assert hello is not None
    assert hello["member"] == 1
    assert caller.heard({"welcome": True, "proof": accept(theirs, asked, hello)}) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        (Access("a"), Access("b"), "job"),
        (Access("a", b"x" * 20), Access("a"), ""),
        (Access("a"), Access("a", b"x" * 20), ""),
        (Access("a", b"x" * 20), Access("a", b"y" * 20), "secret"),
    ],
)
def test_two_of_the_same_job_greet_and_others_are_refused_by_one_side(ours: Access, theirs: Access, kind: str) -> None:
    greeted(ours, ours)
    with pytest.raises(Refused) as refusal:
        greeted(ours, theirs)
    assert refusal.value.kind == kind


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"secret": False}, "has no job secret and this node has one"),
        ({"secret": None}, "has no job secret and this node has one"),
        ({"version": 3}, "another version of fleet_train"),
        ({"version": None}, "another version of fleet_train"),
        ({"version": "4"}, "another version of fleet_train"),
    ],
)
def test_a_challenge_of_another_server_is_left(change: dict[str, Any], words: str) -> None:
    access = Access("a", b"x" * 20)
    with pytest.raises(Refused, match=words):
        Caller(access, {}).heard(challenge(access) | change)


@pytest.mark.parametrize("welcome", [{}, {"proof": ""}, {"proof": "00"}, {"proof": 7}])
def test_a_server_without_a_proof_is_no_server_of_a_job_with_a_secret(welcome: dict[str, Any]) -> None:
    access = Access("a", b"x" * 20)
    caller = Caller(access, {})
    hello = caller.heard(challenge(access))
    assert hello is not None
    for proof in (welcome, {"proof": hello["proof"]}):  # nor its own, sent back
        with pytest.raises(Refused, match="another secret"):
            caller.heard({"welcome": True} | proof)


def test_a_proof_holds_for_one_connection_and_one_member() -> None:
    access = Access("a", b"x" * 20)
    asked = challenge(access)
    hello = Caller(access, {"member": 1}).heard(asked)
    assert hello is not None
    assert accept(access, asked, hello)
    for given, said in ((asked, hello | {"member": 2}), (challenge(access), hello), (asked, hello | {"nonce": "n"})):
        with pytest.raises(Refused) as refusal:
            accept(access, given, said)
        assert refusal.value.kind == "secret"


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        ({"do": "prove"}, ProtocolError),
        ({"do": "hello", "job": "a"}, ProtocolError),
        ({"do": "hi", "job": "a", "nonce": "n"}, ProtocolError),
        ({"do": "hello", "job": "a", "nonce": "n"}, Refused),
        ({"do": "hello", "job": "a", "nonce": "n", "proof": "00"}, Refused),
        ({"do": "hello", "job": "a", "nonce": "n", "proof": ["00"]}, Refused),
    ],
)
def test_a_server_hears_a_hello_with_a_proof(hello: dict[str, Any], error: type[Exception]) -> None:
    access = Access("a", b"x" * 20)
    with pytest.raises(error):
        accept(access, challenge(access), hello)


@pytest.mark.parametrize(
    ("answer", "is_temporary", "words"),
    [
        ({"error": "closed"}, True, "not opened this round yet"),
        ({"error": "full"}, True, "has reached its limit of connections"),
        ({"error": "address", "address": "10.0.0.1", "later": True}, True, "comes from 10.0.0.1;"),
        ({"error": "address", "address": "10.0.0.1", "later": False}, False, "comes from 10.0.0.1;"),
        ({"error": "job", "job": "b", "later": True}, False, "another job, 'b', and this is 'a'"),
        ({"error": "secret"}, False, "another secret than this node"),
        ({"error": "store", "why": "x"}, False, "a server that is lost: x"),
        ({"error": "twice"}, False, "it answered 'twice'"),
    ],
)
def test_refusals_say_why_and_whether_to_try_again(answer: dict[str, Any], is_temporary: bool, words: str) -> None:
    with pytest.raises(Refused, match=words) as refusal:
        Caller(Access("a"), {}).heard(answer)
    assert (refusal.value.kind, refusal.value.is_temporary) == (answer["error"], is_temporary)


def test_a_rank_calls_from_its_hosts_address_for_the_job_of_its_launcher_or_the_given_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert Access.of({"FLEET_TRAIN_JOB_ID": "launched"}, job="told") == Access("launched")
    assert Access.of({}, "10.0.0.1", "told") == Access("told", None, "10.0.0.1")
    assert Access.of({}) == Access()
    cluster = Cluster.imagined(2, 1)
    host = cluster.this.host
    assert access_of(cluster, {"PADDLE_JOB_ID": "stock"}) == Access("stock", None, host)
    assert access_of(cluster, {"PADDLE_JOB_ID": "stock", "FLEET_TRAIN_JOB_ID": "ours"}) == Access("ours", None, host)
    monkeypatch.setenv("FLEET_TRAIN_JOB_ID", "of this process")
    assert access_of(cluster) == Access("of this process", None, host)
    assert Access.of() == Access("of this process")


# answers in words


def said(answer: dict[str, Any], body: object = None) -> FleetTrainError:
    words = Messages("10.0.0.1:6170", "rank", lambda member: f"rank {member}")
    return words.error(answer, json.dumps(body).encode())


def test_few_are_named_and_many_are_counted() -> None:
    eight = ", ".join(f"rank {member}" for member in (0, 1, 2, 3, 6, 7, 8, 9))
    assert str(said({"error": "timeout", "missing": [[0, 3], [6, 9]]})) == f"{eight} did not arrive"
    error = said({"error": "timeout", "missing": [[0, 3], [6, 6], [8, 11]]})
    assert str(error) == "ranks 0-3, 6, 8-11 (9 in all) did not arrive"
    assert isinstance(error, JoinTimeout)
    assert [absence.member for absence in error.absent] == [0, 1, 2, 3, 6, 8, 9, 10]
    assert error.absent[0] == Absence(0, "missing", "did not arrive")
    many = said({"error": "timeout", "missing": [[2 * number, 2 * number] for number in range(9)]})
    assert str(many) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (9 in all) did not arrive"


def test_lost_members_are_named_with_the_reason_and_many_are_grouped() -> None:
    error = said({"error": "gone"}, [[[[3, 3]], "left"], [[[1, 2]], "its connection broke"]])
    assert str(error) == (
        "rank 3 finished and left the job while others still wait for it (unequal numbers of steps, or an exit?); "
        "rank 1 was lost (its connection broke: the process ended or its machine cannot be reached); "
        "rank 2 was lost (its connection broke: the process ended or its machine cannot be reached)"
    )
    assert isinstance(error, WorkerFailed)
    assert [(one.member, one.kind) for one in error.absent] == [(3, "left"), (1, "lost"), (2, "lost")]
    left = said({"error": "gone", "call": "fleet.save"}, [[[[3, 3]], "left"]])
    assert "rank 3 finished and left the job while others wait for it in fleet.save; call fleet.save on" in str(left)
    many = said({"error": "gone"}, [[[[0, 4]], "silent"], [[[6, 9]], "left"]])
    assert str(many).startswith("rank 0, rank 1, rank 2, rank 3, rank 4: was lost (silent: ")
    assert len(many.absent) == 8


def test_members_at_different_places_get_the_fix() -> None:
    steps = said({"error": "crossed"}, [[[[1, 1]], "step 2", ""], [[[0, 0]], "step 3", ""]])
    assert str(steps) == (
        "the ranks wait for each other at different points: rank 0 at 'step 3', rank 1 at 'step 2'; every rank must "
        "make the same steps and calls in the same order (unequal numbers of batches?)"
    )
    assert isinstance(steps, ScheduleMismatch)
    calls = said({"error": "crossed"}, [[[[1, 1]], "a", "fleet.save"], [[[0, 0]], "b", "fleet.save"]])
    assert str(calls).endswith("rank 1 in fleet.save; every rank must make the same calls in the same order")
    mixed = said({"error": "crossed"}, [[[[1, 8]], "a", "fleet.save"], [[[0, 0]], "b", ""]])
    eight = ", ".join(f"rank {member}" for member in range(1, 9))
    assert f"points: rank 0 at 'b', {eight} in fleet.save; call" in str(mixed)
    few = said({"error": "crossed"}, [[[[1, 7]], "a", "fleet.save"], [[[0, 0]], "b", ""]])
    each = ", ".join(f"rank {member} in fleet.save" for member in range(1, 8))
    assert f"points: rank 0 at 'b', {each}; call" in str(few)
    assert "; call fleet.save on all ranks, without `if rank == 0` around it; if all of them do" in str(mixed)


@pytest.mark.parametrize(
    ("answer", "body", "kind", "words"),
    [
        (
            {"error": "count", "counts": [[3, 8], [5, 9]]},
            None,
            ScheduleMismatch,
            "rank 3 .* has 8 ranks, rank 5 says 9",
        ),
        ({"error": "store", "why": "gone"}, None, WorkerFailed, r"10.0.0.1:6170 no longer answers \(gone\)"),
        ({"error": "large"}, None, ClusterError, "exceed what the rendezvous store can hold"),
        ({"error": "full"}, None, ClusterError, "10.0.0.1:6170 can hold no more values"),
        ({"error": "odd"}, None, ClusterError, "answered 'odd'"),
        ({"error": "failed"}, {"message": "out of memory"}, WorkerFailed, "^out of memory$"),
        ({"error": "failed"}, {"exit_code": 7}, WorkerFailed, "^{'exit_code': 7}$"),
    ],
)
def test_messages_of_other_refusals(
    answer: dict[str, Any], body: object, kind: type[FleetTrainError], words: str
) -> None:
    error = said(answer, body)
    assert type(error) is kind
    assert re.search(words, str(error))


def reduced(*headers: dict[str, object]) -> Reduced:
    """The parts of members 0, 1, ... of a step barrier."""
    barrier = Reduced()
    for member, header in enumerate(headers):
        barrier.add(arrival(1 << member, len(headers), header))
    return barrier


@pytest.mark.parametrize(
    ("told", "slowest"),
    [([12.0, 80.0, 30.0], 80.0), ([80.0, 12.0], 80.0), ([0.0], 0.0), ([80.0, None, 12.0], None)],
)
def test_the_slowest_member_has_the_longest_step(told: list[float | None], slowest: float | None) -> None:
    barrier = reduced(*({"slowest": milliseconds} for milliseconds in told))
    assert barrier.part() == ({"slowest": slowest, "stop": None}, b"")


@pytest.mark.parametrize(
    ("told", "same"),
    [([7, 7, 7], 7), ([0, 0], 0), ([7, 8, 7], None), ([7, None], None), ([None, 7, 7], None), ([None, None], None)],
)
def test_a_digest_counts_if_every_member_gave_the_same(told: list[int | None], same: int | None) -> None:
    digests: list[dict[str, object]] = [{} if digest is None else {"digest": digest} for digest in told]
    assert reduced(*digests).part()[0].get("digest") == same
    parts = [reduced(digest).part()[0] for digest in digests]  # of relays with one member each
    assert reduced(*parts).part()[0].get("digest") == same


def test_the_lowest_member_that_requests_a_stop_counts() -> None:
    barrier = reduced({"slowest": 1.0}, {"slowest": 1.0, "stop": [1, "z"]}, {"slowest": 1.0, "stop": [2, "a"]})
    assert barrier.stop == (1, "z")
    barrier = reduced({"slowest": 1.0, "stop": [2, "a"]}, {"slowest": 1.0, "stop": [1, "z"]}, {"slowest": 1.0})
    assert barrier.stop == (1, "z")


def test_times_of_members_go_up_the_tree_and_the_newest_count() -> None:
    first, second = Reduced(), Reduced()
    first.add(arrival(0b1, 3, {}, pack_times(0, [1, 10.004, 0.5])))
    second.add(arrival(0b10, 3, {}, pack_times(1, [2, 20, 6])))
    root = Reduced()
    root.add(arrival(0b1, 3, *first.part()))
    for _ in range(9):  # a part that is sent again and again does not add up
        root.add(arrival(0b10, 3, *second.part()))
    second.add(arrival(0b100, 3, {}, pack_times(2, [3, 30, 7])))
    root.add(arrival(0b110, 3, *second.part()))
    assert root.part()[0] == {"slowest": None, "stop": None}
    assert len(root.part()[1]) <= 6 * len(first.part()[1])
    assert unpack_times(root.part()[1]) == [(0, [1.0, 10.0, 0.5]), (1, [2.0, 20.0, 6.0]), (2, [3.0, 30.0, 7.0])]


def test_times_of_no_member_or_another_are_left_out_and_of_too_many_are_refused() -> None:
    times = pack_times(1, [1.0, 2.0, 3.0])
    Reduced().add(arrival(0b10, 2, {}, times))
    with pytest.raises(ProtocolError, match="times of another"):
        Reduced().add(arrival(0b1, 2, {}, times))
    barrier = Reduced()
    barrier.add(arrival(0b1, 1, {}, pack_times(0, [1, -2, 3])))
    assert unpack_times(barrier.part()[1]) == []
    for body in (times[:-1], pack_times(0, [1, 2, 3]) * 3):
        with pytest.raises(ProtocolError, match="cut off"):
            Reduced().add(arrival(0b1, 1, {}, body))
    strange = Reduced()
    strange.add(arrival(0b11, 2, {}, b"\xff" * len(times)))
    assert unpack_times(strange.part()[1]) == []


THIS = Rank(2, "10.0.0.2", 6170, 1, 0)
NAME = "rank 2 (10.0.0.2:6170)"


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_an_exception_is_this_ranks_own_failure_and_that_of_a_link_is_nobodys() -> None:
    (report,) = reports_of(raised(ValueError("bad row")), THIS, NAME, "stopped with {kind}")
    assert (report.rank, report.reporter, report.kind, report.what) == (2, 2, "raised", "ValueError")
    assert report.message == "rank 2 (10.0.0.2:6170) stopped with ValueError: bad row"
    assert report.exit_code == 1
    assert report.traceback[0] == "Traceback (most recent call last):"
    assert report.traceback[-1] == "ValueError: bad row"
    assert FailureReport.from_json(report.to_json()) == report
    (report,) = reports_of(raised(DataError("x" * 999 + "\n" * 99)), THIS, NAME, "could not join")
    assert report.exit_code == 10
    assert report.message.startswith("rank 2 (10.0.0.2:6170) could not join: xxx")
    assert max(map(len, report.traceback)) <= 240
    (report,) = reports_of(LinkFailed("step 4: all ranks are alive"), THIS, NAME, "stopped with {kind}")
    assert (report.rank, report.reporter, report.is_own, report.exit_code) == (NO_RANK, 2, False, 11)
    assert report.message == "step 4: all ranks are alive"


def test_a_missing_rank_has_failed_and_a_notified_one_reports_nothing() -> None:
    error = WorkerFailed("step 4: rank 0, rank 1 did not arrive within 2 s")
    with_absent(error, [Absence(0, "missing", "did not arrive"), Absence(1, "missing", "did not arrive")], " at step 4")
    reports = reports_of(error, THIS, NAME, "stopped with {kind}")
    assert [(each.rank, each.reporter, each.kind, each.what, each.exit_code) for each in reports] == [
        (0, 2, "missing", "did not arrive at step 4", 11),
        (1, 2, "missing", "did not arrive at step 4", 11),
    ]
    assert reports[0].message == str(error)
    late = with_absent(JoinTimeout("join: rank 1 did not arrive within 4 s"), [Absence(1, "missing", "did not arrive")])
    assert [each.exit_code for each in reports_of(late, THIS, NAME, "could not join")] == [6]
    assert reports_of(WorkerFailed("rank 1 stopped with ValueError: boom"), THIS, NAME, "stopped with {kind}") == []


@pytest.mark.parametrize(("rank", "name", "is_own"), [(0, "rank 0", False), (2, NAME, True)])
def test_an_error_that_all_ranks_raise_is_reported_of_the_rank_that_it_comes_from(
    rank: int, name: str, is_own: bool
) -> None:
    error = CheckpointError("the disk is full")
    error.failed_rank = rank
    (report,) = reports_of(raised(error), THIS, NAME, "stopped with {kind}")
    assert (report.rank, report.reporter, report.what, report.exit_code) == (rank, 2, "CheckpointError", 9)
    assert report.message == f"{name} stopped with CheckpointError: the disk is full"
    assert bool(report.traceback) == is_own


@pytest.mark.parametrize(
    ("code", "status", "words", "lines"),
    [
        (3, 3, "sys.exit(3)", ()),
        (-1, 255, "sys.exit(-1)", ()),
        ("no disk\nleft", 1, "sys.exit: no disk\nleft", ("no disk", "left")),
        (0.0, 1, "sys.exit: 0.0", ("0.0",)),  # as Python has it: no integer
        *((code, 0, "", ()) for code in (None, 0, False, 256)),
    ],
)
def test_sys_exit_is_a_failure_with_its_status(code: Any, status: int, words: str, lines: tuple[str, ...]) -> None:
    report = report_of_exit(code, THIS, NAME)
    if status == 0:
        assert report is None
        return
    assert report is not None
    assert (report.kind, report.exit_code, report.traceback) == ("exited", status, lines)
    assert report.message == f"rank 2 (10.0.0.2:6170) stopped with {words}"
