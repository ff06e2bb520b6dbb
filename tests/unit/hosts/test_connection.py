"""How a host is reached, and what is said where it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fleet_train.hosts.connection import agent_command, is_here, why_not_connected
from fleet_train.hosts.entries import Host

_OWN = ("127.0.0.1", "10.0.0.1")


@pytest.mark.parametrize(
    ("settings", "here"),
    [
        ({"hostname": "10.0.0.1", "user": "me", "port": "2222"}, True),
        ({"hostname": "127.0.1.1", "user": "me", "port": "22"}, True),
        ({"hostname": "localhost", "user": "me"}, True),
        ({"hostname": "127.0.0.1", "user": "me", "port": "2222"}, False),  # a forwarded port
        ({"hostname": "10.0.0.1", "user": "you"}, False),
        ({"hostname": "10.0.0.1", "user": "me", "proxyjump": "gate"}, False),
        ({"hostname": "10.0.0.1", "user": "me", "proxyjump": "none"}, True),
        ({"hostname": "10.0.0.2", "user": "me"}, False),
        ({"hostname": "no-such-name.invalid", "user": "me"}, False),
    ],
)
def test_a_host_is_this_machine_if_ssh_would_come_back_to_it(settings: dict[str, str], here: bool) -> None:
    assert is_here(settings, _OWN, "me") is here


def test_ssh_asks_for_no_password_and_checks_the_hosts_key() -> None:
    command = agent_command(Host("pc2", "me"), Path("/cfg"), False, "text")
    assert command[:4] == ["ssh", "-T", "-F", "/cfg"]
    assert command[-3:-1] == ["--", "me@pc2"]
    assert "BatchMode=yes" in command
    assert not any("StrictHostKeyChecking" in word for word in command)
    assert command[-1].startswith(f"exec {sys.executable} -u -c ")
    assert agent_command(Host("pc1"), None, True, "text")[:2] == ["/bin/sh", "-c"]


@pytest.mark.parametrize(
    ("code", "words", "why"),
    [
        (
            127,
            "sh: not found",
            "there is no /venv/bin/python: install the same Python environment at the same path as here",
        ),
        (
            255,
            "Host key verification failed.",
            "its key is not known here, or has changed: connect once with ssh pc2, and compare the fingerprint",
        ),
        (
            255,
            "me@pc2: Permission denied (publickey).",
            "ssh cannot log in without a password (me@pc2: Permission denied (publickey).): ssh-copy-id pc2, and "
            "ssh-add if your key has a passphrase",
        ),
        (255, "no route", "ssh cannot connect: no route; try ssh pc2"),
        (255, "", "ssh cannot connect: exit code 255; try ssh pc2"),
    ],
)
def test_why_a_host_cannot_be_reached(code: int, words: str, why: str) -> None:
    assert why_not_connected(code, words, "/venv/bin/python", "ssh pc2") == why
