"""Hosts the rendezvous store in a small process beside rank 0, for launch forms without a launcher of ours.

Not in rank 0 itself: Paddle holds the interpreter lock while it waits for peers in C++, and a store that shares that
lock would be deaf exactly then. The process ends by itself once its parent and all members are gone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

from fleet_train.cluster.store_server import StoreServer
from fleet_train.errors import ClusterError

_READY = "listening"
# After the parent has ended: how long members may still be connected, how long none must have been before the process
# ends (a member that lost its connection may come back to report), and how often to look, in seconds.
_LINGER_SECONDS = 300.0
_QUIET_SECONDS = 0.5
_POLL_SECONDS = 0.05


# The process ends with its parent; a child that the parent has forked must not hold it.
_hosts: weakref.WeakSet[StoreHost] = weakref.WeakSet()


def _release_all_in_child() -> None:
    for host in list(_hosts):
        host.release()


os.register_at_fork(after_in_child=_release_all_in_child)


class StoreHost:
    """The parent's handle. Raises ClusterError when the address cannot be bound."""

    def __init__(self, host: str, port: int) -> None:
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "fleet_train.cluster.store_host", host, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,  # Ctrl-C reaches the ranks first; the store must outlive them to name the culprit
        )
        _hosts.add(self)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().decode().strip()
        self._process.stdout.close()
        if answer != _READY:
            self._process.wait()
            raise ClusterError(answer or f"the rendezvous store on {host}:{port} did not start")

    def release(self) -> None:
        """Let the process end once the members have left; does not wait for that."""
        if self._process.stdin is not None:
            self._process.stdin.close()


def _serve(host: str, port: int) -> None:
    try:
        server = StoreServer(host, port).start()
    except ClusterError as error:
        print(error, flush=True)
        return
    print(_READY, flush=True)
    sys.stdin.buffer.read()  # ends with the parent, however it ends
    deadline = time.monotonic() + _LINGER_SECONDS
    quiet_since = None
    while time.monotonic() < deadline:
        if server.connected_members():
            quiet_since = None
        elif quiet_since is None:
            quiet_since = time.monotonic()
        elif time.monotonic() - quiet_since > _QUIET_SECONDS:
            break
        time.sleep(_POLL_SECONDS)
    server.stop()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
