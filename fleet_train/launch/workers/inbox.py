"""End records that cannot be written to disk (full, read-only): the rank's wrapper sends them to this launcher."""

from __future__ import annotations

import json
import os
import socket
import struct
from contextlib import suppress
from typing import Any

from fleet_train.launch.rendezvous.round import Say
from fleet_train.launch.workers import worker_main

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid of the sender, as the kernel knows them


class Inbox:
    """An abstract Linux socket: it is not a file, needs no disk space, and disappears with this process."""

    def __init__(self, token: str, say: Say) -> None:
        self._say = say
        self._said = False
        self._records: dict[int, dict[str, Any]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with suppress(OSError):  # a sandbox without such sockets: the files remain
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(worker_main.inbox_address(token))

    def look(self) -> dict[int, dict[str, Any]]:
        """Local rank -> the record that its wrapper could not write; the first problem is reported, once."""
        while (letter := self._receive()) is not None:
            record = json.loads(letter)
            self._records[record["local_rank"]] = record
            if not self._said:
                self._said = True
                self._say(f"{record['trouble']}; the job continues, logs are incomplete")
        return self._records

    def _receive(self) -> bytes | None:
        """The next message of a process of this user; None if there is none."""
        while True:
            try:
                letter, about, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return None
            senders = [_CREDENTIALS.unpack(data)[1] for _, kind, data in about if kind == socket.SCM_CREDENTIALS]
            if senders == [os.getuid()]:
                return letter

    def close(self) -> None:
        self._socket.close()
