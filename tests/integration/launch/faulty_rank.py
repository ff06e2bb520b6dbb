"""Run as ranks by test_root_cause: trains; at step 3 of the first attempt rank 1, or every rank, does what the first
argument says."""

from __future__ import annotations

import atexit
import contextlib
import errno
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np
import paddle

from fleet_train import fleet
from fleet_train.errors import DataError, FleetTrainError
from fleet_train.profile import Profile
from fleet_train.train.agree import ask_first_worker


class BadData(paddle.io.Dataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise ValueError(f"row {index} is cut off")


def raise_and_exit_slowly() -> None:
    atexit.register(lambda: time.sleep(60))
    threading.Thread(target=lambda: time.sleep(60)).start()
    raise ValueError("boom")


def raise_under_another_hook() -> None:
    sys.excepthook = lambda _, error, __: print(f"other hook: {error}", flush=True)
    raise DataError("bad row")


def read_bad_data() -> None:
    paddle.disable_static()
    list(paddle.io.DataLoader(BadData(), num_workers=1))


def exit_directly() -> None:
    raise SystemExit(3)


def loop() -> None:
    while True:
        time.sleep(0.01)


def freeze_in_the_step() -> None:
    """In the next collective: all ranks have passed the barrier of its step."""
    paddle.distributed.stream.all_reduce = lambda *_, **__: os.kill(os.getpid(), signal.SIGSTOP)


def make_children() -> None:
    """A child that ends the script, one that calls fleet, and one of multiprocessing; then the parent goes on."""
    for child in (sys.exit, ask_in_child):
        pid = os.fork()
        if pid == 0:
            child()
            sys.exit(5)
        os.waitpid(pid, 0)
    worker = multiprocessing.get_context("fork").Process(target=sys.exit)
    worker.start()
    worker.join()


def ask_in_child() -> None:
    try:
        fleet.barrier_worker()
    except FleetTrainError as error:
        print(f"a child was told: {error}", flush=True)
        raise


def break_links() -> None:
    """All connections but those of the job's store end; the processes live."""
    store = int(os.environ["FLEET_TRAIN_STORE"].partition("/")[0].rpartition(":")[2])
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as connection:
            if connection.getpeername()[1:2] not in ((store,), ()):
                connection.shutdown(socket.SHUT_RDWR)


def use_full_disk() -> None:
    def write() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        ask_first_worker(write)
    finally:
        time.sleep(1.0 if fleet.worker_index() == 0 else 0.0)  # the others are quicker to report it


FAULTS: dict[str, Any] = {
    "raise, then exit slowly": raise_and_exit_slowly,
    "raise, another hook": raise_under_another_hook,
    "data loader": read_bad_data,
    "sys.exit text": lambda: sys.exit("no disk left"),
    "sys.exit 3": lambda: sys.exit(3),
    "raise SystemExit 3": exit_directly,
    "exit 0": lambda: sys.exit(0),
    "exit 0, missed late": lambda: sys.exit(0),
    "os._exit 0": lambda: os._exit(0),
    "freeze": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "freeze in the step": freeze_in_the_step,
    "loop": loop,
    "children": make_children,
}
FAULTS_OF_ALL: dict[str, Any] = {"links break": break_links, "full disk": use_full_disk}


def main() -> None:
    paddle.enable_static()
    if sys.argv[1] == "never join" and os.environ["PADDLE_TRAINER_ID"] == "1":
        return
    fleet.init()
    x = paddle.static.data("x", [8, 4])
    loss = paddle.mean(paddle.static.nn.fc(x, 1) ** 2)
    # A short bound for those who cannot say themselves that they have failed; long enough for those who can.
    bound = 2 if sys.argv[1] in ("freeze", "loop") else 60
    profile = Profile(collective_timeout_seconds=bound)
    fleet.distributed_optimizer(paddle.optimizer.SGD(0.1), profile).minimize(loss)
    exe = paddle.static.Executor(fleet.place())
    exe.run(fleet.startup_program)
    for step in range(1, 7):
        if step == 3 and sys.argv[1] in FAULTS_OF_ALL:
            if os.environ["FLEET_TRAIN_ATTEMPT"] == "0":
                FAULTS_OF_ALL[sys.argv[1]]()
        elif step == 3 and fleet.worker_index() == 1:
            FAULTS[sys.argv[1]]()
        elif step == 3 and sys.argv[1] == "exit 0, missed late":
            time.sleep(80)  # in nobody's company, as between two averagings
        exe.run(fleet.main_program, feed={"x": np.ones((8, 4), "float32")}, fetch_list=[loss])
    print("all steps made", flush=True)


if __name__ == "__main__":
    main()
