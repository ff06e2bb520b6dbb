"""One launch in a process of its own: `run` starts it, waits for it, and returns what came of it.

    python -m fleet_train.spawning.launching LAUNCH RESULT PARENT_PID

is that process; the first two are files of `shipping`. A launcher takes over signals, and ends whatever was started
below it: a script or a notebook that calls spawn has other children.
"""

from __future__ import annotations

import codecs
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping

from fleet_train import timeouts
from fleet_train.errors import FleetTrainError, WorkerFailed
from fleet_train.launch.attempts import RunResult
from fleet_train.launch.launcher import Launcher
from fleet_train.launch.prepare import Launch
from fleet_train.launch.processes import Process, StopRequested, die_with_parent, stopping_signals
from fleet_train.launch.terminal import messages_in_order
from fleet_train.log import logger
from fleet_train.spawning import shipping

_PIECE_BYTES = 1 << 16


def run(launch: Launch, environ: Mapping[str, str], show: Callable[[str], None]) -> RunResult:
    """How the launch ended. ``show`` gets what rank 0 prints. Raises FleetTrainError if it could not start.

    Ctrl-C ends the ranks: SIGTERM, then SIGKILL after 3 s; a second one does not wait.
    """
    with shipping.created() as asked, shipping.created() as told:
        shipping.write(asked, launch)
        command = [sys.executable, "-u", "-m", "fleet_train.spawning.launching"]
        command += [shipping.path_of(asked), shipping.path_of(told), str(os.getpid())]
        launcher = Process(command, launch.environment.over(environ), subprocess.PIPE, ties_itself=True)
        assert launcher.stdout is not None
        try:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            while piece := os.read(launcher.stdout.fileno(), _PIECE_BYTES):
                show(decoder.decode(piece))
        except BaseException:
            launcher.ask_to_stop(signal.SIGHUP)
            launcher.wait(timeouts.STOP_GRACE_SECONDS + 2 * timeouts.KILL_SECONDS)
            raise
        finally:
            launcher.kill_group()
            launcher.wait()
            launcher.stdout.close()
        ended = shipping.read(told)
    if isinstance(ended, RunResult):
        return ended
    raise ended or WorkerFailed(f"the ranks' launcher was stopped: it ended with status {launcher.status}")


def main(launch: str, result: str, parent: int) -> int:
    """The exit code of the launcher's process. First of all: it ends when its parent does, however that ends."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the parent's way to end it: nohup would have it ignored
    logger.setLevel(logging.WARNING)
    with shipping.opened(launch) as asked, shipping.opened(result) as told:
        try:
            shipping.write(told, _launched(shipping.read(asked)))
        except StopRequested as stop:
            return stop.exit_code
    return 0


def _launched(launch: Launch) -> RunResult | FleetTrainError | None:
    with messages_in_order(), stopping_signals() as stopping:
        try:
            launcher = Launcher(launch, os.environ, stopping)
            try:
                return launcher.run().result
            finally:
                launcher.close()
        except FleetTrainError as error:
            return error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
