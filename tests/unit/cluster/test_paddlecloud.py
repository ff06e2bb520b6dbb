from __future__ import annotations

import pytest

from fleet_train.cluster.kubernetes import CloudNode, read_paddlecloud
from fleet_train.errors import ClusterError

POD = {
    "PADDLE_TRAINERS": "10.1.0.4,10.1.0.5",
    "POD_IP": "10.1.0.5",
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_PORT": "6007",
    "TRAINER_PORTS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": "10.1.0.4:6007,10.1.0.4:6008,10.1.0.5:6007,10.1.0.5:6008",
    "SECRET_TOKEN": "abc123",
}


def test_a_pod_is_read() -> None:
    assert read_paddlecloud(POD) == CloudNode(("10.1.0.4", "10.1.0.5"), "10.1.0.5", 6007, 2)


def test_ports_and_endpoints_may_be_missing() -> None:
    pod = {"PADDLE_TRAINERS": "10.1.0.4", "POD_IP": "10.1.0.4"}
    assert read_paddlecloud(pod) == CloudNode(("10.1.0.4",), "10.1.0.4", None, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"PADDLE_TRAINERS": ""}, "PADDLE_TRAINERS is not set"),
        ({"POD_IP": ""}, "POD_IP is not set"),
        ({"POD_IP": "10.1.0.9"}, "POD_IP=10.1.0.9 is not in PADDLE_TRAINERS"),
        ({"PADDLE_TRAINER_ID": "0"}, "PADDLE_TRAINER_ID=0 contradicts POD_IP"),
        ({"PADDLE_TRAINER_ID": "one"}, "PADDLE_TRAINER_ID=one is not a whole number"),
        ({"PADDLE_PORT": "7000"}, "starts at port 6007, but PADDLE_PORT=7000"),
        ({"TRAINER_PORTS_NUM": "3"}, "PADDLE_TRAINER_ENDPOINTS has 4 entries"),
        ({"TRAINER_PORTS_NUM": "0"}, "TRAINER_PORTS_NUM=0"),
        ({"PADDLE_TRAINER_ENDPOINTS": "10.1.0.4"}, "PADDLE_TRAINER_ENDPOINTS is not a comma list"),
        ({"PADDLE_TRAINER_ENDPOINTS": "10.1.0.5:6007,10.1.0.4:6007"}, "PADDLE_TRAINER_ENDPOINTS names other hosts"),
    ],
)
def test_missing_and_contradicting_variables_are_named(change: dict[str, str], named: str) -> None:
    with pytest.raises(ClusterError, match=named) as caught:
        read_paddlecloud({**POD, **change})
    assert "abc123" not in str(caught.value)


def test_flags_may_repeat_but_not_contradict_the_variables() -> None:
    cloud = read_paddlecloud(POD)
    assert cloud.merged(None, None, None) == (("10.1.0.4", "10.1.0.5"), "10.1.0.5", 6007)
    assert cloud.merged(None, "10.1.0.5", 7000)[2] == 7000
    with pytest.raises(ClusterError, match="--node_ip contradicts the variable POD_IP"):
        cloud.merged(None, "10.1.0.4", None)
