"""Which signal ends a launcher with which exit code, by its time of arrival."""

from __future__ import annotations

import os
import signal

import pytest

from fleet_train.launch.processes import StopRequested, stopping_signals


def code_of(number: int, *, has_watched: bool = False) -> int:
    with pytest.raises(StopRequested) as raised, stopping_signals() as stopping:  # noqa: PT012
        if has_watched:
            with stopping.gracefully():
                pass
        os.kill(os.getpid(), number)
        signal.pause()
    return raised.value.exit_code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_graceful_signal_ends_with_12_once_ranks_have_run(number: int) -> None:
    assert code_of(number) == 128 + number
    assert code_of(number, has_watched=True) == 12


def test_ctrl_c_is_no_graceful_signal() -> None:
    assert code_of(signal.SIGINT, has_watched=True) == 130


def test_a_second_signal_while_ranks_run_is_no_stop_in_good_order() -> None:
    with pytest.raises(StopRequested) as raised, stopping_signals() as stopping, stopping.gracefully():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.asked == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert raised.value.exit_code == 143


def test_a_signal_behind_ranks_that_were_asked_to_stop_is_none_between_attempts() -> None:
    with pytest.raises(StopRequested) as raised, stopping_signals() as stopping:  # noqa: PT012
        with stopping.gracefully():
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert raised.value.exit_code == 143
