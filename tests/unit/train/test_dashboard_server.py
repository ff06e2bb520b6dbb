"""Who may ask for the page: a browser that was sent to this machine by a page on the internet may not."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from fleet_train.train.dashboard import names_of
from fleet_train.train.dashboard_server import OnlyForNames, name_in


def answer(host: str | None, names: list[str], **more: str) -> tuple[str, bytes]:
    """Status and body of what is answered to a request with this Host header, and `more` of WSGI's environment."""
    status: list[str] = []

    def behind(environ: dict[str, Any], start_response: Any) -> list[bytes]:
        del environ
        start_response("200 OK", [])
        return [b"the curves"]

    environ = {"REQUEST_METHOD": "GET", **({} if host is None else {"HTTP_HOST": host}), **more}
    guarded = OnlyForNames(behind, names, "start: monitor --allowed_host NAME")
    body = guarded(environ, lambda code, _: status.append(code))
    return status[0], b"".join(body)


@pytest.mark.parametrize("host", ["127.0.0.1:8040", "localhost:8040", "LOCALHOST", "[::1]:8040", "localhost.:9"])
def test_this_machines_own_names_are_answered_at_any_port(host: str) -> None:
    assert answer(host, names_of("127.0.0.1")) == ("200 OK", b"the curves")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8040", "127.0.0.1.evil.example", "10.0.0.1", "", None, "\x1b[31m"]
)
def test_another_name_is_refused_with_what_to_do(host: str | None) -> None:
    status, body = answer(host, names_of("127.0.0.1"))
    assert (status, b"the curves" in body) == ("403 Forbidden", False)
    assert b"monitor --allowed_host NAME" in body
    assert body.decode().rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "foreign",
    [
        {"HTTP_ORIGIN": "http://evil.example"},
        {"HTTP_ORIGIN": "http://127.0.0.1:9999"},  # another program's page
        {"HTTP_ORIGIN": "null"},
        {"HTTP_ORIGIN": "http://[evil\x1b"},
        {"HTTP_SEC_FETCH_SITE": "cross-site"},
        {"HTTP_SEC_FETCH_SITE": "same-site", "HTTP_SEC_FETCH_MODE": "no-cors"},
        {"HTTP_SEC_FETCH_SITE": "cross-site", "HTTP_SEC_FETCH_MODE": "navigate", "REQUEST_METHOD": "POST"},
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_request_that_another_page_makes_is_refused(foreign: dict[str, str], method: str) -> None:
    environ = {"REQUEST_METHOD": method, **foreign}
    status, body = answer("127.0.0.1:8040", names_of("127.0.0.1", ["curves.lab"]), **environ)
    assert (status, b"the curves" in body) == ("403 Forbidden", False)
    assert b"which may only link to this one" in body
    assert body.decode().rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "own",
    [
        {"REQUEST_METHOD": "POST"},  # no browser
        {"REQUEST_METHOD": "POST", "HTTP_ORIGIN": "http://127.0.0.1:8040", "HTTP_SEC_FETCH_SITE": "same-origin"},
        {
            "REQUEST_METHOD": "POST",
            "HTTP_ORIGIN": "https://Curves.Lab",
            "HTTP_SEC_FETCH_SITE": "same-origin",
        },  # a proxy
        {"HTTP_SEC_FETCH_SITE": "none"},
        {"HTTP_SEC_FETCH_SITE": "cross-site", "HTTP_SEC_FETCH_MODE": "navigate"},  # a link in a page elsewhere
    ],
)
def test_requests_of_the_page_itself_and_links_to_it_are_answered(own: dict[str, str]) -> None:
    assert answer("127.0.0.1:8040", names_of("127.0.0.1", ["curves.lab"]), **own) == ("200 OK", b"the curves")


def test_names_that_the_user_gives_are_answered() -> None:
    assert answer("Curves.Lab:443", names_of("127.0.0.1", ["curves.lab"]))[0] == "200 OK"
    assert name_in("[FE80::1]:80") == "fe80::1"


def test_a_page_at_every_address_has_those_of_this_machine() -> None:
    names = names_of("0.0.0.0")
    assert {"0.0.0.0", "127.0.0.1", "localhost", socket.gethostname()} <= set(names)
    assert "evil.example" not in names
    assert names_of("10.0.0.7") == ["10.0.0.7", "127.0.0.1", "::1", "localhost"]
