"""What hosts have answered, judged."""

from __future__ import annotations

from typing import Any

import pytest

from fleet_train.hosts import checks

_MINE: dict[str, Any] = {
    "folder": "/home/me/work",
    "interpreter": "/venv/bin/python",
    "python": "3.11.7",
    "version": "fleet_train 0.1.0, Python 3.11.7, paddlepaddle 3.3.1",
    "files": {"train.py": "abc"},
}
_FOUND: dict[str, Any] = {
    "folder": "",
    "python": "3.11.7",
    "works": True,
    "version": "fleet_train 0.1.0, Python 3.11.7, paddlepaddle 3.3.1",
    "files": {"train.py": "abc"},
}


def test_a_host_like_this_one_has_no_problem() -> None:
    assert checks.problems_of(_FOUND, _MINE, "pc2") == []


@pytest.mark.parametrize(
    ("differs", "problem"),
    [
        (
            {"folder": "No such file or directory"},
            "the folder /home/me/work cannot be entered there (No such file or directory); every host works in the "
            "folder in which the command was typed: rsync -a /home/me/work/ pc2:/home/me/work/",
        ),
        ({"python": "3.12.1"}, "/venv/bin/python is Python 3.12.1 there and 3.11.7 here; install the same version"),
        (
            {"works": False, "version": "no module"},
            "/venv/bin/python -m fleet_train fails there: no module; install the same packages as here",
        ),
        (
            {"version": "fleet_train 0.1.0, Python 3.11.7, paddlepaddle 3.2.0"},
            "other versions there: fleet_train 0.1.0, Python 3.11.7, paddlepaddle 3.2.0; here: fleet_train 0.1.0, "
            "Python 3.11.7, paddlepaddle 3.3.1; install the same",
        ),
        (
            {"files": {"train.py": "abd"}},
            "train.py is another file there; every host has the same files: rsync -a /home/me/work/ pc2:/home/me/work/",
        ),
        (
            {"files": {"train.py": ""}},
            "train.py does not exist there; every host has the same files: rsync -a /home/me/work/ pc2:/home/me/work/",
        ),
    ],
)
def test_what_differs_is_named_with_the_rule_and_the_fix(differs: dict[str, Any], problem: str) -> None:
    assert checks.problems_of(_FOUND | differs, _MINE, "pc2") == [problem]


def test_variables_of_this_machine_and_session_stay_here() -> None:
    environ = {
        "HOME": "/home/me", "SSH_AUTH_SOCK": "/tmp/x", "XDG_RUNTIME_DIR": "/run", "TMPDIR": "/tmp", "TERM": "xterm",
        "MY_DATA": "/data", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/venv/bin:/bin", "FLEET_TRAIN_REPORT_TO": "5",
    }  # fmt: skip
    assert checks.passed_on(environ) == {"MY_DATA": "/data", "CUDA_VISIBLE_DEVICES": "0", "PATH": "/venv/bin:/bin"}


@pytest.mark.parametrize(
    ("reached", "usable"),
    [("10.0.0.2", "10.0.0.2"), ("::ffff:10.0.0.2", "10.0.0.2"), ("fd00::2", ""), ("127.0.0.1", ""), ("", "")],
)
def test_others_can_use_ipv4_addresses_of_the_network(reached: str, usable: str) -> None:
    assert checks.reachable(reached) == usable


def test_the_route_to_the_others_decides_on_the_own_address() -> None:
    assert checks.own_address("10.0.0.2", ["10.0.0.2", "192.168.1.2"]) == "10.0.0.2"
    assert checks.own_address("172.16.0.2", ["192.168.1.2", "192.168.1.2", "10.0.0.2"]) == "192.168.1.2"
    assert checks.own_address("", ["127.0.0.1", "", "10.0.0.2"]) == "10.0.0.2"
    assert checks.own_address("10.0.0.2", ["", ""]) == "10.0.0.2"
    assert checks.own_address("", [""]) == ""


def test_each_host_needs_an_address_of_its_own() -> None:
    assert checks.problems_of_addresses(["a", "b", "c"], ["10.0.0.1", "", "10.0.0.1"]) == {
        0: ["has the address 10.0.0.1, as c has: are they one machine? List it once"],
        1: ["has no IPv4 address on a route to the other hosts; the hosts of a job need one each"],
        2: ["has the address 10.0.0.1, as a has: are they one machine? List it once"],
    }
    assert checks.problems_of_addresses(["a", "b"], ["10.0.0.1", "10.0.0.2"]) == {}


@pytest.mark.parametrize(
    ("codes", "needed", "code"),
    [
        ([0, 0, 0], 3, 0),
        ([1, 143, 143], 3, 1),
        ([-9, 0, 0], 3, 137),
        ([11, 0, 0], 2, 0),
        ([0, 1], 0, 0),
        ([1, 1], 0, 1),
    ],
)
def test_the_first_failure_is_the_jobs_unless_enough_hosts_succeeded(codes: list[int], needed: int, code: int) -> None:
    assert checks.exit_code(codes, needed) == code
