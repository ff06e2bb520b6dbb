"""Horovod: processes that ``horovodrun`` starts over Gloo. Below ``horovodrun --mpi`` they are those of ``mpirun``.

Its variables say how many processes there are, not where process 0 runs. horovodrun's own server keeps values for them,
by HTTP: process 0 puts there where it listens. Source: horovod/horovod ``horovod/runner/gloo_run.py`` and
``horovod/runner/http/http_server.py`` (0.28).
"""

from __future__ import annotations

import atexit
import http.client
import re
import time
from collections.abc import Mapping
from contextlib import suppress

from fleet_train.cluster.started import Started, Variables
from fleet_train.errors import ClusterError

ENGINE = "horovodrun"
_PLACE = "/fleet_train/rank0"
_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_FIX = "name rank 0's node: FLEET_TRAIN_MASTER=host:6170"
_FORM = re.compile(r"[^\s/]+:[0-9]{1,5}/[0-9a-f]+")
_ASK_SECONDS, _WAIT_SECONDS = 5.0, 0.2


def read(environ: Mapping[str, str]) -> Started | None:
    """HOROVOD_RANK, HOROVOD_SIZE and their like. Raises ClusterError for an elastic job, whose ranks change."""
    if not {"HOROVOD_RANK", "HOROVOD_SIZE"} <= environ.keys():
        return None
    of = Variables(environ, ENGINE)
    if of.text("HOROVOD_ELASTIC"):
        raise ClusterError(
            "horovodrun started this process in an elastic job (--min-np, --host-discovery-script), whose ranks change "
            "while it runs; use a fixed -np, or fleet_train launch --max_restarts=3 --min_nodes=N"
        )
    return of.started(
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        local_index=of.needed("HOROVOD_LOCAL_RANK"),
        local_count=of.number("HOROVOD_LOCAL_SIZE"),
        job=f"horovod-{of.text(_ADDRESS)}-{of.text(_PORT)}",
    )


def exchange(own: str | None, environ: Mapping[str, str], timeout_seconds: float) -> str:
    """The value that rank 0 has put, on every rank; ``own``: the value to put, on rank 0.

    Raises TimeoutError if it is not there within the time, ClusterError if horovodrun's server does not answer.
    """
    of = Variables(environ, ENGINE)
    host, port = of.text(_ADDRESS), of.port(_PORT)
    if not host or port is None:
        raise ClusterError(
            f"{ENGINE} started this process without {_ADDRESS} and {_PORT}, where its ranks find rank 0; {_FIX}"
        )
    until = time.monotonic() + timeout_seconds
    try:
        if own is not None:
            _ask(host, port, "PUT", own)
            atexit.register(_forget, host, port)
        value = own or _ask(host, port, "GET")
        while not value and time.monotonic() < until:
            time.sleep(_WAIT_SECONDS)
            value = _ask(host, port, "GET")
    except (OSError, http.client.HTTPException) as error:
        raise ClusterError(f"{_server(host, port)} does not answer ({error}); {_FIX}") from None
    if not value:
        raise TimeoutError
    if not _FORM.fullmatch(value):
        raise ClusterError(f"{_server(host, port)} has another answer than rank 0's; {_FIX}")
    return value


def _server(host: str, port: int) -> str:
    return f"horovodrun's server at {host}:{port} ({_ADDRESS}, {_PORT}), which says where rank 0 is,"


def _forget(host: str, port: int) -> None:
    """Let the next script of the same horovodrun wait for its own rank 0."""
    with suppress(OSError, http.client.HTTPException):
        _ask(host, port, "PUT", "")


def _ask(host: str, port: int, method: str, value: str | None = None) -> str:
    """The server's value; empty if there is none yet."""
    connection = http.client.HTTPConnection(host, port, timeout=_ASK_SECONDS)
    try:
        connection.request(method, _PLACE, body=value)
        answer = connection.getresponse()
        text = answer.read(4096).decode(errors="replace")
        if answer.status not in (200, 404):
            raise http.client.HTTPException(f"{method} was answered with status {answer.status}")
        return text if answer.status == 200 else ""
    finally:
        connection.close()
