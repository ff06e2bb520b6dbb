"""MPI: ranks that mpirun starts. Neither library has a variable for the host of rank 0, so rank 0 publishes where it
listens through a process management interface, PMI 1 or PMIx, and the others read it there.

PMI 1, as used by Hydra (MPICH, Intel MPI): lines of ``key=value`` over an inherited socket. No MPI library is needed
and MPI is not initialized; Hydra allows this once per process, so MPI cannot be initialized in it afterwards. Source of
the protocol: Flux RFC 13, "Simple Process Manager Interface v1".

PMIx: a server (Open MPI's daemon) is used through libpmix. All ranks enter a fence that sends the published data to
every server, as MPI_Init does. Asking rank 0's server instead hangs in Open MPI 4.1 if the request comes after rank 0
has finalized PMIx. A process may initialize PMIx several times, so MPI can be initialized afterwards. Source: PMIx
Standard 4, chapters 5 ("Initialization"), 6 and 7 (PMIx_Put, PMIx_Commit, PMIx_Fence, PMIx_Get); structures as in
``pmix_common.h`` of versions 2 to 5.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import threading
from collections.abc import Mapping

from fleet_train.cluster.cluster import is_number
from fleet_train.cluster.started import Started, Variables, port_of_job
from fleet_train.errors import ClusterError

_KEY = "fleet_train_rank_0"
_MOST_BYTES = 65_536


def read_open_mpi(environ: Mapping[str, str]) -> Started | None:
    """Open MPI 4 and 5 (docs.open-mpi.org, "Environment variables"), also under ``srun --mpi=pmix``."""
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    of = Variables(environ, "Open MPI")
    job = of.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid") or "unnamed"
    return of.started(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        local_index=of.needed("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_count=of.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        port=port_of_job(job),
        job="openmpi-" + re.sub(r"[^A-Za-z0-9._@-]", "-", job)[:60],
    )


def read_hydra(environ: Mapping[str, str]) -> Started | None:
    """MPICH, Intel MPI, MVAPICH: Hydra's variables. Slurm's own PMI sets PMI_RANK too, without the local numbers."""
    if not {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"} <= environ.keys():
        return None
    engine = "Intel MPI" if any(name.startswith("I_MPI_") for name in environ) else "MPICH (Hydra)"
    of = Variables(environ, engine)
    return of.started(
        "PMI_RANK",
        "PMI_SIZE",
        local_index=of.needed("MPI_LOCALRANKID"),
        local_count=of.number("MPI_LOCALNRANKS"),
        job="hydra",
    )


def exchange_pmi(started: Started, own: str | None, environ: Mapping[str, str], timeout_seconds: float) -> str:
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
    value = pmi.ask("get", "get_result", kvsname=space, key=_KEY)["value"]
    pmi.ask("finalize", "finalize_ack")
    return value


class _Pmi:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def ask(self, command: str, answer: str, **words: str) -> dict[str, str]:
        """Send a command to the process manager and return the answer. Raises OSError, and ValueError for an error or
        an unexpected answer."""
        line = " ".join([f"cmd={command}", *(f"{name}={value}" for name, value in words.items())])
        self._sock.sendall(f"{line}\n".encode())
        reply = dict(word.split("=", 1) for word in self._line().split() if "=" in word)
        if reply.get("cmd") != answer or reply.get("rc", "0") != "0":
            raise ValueError(f"{command} was answered with {reply.get('cmd')}, rc {reply.get('rc')}")
        return reply

    def _line(self) -> str:
        while b"\n" not in self._rest:
            data = self._sock.recv(4096)
            if not data or len(self._rest) > _MOST_BYTES:
                raise OSError("the connection was closed")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode(errors="replace")


# PMIx

_LIBRARIES = ("libpmix.so.2", "libpmix.so")
_SUCCESS = 0
_TRUE = 1  # PMIX_BOOL
_STRING = 3  # PMIX_STRING
_GLOBAL = 3  # PMIX_GLOBAL: for processes on this node and on others
_PMIX_KEY = b"fleet_train.rank0"
_COLLECT = b"pmix.collect"  # PMIX_COLLECT_DATA


class _Process(ctypes.Structure):
    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Data(ctypes.Union):
    _fields_ = (("flag", ctypes.c_bool), ("string", ctypes.c_char_p), ("room", ctypes.c_uint64 * 8))


class _Value(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint16), ("data", _Data))


class _Info(ctypes.Structure):
    _fields_ = (("key", ctypes.c_char * 512), ("flags", ctypes.c_uint32), ("value", _Value))


def exchange_pmix(own: str | None, environ: Mapping[str, str], timeout_seconds: float) -> str:
    """The value that rank 0 published; ``own``: the value to publish, on rank 0.

    "" without the library or without a server. Raises TimeoutError if not all ranks arrive within the time.
    """
    if "PMIX_NAMESPACE" not in environ:
        return ""
    library = _library()
    if library is None:
        return ""
    values: list[str] = []
    # The library's calls have no timeout that all its versions support.
    thread = threading.Thread(
        target=lambda: values.append(_exchange_pmix(library, own)), name="fleet_train PMIx", daemon=True
    )
    thread.start()
    thread.join(timeout_seconds)
    if not values:
        raise TimeoutError
    return values[0]


def _exchange_pmix(library: ctypes.CDLL, own: str | None) -> str:
    process = _Process()
    if library.PMIx_Init(ctypes.byref(process), None, ctypes.c_size_t(0)) != _SUCCESS:
        return ""
    try:
        if own is not None:
            value = _Value(_STRING, _Data(string=own.encode()))
            library.PMIx_Put(ctypes.c_uint8(_GLOBAL), _PMIX_KEY, ctypes.byref(value))
            library.PMIx_Commit()
        collect = _Info(_COLLECT, 0, _Value(_TRUE, _Data(flag=True)))
        if library.PMIx_Fence(None, ctypes.c_size_t(0), ctypes.byref(collect), ctypes.c_size_t(1)) != _SUCCESS:
            return ""
        first = _Process(process.namespace, 0)
        answer = ctypes.POINTER(_Value)()
        status = library.PMIx_Get(ctypes.byref(first), _PMIX_KEY, None, ctypes.c_size_t(0), ctypes.byref(answer))
        if status != _SUCCESS or not answer or answer.contents.type != _STRING:
            return ""
        return (answer.contents.data.string or b"").decode(errors="replace")
    finally:
        library.PMIx_Finalize(None, ctypes.c_size_t(0))


def _library() -> ctypes.CDLL | None:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
