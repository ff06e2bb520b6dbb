"""The protocol between members and the store, byte by byte: member sets, times, fields, reports, greetings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fleet_train.cluster import Cluster
from fleet_train.cluster.cluster import below, parent_of, subtree
from fleet_train.cluster.store.access import Access, Caller, Refused, accept, access_of, challenge, job_secret
from fleet_train.cluster.store.reports import Messages, checked_report
from fleet_train.cluster.store.wire import (
    Decoder,
    Fields,
    ProtocolError,
    TooLarge,
    Values,
    all_members,
    each_member,
    encode,
    first_member,
    from_ranges,
    pack,
    parse,
    shortened,
    to_ranges,
    unpack,
)
from fleet_train.errors import Absence, ClusterError, FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed
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


def test_all_members_and_the_first_of_some() -> None:
    assert [all_members(count) for count in (0, 1, 4)] == [0, 1, 15]
    assert [first_member(mask) for mask in (0b1, 0b1000, 0b101000)] == [0, 3, 3]


@pytest.mark.parametrize(
    "told", [None, "0-3", [[0]], [[0, 1, 2]], [0, 1], [[0, 4]], [[-1, 2]], [[3, 2]], [[0, True]], [[0.0, 1]], [(0, 1)]]
)
def test_what_is_no_range_of_four_members_is_refused(told: object) -> None:
    with pytest.raises(ProtocolError):
        from_ranges(told, 4)


def test_a_tree_of_servers() -> None:
    assert [parent_of(node, 2) for node in range(1, 7)] == [0, 0, 1, 1, 2, 2]
    assert list(subtree(1, 7, 2)) == [1, 3, 4]
    assert list(subtree(1, 4, 2)) == [1, 3]
    assert list(subtree(0, 1)) == [0]
    assert below(1, [[0, 1], [2], [3], [4], [5, 6]], 2) == 0b1110100
    assert [parent_of(node) for node in (1, 32, 33, 64, 65)] == [0, 0, 1, 1, 2]


# fields


def test_fields_have_types_and_bounds() -> None:
    fields = Fields({"text": "abc", "whole": 7, "half": 0.5, "yes": True, "one": 1, "none": None})
    assert fields.text("text", most=3) == "abc"
    assert fields.text("missing", "otherwise") == "otherwise"
    assert (fields.integer("whole", 7, 7), fields.number("half"), fields.number("whole", 7)) == (7, 0.5, 7.0)
    assert (fields.flag("yes"), fields.flag("one"), fields.flag("missing")) == (True, False, False)
    assert (fields.optional_seconds("none"), fields.optional_seconds("half")) == (None, 0.5)
    assert Fields({"s": 0.0}).optional_seconds("s") == 0.05
    refused: list[Any] = [
        lambda: fields.text("text", most=2),
        lambda: fields.text("whole"),
        lambda: fields.text("missing"),
        lambda: fields.integer("whole", 8, 9),
        lambda: fields.integer("whole", 0, 6),
        lambda: fields.integer("half", 0, 9),
        lambda: fields.integer("yes", 0, 9),
        lambda: fields.number("whole", 6),
        lambda: fields.number("yes"),
        lambda: Fields({"n": -0.1}).number("n"),
        lambda: Fields({"s": 2e7}).optional_seconds("s"),
    ]
    for read in refused:
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


def test_a_repeated_part_replaces_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_relay_that_says_its_part_again_moves_its_members() -> None:
    together = gathered(b"a", b"b")
    together.add(arrival(0b10, 2, {}, pack({b"a": 0b10})))
    assert together.masks == {b"a": 0b11}


# reports


def test_reports_are_small_and_of_known_types() -> None:
    report = {"message": "a\x1b", "lines": ["x"] * 101, "ok": None, "share": 0.5, "n": 1 << 53, "k" * 101: True}
    checked = checked_report(json.dumps(report).encode())
    assert checked == {
        "message": "a\\x1b",
        "lines": ["x"] * 100,
        "ok": None,
        "share": 0.5,
        "n": 1 << 53,
        "k" * 100: True,
    }
    assert len(checked_report(json.dumps({"message": "m" * 9000}).encode())["message"]) == 8000 + len(
        "... (9000 characters)"
    )
    for value in (
        {"a": {}},
        {"a": [1]},
        {"a": ["x", 1]},
        {"a": (1 << 53) + 1},
        {"a": -(1 << 53) - 1},
        {"a": "x" * (1 << 18)},
    ):
        with pytest.raises(ProtocolError):
            checked_report(json.dumps(value).encode())


def test_a_report_has_at_most_a_quarter_of_a_megabyte() -> None:
    envelope = len('{"a":""}')
    longest = '{"a":"' + "x" * ((1 << 18) - envelope) + '"}'
    assert checked_report(longest.encode())["a"].startswith("xxx")
    with pytest.raises(ProtocolError, match="too long"):
        checked_report(longest.encode() + b" ")


@pytest.mark.parametrize(
    ("code", "kept"), [(0, 1), (1, 1), (256, 1), (257, 1), (258, 2), (-9, 247), ("7", 1), (True, 1)]
)
def test_a_report_never_has_the_exit_code_of_success(code: object, kept: int) -> None:
    assert checked_report(json.dumps({"exit_code": code}).encode()) == {"exit_code": kept}


# greetings


def greeted(ours: Access, theirs: Access) -> None:
    """Both sides, once they have said what they have to. Raises Refused, of either."""
    caller, asked = Caller(ours, {"namespace": "0", "group": "rank", "member": 1}), challenge(theirs)
    hello = caller.heard(asked)
    assert hello is not None
    assert hello["member"] == 1
    assert caller.heard({"welcome": True, "proof": accept(theirs, asked, hello)}) is None


@pytest.mark.parametrize("secret", [None, b"x" * 20])
def test_two_of_the_same_job_greet(secret: bytes | None) -> None:
    greeted(Access("job", secret), Access("job", secret))


@pytest.mark.parametrize(
    ("ours", "theirs", "kind"),
    [
        (Access("a"), Access("b"), "job"),
        (Access("a", b"x" * 20), Access("a"), ""),
        (Access("a"), Access("a", b"x" * 20), ""),
        (Access("a", b"x" * 20), Access("a", b"y" * 20), "secret"),
    ],
)
def test_others_are_refused_by_one_side(ours: Access, theirs: Access, kind: str) -> None:
    with pytest.raises(Refused) as refusal:
        greeted(ours, theirs)
    assert refusal.value.kind == kind


def test_a_server_without_a_proof_is_no_server_of_a_job_with_a_secret() -> None:
    access = Access("a", b"x" * 20)
    for secret in (False, None):
        with pytest.raises(Refused, match="has no job secret and this node has one"):
            Caller(access, {}).heard(challenge(access) | {"secret": secret})
    for welcome in ({}, {"proof": ""}, {"proof": "00"}, {"proof": 7}):
        caller = Caller(access, {})
        hello = caller.heard(challenge(access))
        assert hello is not None
        for proof in (welcome, {"proof": hello["proof"]}):  # nor its own, sent back
            with pytest.raises(Refused, match="another secret"):
                caller.heard({"welcome": True} | proof)


@pytest.mark.parametrize("version", [3, None, "4"])
def test_a_server_of_another_version_is_left(version: object) -> None:
    with pytest.raises(Refused, match="another version of fleet_train"):
        Caller(Access("job"), {}).heard(challenge(Access("job")) | {"version": version})


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


def test_a_server_hears_a_hello_with_a_proof() -> None:
    access = Access("a", b"x" * 20)
    asked = challenge(access)
    for word in ({"do": "prove"}, {"do": "hello", "job": "a"}, {"do": "hi", "job": "a", "nonce": "n"}):
        with pytest.raises(ProtocolError):
            accept(access, asked, word)
    for proof in ({}, {"proof": "00"}, {"proof": ["00"]}):
        with pytest.raises(Refused):
            accept(access, asked, {"do": "hello", "job": "a", "nonce": "n"} | proof)


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


def test_the_job_of_a_process_is_its_launchers_or_the_given_one() -> None:
    assert Access.of({"FLEET_TRAIN_JOB_ID": "launched"}, job="told") == Access("launched")
    assert Access.of({}, "10.0.0.1", "told") == Access("told", None, "10.0.0.1")
    assert Access.of({}) == Access()
    assert "hush" not in repr(Access("job", b"hush" * 5))


def test_a_rank_calls_from_its_hosts_address_for_the_job_that_its_launcher_has_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    assert str(said({"error": "timeout", "missing": [[0, 3], [6, 9]]})) == (
        "rank 0, rank 1, rank 2, rank 3, rank 6, rank 7, rank 8, rank 9 did not arrive"
    )
    error = said({"error": "timeout", "missing": [[0, 3], [6, 6], [8, 11]]})
    assert str(error) == "ranks 0-3, 6, 8-11 (9 in all) did not arrive"
    assert isinstance(error, JoinTimeout)
    assert [absence.member for absence in error.absent] == [0, 1, 2, 3, 6, 8, 9, 10]
    assert error.absent[0] == Absence(0, "missing", "did not arrive")
    many = said({"error": "timeout", "missing": [[2 * number, 2 * number] for number in range(9)]})
    assert str(many) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ... (9 in all) did not arrive"


def test_a_lost_member_is_named_with_the_reason() -> None:
    error = said({"error": "gone"}, [[[[3, 3]], "left"], [[[1, 2]], "its connection broke"]])
    assert str(error) == (
        "rank 3 finished and left the job while others still wait for it (unequal numbers of steps, or an exit?); "
        "rank 1 was lost (its connection broke: the process ended or its machine cannot be reached); "
        "rank 2 was lost (its connection broke: the process ended or its machine cannot be reached)"
    )
    assert isinstance(error, WorkerFailed)
    assert [(one.member, one.kind) for one in error.absent] == [(3, "left"), (1, "lost"), (2, "lost")]
    left = said({"error": "gone", "call": "fleet.save"}, [[[[3, 3]], "left"], [[[1, 1]], "silent"]])
    assert "rank 3 finished and left the job while others wait for it in fleet.save; call fleet.save on" in str(left)
    assert "rank 1 was lost (silent: the process" in str(left)


def test_many_lost_members_are_grouped_by_their_reasons() -> None:
    error = said({"error": "gone"}, [[[[0, 4]], "silent"], [[[6, 9]], "left"]])
    assert str(error).startswith("rank 0, rank 1, rank 2, rank 3, rank 4: was lost (silent: ")
    assert len(error.absent) == 8


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
    ("answer", "kind", "words"),
    [
        (
            {"error": "count", "counts": [[3, 8], [5, 9]]},
            ScheduleMismatch,
            "rank 3 says that the job has 8 ranks, rank 5 says 9",
        ),
        ({"error": "store", "why": "gone"}, WorkerFailed, "10.0.0.1:6170 no longer answers (gone)"),
        ({"error": "large"}, ClusterError, "exceed what the rendezvous store can hold"),
        ({"error": "full"}, ClusterError, "10.0.0.1:6170 can hold no more values"),
        ({"error": "odd"}, ClusterError, "answered 'odd'"),
    ],
)
def test_messages_of_other_refusals(answer: dict[str, Any], kind: type[FleetTrainError], words: str) -> None:
    error = said(answer)
    assert type(error) is kind
    assert words in str(error)


def test_a_failure_is_reported_by_its_message_or_as_it_is() -> None:
    assert str(said({"error": "failed"}, {"message": "out of memory"})) == "out of memory"
    assert str(said({"error": "failed"}, {"exit_code": 7})) == "{'exit_code': 7}"


def test_a_secret_that_is_too_short_is_named_by_its_variable(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("short")
    file.chmod(0o600)
    for environ, where in (
        ({"FLEET_TRAIN_JOB_SECRET": "short"}, "FLEET_TRAIN_JOB_SECRET: "),
        ({"FLEET_TRAIN_JOB_SECRET_FILE": str(file)}, f"FLEET_TRAIN_JOB_SECRET_FILE={file}: "),
    ):
        with pytest.raises(ClusterError) as error:
            job_secret(environ)
        assert str(error.value).startswith(f"{where}the job's secret has 5 bytes; it must have 16 to 4096: ")
