"""Distinguishes a job's connections from foreign ones: the job's id, its secret, and the addresses of its nodes."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.store.wire import VERSION, Header, ProtocolError
from fleet_train.errors import ClusterError
from fleet_train.files import open_regular
from fleet_train.log import logger

_NAMES_SECONDS = 2.0
"""Pause between two attempts to resolve host names of the node list; a strange connection must not cause more."""

JOB_ID = "FLEET_TRAIN_JOB_ID"


@dataclass(frozen=True)
class Access:
    """What tells a job's connections from others. ``source``: this node's own address, from which its connections come
    (empty: the kernel chooses)."""

    job: str = ""
    secret: bytes | None = field(default=None, repr=False)
    source: str = ""

    @classmethod
    def of(
        cls,
        environ: Mapping[str, str] | None = None,
        source: str = "",
        job: str = "",
        warns: bool = False,
    ) -> Access:
        """Read this process's environment. ``warns``: as of ``job_secret``; raises ClusterError as that does."""
        environ = os.environ if environ is None else environ
        return cls(environ.get(JOB_ID, "") or job, job_secret(environ, warns), source)


def access_of(cluster: Cluster, environ: Mapping[str, str] | None = None) -> Access:
    """The access of one rank of a job, whose launcher, ours or the stock one, has given it the job's id."""
    environ = os.environ if environ is None else environ
    return Access.of(environ, cluster.this.host, environ.get("PADDLE_JOB_ID", ""))


def number_of_job(cluster: Cluster) -> int:
    """A number that is the same on all ranks of a job, and never 0; tells jobs of one machine apart."""
    named = f"{access_of(cluster).job} {cluster.store_endpoint} {' '.join(cluster.endpoints)}"
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "little") | 1


# The handshake of a connection: member and job, and the proof on both sides that the secret is known.


_SIGNED = ("job", "nonce", "namespace", "group", "member", "role")


class Refused(Exception):
    """The server does not accept this connection. ``is_temporary``: it may accept it later. ``job``: the server's, if
    the caller named another."""

    def __init__(self, message: str, *, kind: str = "", is_temporary: bool = False, job: str = "") -> None:
        super().__init__(message)
        self.job = job
        self.kind = kind
        self.is_temporary = is_temporary


def challenge(access: Access) -> Header:
    """The server's first message: its nonce makes every proof a new one."""
    return {"version": VERSION, "nonce": new_nonce(), "secret": access.secret is not None}


def accept(access: Access, asked: Header, hello: Header) -> str:
    """The server's proof for a caller that it accepts, empty without a secret; ``asked``: its challenge.

    Raises ProtocolError, and Refused with the answer as its kind.
    """
    if hello.get("do") != "hello" or not isinstance(hello.get("nonce"), str):
        raise ProtocolError("a hello was expected")
    if any(isinstance(hello.get(name), (list, dict)) for name in _SIGNED):
        raise ProtocolError("a hello has texts and numbers only")
    if hello.get("job") != access.job:
        raise Refused("another job", kind="job")
    if access.secret is None:
        return ""
    if not is_proof(hello.get("proof"), access.secret, *_signed("caller", hello, asked["nonce"])):
        raise Refused("another secret", kind="secret")
    return proof(access.secret, *_signed("server", hello, asked["nonce"]))


def _signed(side: str, hello: Header, nonce: str) -> tuple[str, ...]:
    """The data that a proof of ``side`` covers: both nonces, and everything that decides what the connection may do."""
    return (side, nonce, *(str(hello.get(name)) for name in _SIGNED))


class Caller:
    """The connecting side: what the server says goes to ``heard``, and what that returns to the server, until it
    returns None."""

    def __init__(self, access: Access, identity: Header) -> None:
        self._access = access
        self._identity = identity
        self._hello: Header = {}
        self._nonce = ""

    def heard(self, word: Header) -> Header | None:
        """The next message; None once the connection is accepted. Raises Refused, with a message for the user."""
        if "error" in word:
            raise self._refusal(word)
        secret = self._access.secret
        if self._hello:
            is_proved = secret is None or is_proof(
                word.get("proof"), secret, *_signed("server", self._hello, self._nonce)
            )
            if not is_proved:
                raise self._refusal({"error": "secret"})
            return None
        if word.get("version") != VERSION:
            raise Refused("it runs another version of fleet_train; install the same one on every node")
        if secret is None and word.get("secret") is not False:
            raise Refused("it requires this job's secret; give every node the same --job_secret_file")
        if secret is not None and word.get("secret") is not True:
            raise Refused("it has no job secret and this node has one; give every node the same --job_secret_file")
        self._nonce = str(word.get("nonce"))[:200]
        self._hello = {"do": "hello", "job": self._access.job, "nonce": new_nonce(), **self._identity}
        if secret is None:
            return self._hello
        return self._hello | {"proof": proof(secret, *_signed("caller", self._hello, self._nonce))}

    def _refusal(self, answer: Header) -> Refused:
        kind = str(answer["error"])[:40]
        match kind:
            case "address":
                why = (
                    f"it accepts the addresses of the node list only, and this connection comes from "
                    f"{str(answer.get('address'))[:60]}; name this machine in the node list by that address, or give "
                    "every node the same --job_secret_file"
                )
            case "job":
                why = (
                    f"it belongs to another job, {str(answer.get('job'))[:200]!r}, and this is "
                    f"{self._access.job!r}; end that job, or choose another --started_port"
                )
            case "secret":
                why = "it has another secret than this node; give every node the same --job_secret_file"
            case "closed":
                why = "it has not opened this round yet"
            case "store":
                why = f"it relays to a server that is lost: {str(answer.get('why'))[:500]}"
            case "full":
                why = "it has reached its limit of connections"
            case other:
                why = f"it answered {other!r}"
        is_temporary = kind in ("closed", "full") or (kind == "address" and answer.get("later") is True)
        return Refused(why, kind=kind, is_temporary=is_temporary, job=str(answer.get("job", ""))[:200])


# Who may connect to a server: addresses of a job's hosts, and few that have not proved who they are.
#
# A host name's address may change while the job runs.


Connection = TypeVar("Connection")


class Callers:
    """The addresses of ``hosts``. Names are resolved again when an unknown address connects: a pod that moved to
    another machine has a new address for its name. ``hears`` never waits for a lookup."""

    def __init__(self, hosts: Iterable[str]) -> None:
        hosts = tuple(dict.fromkeys(hosts))
        self._names = tuple(host for host in hosts if not is_address(host))
        self._fixed = frozenset(hosts) - frozenset(self._names)
        self._known = self._fixed.union(*map(addresses_of, self._names))
        self._resolved_at = time.monotonic()
        self._resolving: threading.Thread | None = None

    def hears(self, address: str) -> bool:
        """Whether an address is one of the hosts', as far as is known now."""
        if address not in self._known and self._names:
            self._resolve_again()
        return address in self._known

    @property
    def may_change(self) -> bool:
        """Whether an address that is refused now may be accepted later."""
        return bool(self._names)

    def _resolve_again(self) -> None:
        is_resolving = self._resolving is not None and self._resolving.is_alive()
        if not is_resolving and time.monotonic() - self._resolved_at >= _NAMES_SECONDS:
            self._resolved_at = time.monotonic()
            self._resolving = threading.Thread(target=self._resolve, name="fleet_train names", daemon=True)
            self._resolving.start()

    def _resolve(self) -> None:
        for name in self._names:  # a lost one may have no address for a while, and must not block the others
            self._known |= addresses_of(name)


class Strangers(Generic[Connection]):
    """Connections that have not proved yet who they are: if there are ``most``, the oldest is closed for a new one."""

    def __init__(self, most: int, close: Callable[[Connection], None]) -> None:
        self._most = most
        self._close = close
        self._connections: OrderedDict[Connection, None] = OrderedDict()
        self._counting = threading.Lock()

    def add(self, connection: Connection) -> None:
        with self._counting:
            oldest = self._connections.popitem(last=False)[0] if len(self._connections) >= self._most else None
            self._connections[connection] = None
        if oldest is not None:
            self._close(oldest)

    def remove(self, connection: Connection) -> None:
        with self._counting:
            self._connections.pop(connection, None)

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        with self._counting:
            return iter(list(self._connections))


def addresses_of(host: str) -> frozenset[str]:
    """Every IPv4 address that a host name has now; none if it cannot be resolved yet."""
    try:
        return frozenset(str(entry[4][0]) for entry in socket.getaddrinfo(host, None, socket.AF_INET))
    except (OSError, UnicodeError):
        return frozenset()


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# The job's shared secret: authenticates its processes where addresses are not enough.
#
# It is never sent. Each side of a connection draws a nonce and proves with an HMAC over both nonces that it knows the
# secret (a challenge and response as in ISO/IEC 9798-4; HMAC: RFC 2104).


SECRET_FILE = "FLEET_TRAIN_JOB_SECRET_FILE"
SECRET = "FLEET_TRAIN_JOB_SECRET"
_LEAST_BYTES = 16
_MOST_BYTES = 4096
_FIX = "head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE; then copy it to every node"


def job_secret(environ: Mapping[str, str], warns: bool = False) -> bytes | None:
    """The secret that all processes of the job share, or None if there is none.

    FLEET_TRAIN_JOB_SECRET_FILE (set by ``launch --job_secret_file``) or FLEET_TRAIN_JOB_SECRET. Surrounding white space
    is ignored. Raises ClusterError for both at once, for a file that is missing, not a regular file, or writable by
    others, and for a secret of fewer than 16 bytes; the message never contains the secret. ``warns``: also of a file
    that every user of the machine can read, unless its file system is read-only here: Kubernetes mounts secrets so, in
    a container of their own, with modes that a container cannot change.
    """
    path, text = environ.get(SECRET_FILE, ""), environ.get(SECRET, "")
    if path and text:
        raise ClusterError(f"{SECRET_FILE} and {SECRET} are both set; set one of them")
    if not path and not text:
        return None
    secret = _read(Path(path), warns) if path else text.encode().strip()
    where = f"{SECRET_FILE}={path}" if path else SECRET
    if not _LEAST_BYTES <= len(secret) <= _MOST_BYTES:
        raise ClusterError(
            f"{where}: the job's secret has {len(secret)} bytes; it must have {_LEAST_BYTES} to {_MOST_BYTES}: {_FIX}"
        )
    return secret


def _read(path: Path, warns: bool) -> bytes:
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ClusterError(f"the job's secret file {path} can be changed by other users; chmod 600 {path}")
            if warns and status.st_mode & stat.S_IROTH and not os.fstatvfs(file.fileno()).f_flag & os.ST_RDONLY:
                mode = stat.S_IMODE(status.st_mode)
                logger.warning(
                    f"every user here can read the job's secret in {path} (mode {mode:04o}); chmod 600 {path}"
                )
            return file.read(_MOST_BYTES + 2).strip()
    except (OSError, ValueError) as error:  # ValueError: a null byte in its name
        why = getattr(error, "strerror", None) or error
        raise ClusterError(f"the job's secret file {path} cannot be read: {why}; {_FIX}") from None


def new_nonce() -> str:
    """32 random bytes as hexadecimal text."""
    return secrets.token_hex(32)


def proof(secret: bytes, *parts: str) -> str:
    """HMAC-SHA256 over ``parts``, each preceded by its length, as hexadecimal text."""
    message = b"".join(len(each).to_bytes(4, "big") + each for each in map(_bytes, parts))
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def is_proof(answer: object, secret: bytes, *parts: str) -> bool:
    """Whether ``told`` is the proof over ``parts``; takes the same time for every wrong answer."""
    return isinstance(answer, str) and hmac.compare_digest(_bytes(answer), proof(secret, *parts).encode())


def _bytes(text: str) -> bytes:
    # JSON from a stranger may hold half a surrogate pair, and so may the name of a file.
    return text.encode("utf-8", "surrogatepass")
