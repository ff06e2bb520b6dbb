"""The protocol between members and the store, byte by byte: member sets, fields, payloads, greetings."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_train.cluster import Cluster
from fleet_train.cluster.cluster import below, parent_of, subtree
from fleet_train.cluster.store.access import Access, Caller, Refused, accept, access_of, challenge
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


def test_fields_have_types() -> None:
    fields = Fields({"text": "abc", "whole": 7, "half": 0.5, "yes": True, "one": 1, "none": None, "zero": 0.0})
    assert (fields.text("text", most=3), fields.text("missing", "otherwise")) == ("abc", "otherwise")
    assert (fields.integer("whole", 7, 7), fields.number("half"), fields.number("whole", 7)) == (7, 0.5, 7.0)
    assert (fields.flag("yes"), fields.flag("one"), fields.flag("missing")) == (True, False, False)
    assert [fields.optional_seconds(name) for name in ("none", "half", "zero")] == [None, 0.5, 0.05]
    with pytest.raises(ProtocolError):
        fields.number("whole", 6)


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
        ({"secret": None}, "has no job secret and this node has one"),
        ({"version": 3}, "another version of fleet_train"),
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
    assert "x" * 20 not in f"{access} {asked} {hello}", "the secret does not travel, and is not shown"
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
        ({"do": "hello", "job": "a", "nonce": "\ud800", "proof": "\ud800"}, Refused),  # a text in JSON, not in bytes
        ({"do": "hello", "job": "a", "nonce": "n", "proof": "00", "member": [0]}, ProtocolError),
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
