"""The wire protocol of PMI 1, as used by Hydra (MPICH, Intel MPI): lines of ``key=value`` over an inherited socket.

Rank 0 publishes where it will listen, the others read it. No MPI library is needed and MPI is not initialized; Hydra
allows this once per process, so MPI cannot be initialized in it afterwards. Source of the protocol: Flux RFC 13,
"Simple Process Manager Interface v1".
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from fleet_train.cluster.engines.started import Started
from fleet_train.cluster.hosts import is_number
from fleet_train.errors import ClusterError

_KEY = "fleet_train_rank_0"
_MOST_BYTES = 65_536


def exchange(started: Started, own: str | None, environ: Mapping[str, str], timeout_seconds: float) -> str:
    """The value that rank 0 published, on every rank; ``own``: the value to publish, on rank 0.

    Raises TimeoutError if not all ranks arrive within the time, ClusterError if Hydra does not answer.
    """
    descriptor = environ.get("PMI_FD", "")
    if not is_number(descriptor):
        raise ClusterError(
            f"{started.engine} gave this process no PMI_FD, through which its ranks find rank 0; "
            "name rank 0's node: mpirun -genv FLEET_TRAIN_MASTER host:6170 ..."
        )
    try:
        with socket.socket(fileno=os.dup(int(descriptor))) as sock:
            sock.settimeout(timeout_seconds)
            return _exchange(_Pmi(sock), own)
    except TimeoutError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise ClusterError(
            f"{started.engine} did not report rank 0's address over PMI_FD ({error}); name rank 0's node: "
            "mpirun -genv FLEET_TRAIN_MASTER host:6170 ..."
        ) from None


def _exchange(pmi: _Pmi, own: str | None) -> str:
    pmi.ask("init", "response_to_init", pmi_version="1", pmi_subversion="1")
    space = pmi.ask("get_my_kvsname", "my_kvsname")["kvsname"]
    if own is not None:
        pmi.ask("put", "put_result", kvsname=space, key=_KEY, value=own)
    pmi.ask("barrier_in", "barrier_out")
    told = pmi.ask("get", "get_result", kvsname=space, key=_KEY)["value"]
    pmi.ask("finalize", "finalize_ack")
    return told


class _Pmi:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def ask(self, command: str, answer: str, **words: str) -> dict[str, str]:
        """Raises OSError, and ValueError for an error or an unexpected answer."""
        line = " ".join([f"cmd={command}", *(f"{name}={value}" for name, value in words.items())])
        self._sock.sendall(f"{line}\n".encode())
        told = dict(word.split("=", 1) for word in self._line().split() if "=" in word)
        if told.get("cmd") != answer or told.get("rc", "0") != "0":
            raise ValueError(f"{command} was answered with {told.get('cmd')}, rc {told.get('rc')}")
        return told

    def _line(self) -> str:
        while b"\n" not in self._rest:
            data = self._sock.recv(4096)
            if not data or len(self._rest) > _MOST_BYTES:
                raise OSError("the connection was closed")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")
