"""A worker process: receives lists of image files, writes the decoded images into shared memory.

    python -m fleet_train.data.decode_worker <descriptor of a socket>

It is a separate program, neither a fork (Paddle's threads do not survive one) nor multiprocessing's spawn (which would
import the user's script again), and does not import Paddle. `worker_pool` has the messages. It ends when the other end
of the socket is closed, including when its parent is killed; until then it ignores Ctrl-C and SIGTERM, which the
parent handles: a job that is being stopped still needs its batches to end in order.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import socket
import sys
from typing import Any

import numpy as np

from fleet_train.data.decode import ImageDecoder, ImageSettings, Pixels, UnreadableImage
from fleet_train.data.workers import MAX_MESSAGE_BYTES, send


def serve(connection: socket.socket) -> None:
    """Answer tasks until the parent is gone."""
    hello = json.loads(connection.recv(MAX_MESSAGE_BYTES))
    settings = ImageSettings(**hello["settings"])
    decoder = ImageDecoder(settings, hello["augment"], hello["seed"])
    slots: dict[int, Pixels] = {}
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, 1)
        if not data:
            return
        message = json.loads(data)
        if "task" in message:
            failed = decode_task(decoder, message, slots[message["slot"]], connection)
            send(connection, {"task": message["task"], "failed": failed})
        else:
            memory = mmap.mmap(descriptors[0], message["bytes"])
            os.close(descriptors[0])
            count = message["bytes"] // (4 * int(np.prod(settings.shape)))
            slots[message["slot"]] = np.frombuffer(memory, np.float32).reshape(count, *settings.shape)


def decode_task(
    decoder: ImageDecoder, task: dict[str, Any], slot: Pixels, connection: socket.socket
) -> list[tuple[int, str]]:
    """Decode one task's images into the slot; returns the failed rows with reasons. Ends when the parent is gone."""
    parent = select.poll()
    parent.register(connection, 0)  # a hang-up is always reported
    failed: list[tuple[int, str]] = []
    for place, (path, index) in enumerate(task["images"]):
        if parent.poll(0):
            sys.exit()
        try:
            decoder.decode(path, index, task["epoch"], slot[task["row"] + place])
        except UnreadableImage as error:
            failed.append((place, str(error)))
    return failed


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            serve(connection)
        except (BrokenPipeError, ConnectionResetError):
            return  # the parent ended before it received the answer


if __name__ == "__main__":
    main()
