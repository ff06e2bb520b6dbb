"""The job's shared secret: authenticates its processes where addresses are not enough.

It is never sent. Each side of a connection draws a nonce and proves with an HMAC over both nonces that it knows the
secret (a challenge and response as in ISO/IEC 9798-4; HMAC: RFC 2104).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from fleet_train.errors import ClusterError

SECRET_FILE = "FLEET_TRAIN_JOB_SECRET_FILE"
SECRET = "FLEET_TRAIN_JOB_SECRET"
_LEAST_BYTES = 16
_MOST_BYTES = 4096
_FIX = "head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE; then copy it to every node"


def job_secret(environ: Mapping[str, str], say: Callable[[str], None] = lambda _: None) -> bytes | None:
    """The secret that all processes of the job share, or None if there is none.

    FLEET_TRAIN_JOB_SECRET_FILE (set by ``launch --job_secret_file``) or FLEET_TRAIN_JOB_SECRET. Surrounding white space
    is ignored. Raises ClusterError for both at once, for a file that is missing, not a regular file, or writable by
    others, and for a secret of fewer than 16 bytes; the message never contains the secret. ``say`` is told of a file
    that every user of the machine can read, unless its file system is read-only here: Kubernetes mounts secrets so, in
    a container of their own, with modes that a container cannot change.
    """
    path, text = environ.get(SECRET_FILE, ""), environ.get(SECRET, "")
    if path and text:
        raise ClusterError(f"{SECRET_FILE} and {SECRET} are both set; set one of them")
    if not path and not text:
        return None
    found = _read(Path(path), say) if path else text.encode().strip()
    where = f"{SECRET_FILE}={path}" if path else SECRET
    if not _LEAST_BYTES <= len(found) <= _MOST_BYTES:
        raise ClusterError(
            f"{where}: the job's secret has {len(found)} bytes; it must have {_LEAST_BYTES} to {_MOST_BYTES}: {_FIX}"
        )
    return found


def _read(path: Path, say: Callable[[str], None]) -> bytes:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ClusterError(f"the job's secret file {path} is not a regular file: {_FIX}")
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ClusterError(f"the job's secret file {path} can be changed by other users; chmod 600 {path}")
            if status.st_mode & stat.S_IROTH and not os.fstatvfs(file.fileno()).f_flag & os.ST_RDONLY:
                mode = stat.S_IMODE(status.st_mode)
                say(f"every user here can read the job's secret in {path} (mode {mode:04o}); chmod 600 {path}")
            return file.read(_MOST_BYTES + 2).strip()
    except OSError as error:
        raise ClusterError(f"the job's secret file {path} cannot be read: {error.strerror or error}; {_FIX}") from None


def new_nonce() -> str:
    """32 random bytes as hexadecimal text."""
    return secrets.token_hex(32)


def proof(secret: bytes, *parts: str) -> str:
    """HMAC-SHA256 over ``parts``, each preceded by its length, as hexadecimal text."""
    message = b"".join(len(each).to_bytes(4, "big") + each for each in map(_bytes, parts))
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


def is_proof(told: object, secret: bytes, *parts: str) -> bool:
    """Whether ``told`` is the proof over ``parts``; takes the same time for every wrong answer."""
    return isinstance(told, str) and hmac.compare_digest(_bytes(told), proof(secret, *parts).encode())


def _bytes(text: str) -> bytes:
    # JSON from a stranger may hold half a surrogate pair, and so may the name of a file.
    return text.encode("utf-8", "surrogatepass")
