"""The messages between a trainer and its decoding worker processes: JSON, one message per packet of a socket.

{"settings": {...}, "augment": "crop_flip", "seed": 0}                    to the worker, first and once
{"slot": 0, "bytes": 9633792}                                             with a descriptor: a new piece of memory
{"task": 7, "slot": 0, "row": 16, "epoch": 2, "images": [[path, index], ...]}
{"task": 7, "failed": [[3, "OSError: ..."]]}                              the answer: rows of the task, with reasons
"""

from __future__ import annotations

import json
import socket
from typing import Any

MAX_MESSAGE_BYTES = 1 << 20


def send(connection: socket.socket, message: dict[str, Any], descriptor: int | None = None) -> None:
    """Send one message, with a file descriptor if one is given."""
    data = [json.dumps(message).encode()]
    if descriptor is None:
        connection.sendmsg(data)
    else:
        socket.send_fds(connection, data, [descriptor])


def parse(data: bytes) -> dict[str, Any]:
    message: dict[str, Any] = json.loads(data)
    return message
