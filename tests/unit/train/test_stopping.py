from __future__ import annotations

import os
import signal
import subprocess
import threading

from fleet_train.train.trainer import STOPPING_SIGNALS, listening
from tests.support.processes import clean_environ, python


def test_a_signal_becomes_a_request_with_its_name() -> None:
    for number in STOPPING_SIGNALS:
        asked: list[str] = []
        with listening(asked.append):
            os.kill(os.getpid(), number)
        assert asked == [number.name]


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(number) for number in STOPPING_SIGNALS]
    with listening([].append):
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in STOPPING_SIGNALS] == before


def test_a_signal_that_comes_twice_at_once_is_one_request() -> None:
    asked: list[str] = []
    with listening(asked.append):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    assert asked == ["SIGTERM"]


def test_a_later_signal_ends_the_process_at_once() -> None:
    code = (
        "import os, signal\nfrom fleet_train import timeouts\nfrom fleet_train.train import trainer as signals\n"
        "timeouts.SAME_STOP_SECONDS = 0.0\n"
        "with signals.listening(print):\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n    print('still here', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    print('not reached')"
    )
    done = subprocess.run(python("-c", code), env=clean_environ(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM
    assert done.stdout.splitlines() == ["SIGUSR1", "still here"]


def test_another_thread_than_the_main_one_listens_to_nothing() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[object] = []

    def look() -> None:
        with listening([].append):
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
