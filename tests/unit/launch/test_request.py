from __future__ import annotations

import pytest

from fleet_train.cluster.cluster import parse_hosts
from fleet_train.errors import ClusterError
from fleet_train.launch.request import FaultPolicy, parse_devices


def test_hosts_are_split_at_commas_and_stripped() -> None:
    assert parse_hosts("10.0.0.1, node-b,10.0.0.3") == ("10.0.0.1", "node-b", "10.0.0.3")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10.0.0.1,", "a comma with no address on one side"),
        ("", "a comma with no address on one side"),
        ("10.0.0.1,10.0.0.2,10.0.0.1", "10.0.0.1 is listed more than once"),
        ("10.0.0.1:6170,10.0.0.2:6170", "carries a port"),
    ],
)
def test_host_lists_that_cannot_be_meant_are_refused(text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        parse_hosts(text)


def test_devices_are_numbers_in_the_given_order() -> None:
    assert parse_devices("3, 01") == ("3", "1")


@pytest.mark.parametrize(
    ("text", "said"), [("0,x", "'x' is not a device number"), ("0,,1", "'' is not"), ("1,1", "more than once")]
)
def test_device_lists_that_cannot_be_meant_are_refused(text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        parse_devices(text)


def test_the_message_after_a_fault() -> None:
    assert FaultPolicy().in_words(2) == "when a rank or node fails: the job ends (--max_restarts)"
    assert FaultPolicy(max_restarts=3).in_words(1) == "when a rank or node fails: 3 restarts at most"
    assert FaultPolicy(max_restarts=3, min_nodes=2).in_words(3) == (
        "when a rank or node fails: 3 restarts at most; a node is lost after 20 s of silence and waited for 300 s, "
        "then the job continues with 2 or more"
    )
