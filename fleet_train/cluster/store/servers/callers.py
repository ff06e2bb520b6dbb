"""The addresses that a server accepts: those of a job's hosts. A host name's address may change while the job runs."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterable

_LOOK_AGAIN_SECONDS = 2.0


class Callers:
    """The addresses of ``hosts``. Names are resolved again when an unknown address connects: a pod that moved to
    another machine has a new address for its name. ``hears`` never waits for a lookup."""

    def __init__(self, hosts: Iterable[str]) -> None:
        hosts = tuple(dict.fromkeys(hosts))
        self._names = tuple(host for host in hosts if not is_address(host))
        self._fixed = frozenset(hosts) - frozenset(self._names)
        self._known = self._fixed.union(*map(addresses_of, self._names))
        self._looked_at = time.monotonic()
        self._is_looking = threading.Lock()

    def hears(self, address: str) -> bool:
        """Whether it is one of theirs, as far as is known now."""
        if address in self._known:
            return True
        self._look_again()
        return False

    @property
    def may_change(self) -> bool:
        """Whether an address that is refused now may be accepted later."""
        return bool(self._names)

    def _look_again(self) -> None:
        if not self._names or time.monotonic() - self._looked_at < _LOOK_AGAIN_SECONDS:
            return
        if self._is_looking.acquire(blocking=False):
            self._looked_at = time.monotonic()
            threading.Thread(target=self._look, name="fleet_train names", daemon=True).start()

    def _look(self) -> None:
        try:
            for name in self._names:  # a lost one may have no address for a while, and must not block the others
                self._known |= addresses_of(name)
        finally:
            self._is_looking.release()


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
