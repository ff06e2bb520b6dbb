"""The process of VisualDL's server: its application, behind a check of the requested host name.

    dashboard_server.py '["127.0.0.1", "localhost"]' --logdir runs --host 127.0.0.1 --port 8040

A web page can make its own name resolve to this machine's address ("DNS rebinding"): the reader's browser then lets
that page read what is served here. Such a request has the page's name in its Host header. No import of fleet_train.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules have names of other modules (statistics)

import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

_MOST_SHOWN = 100
Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def name_in(host_header: str) -> str:
    """``LocalHost:8040`` -> ``localhost``, ``[::1]:8040`` -> ``::1``. Tunnels change the port, so it is ignored."""
    text = host_header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0].rstrip(".") if text.count(":") == 1 else text.rstrip(".")


_ADVICE = "start: python -m fleet_train monitor --allowed_host NAME"


class OnlyForNames:
    """A WSGI application that answers 403 to requests for other names and forwards the rest.

    ``advice``: the command to use if the name belongs to this machine.
    """

    def __init__(self, behind: Application, names: Collection[str], advice: str) -> None:
        self._behind = behind
        self._names = {name.lower() for name in names}
        self._advice = advice

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        asked = name_in(environ.get("HTTP_HOST", ""))
        if asked in self._names:
            return self._behind(environ, start_response)
        names = ", ".join(sorted(filter(None, self._names)))
        told = (
            f"fleet_train: {asked[:_MOST_SHOWN]!a} is not a name of this page, which has {names}. If it is a name of "
            f"this machine, {self._advice}\n"
        )
        kind = [("Content-Type", "text/plain; charset=utf-8"), ("X-Content-Type-Options", "nosniff")]
        start_response("403 Forbidden", kind)
        return [told.encode()]


def main(names: str, *arguments: str) -> None:
    from visualdl.server import app

    create_app = app.create_app

    def guarded(args: Any) -> Any:
        flask = create_app(args)
        flask.wsgi_app = OnlyForNames(flask.wsgi_app, json.loads(names), _ADVICE)
        return flask

    app.create_app = guarded
    sys.argv = ["visualdl", *arguments]
    app.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
