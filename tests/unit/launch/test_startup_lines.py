"""Which of a rank's lines the terminal does not show: Paddle's own, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_train.launch.processes import end_of
from fleet_train.launch.terminal import Follower, StartupLines, without_startup_lines

# What Paddle 3.3.1 prints in a job of two ranks on CPUs, and what its sources print on GPUs.
PADDLES = """\
/opt/venv/lib/paddle/utils/cpp_extension/extension_utils.py:712: UserWarning: No ccache found. Be
  warnings.warn(warning_message)
I1123 00:22:11.288606 27353 tcp_store.cc:336] create libuv server at port: 46113
I1123 00:22:11.288967 27353 tcp_utils.cc:132] Successfully connected to 127.0.0.1:46113
======================= Modified FLAGS detected =======================
FLAGS(name='FLAGS_enable_pir_in_executor', current_value=True, default_value=False)
FLAGS(name='FLAGS_new_executor_serial_run', current_value=True, default_value=False)
=======================================================================
W1123 00:22:12.850771 27353 eager_utils.cc:3584] Paddle static graph(PIR) not support input out tensor for now!!!!!
/opt/venv/lib/paddle/pir/math_op_patch.py:241: UserWarning: Tensor do not have 'place' interface
  warnings.warn(
I1123 00:22:13.023294 27353 pir_interpreter.cc:1529] New Executor is Running ...
WARNING: Logging before InitGoogleLogging() is written to STDERR
W1123 00:22:13.023294 27353 gpu_resources.cc:119] Please NOTE: device: 0, GPU Compute Capability: 8.0
"""
SHOWN = """\
fleet_train: profile multi_node
epoch 1/1  train loss 1.6878
I1123 00:22:13.023294 27353 train.py:30] a line of absl's logging
I1123 00:22:13.023294 27353 my_operator.cc:30] of the user's own operator
W1123 00:22:13.023294 27353 comm_task_manager.cc:200] a collective is late
E1123 00:22:13.023294 27353 pir_interpreter.cc:1529] an error
F1123 00:22:13.023294 27353 tcp_store.cc:336] a fatal one
W1123 00:22:13.023294 27353 eager_utils.cc:3584] something else
/home/me/train.py:3: UserWarning: No ccache found
  warnings.warn("No ccache found")
/home/me/paddle/utils/my.py:3: DeprecationWarning: old
  warnings.warn(
/opt/venv/lib/paddle/pir/math_op_patch.py:241: UserWarning: Tensor do not have 'is_cuda' interface
  warnings.warn(
=======================================================================
WARNING: Logging of mine
FLAGS of mine
"""


def in_pieces(text: str, size: int) -> str:
    startup_lines = StartupLines()
    data = text.encode()
    shown = b"".join(startup_lines.feed(data[at : at + size]) for at in range(0, len(data), size))
    return (shown + startup_lines.rest()).decode()


@pytest.mark.parametrize("size", [1, 2, 7, 50, 4096])
def test_paddles_lines_are_left_out_and_all_others_stay_in_pieces_of_any_size(size: int) -> None:
    assert in_pieces(PADDLES, size) == ""
    assert in_pieces(SHOWN, size) == SHOWN
    mixed = [line for pair in zip(PADDLES.splitlines(True)[2:4], SHOWN.splitlines(True), strict=False) for line in pair]
    assert in_pieces("".join(mixed) + SHOWN, size) == "".join(mixed[1::2]) + SHOWN


def test_a_line_of_the_scripts_in_the_middle_of_the_table_is_shown() -> None:
    lines = PADDLES.splitlines(True)
    assert without_startup_lines("".join([*lines[4:6], "step 1\n", *lines[6:]])) == "step 1\n"


def test_progress_bars_and_prompts_are_shown_before_their_line_ends() -> None:
    startup_lines = StartupLines()
    assert startup_lines.feed(b"\repoch 1 |##  |") == b"\repoch 1 |##  |"
    assert startup_lines.feed(b"\repoch 1 |####|") == b"\repoch 1 |####|"
    assert startup_lines.feed(b"\nWorking") == b"\n"
    assert startup_lines.rest() == b"Working"
    assert startup_lines.feed(b" ... done\n") == b" ... done\n"
    assert startup_lines.feed(b"=" * 5000) == b"=" * 5000


def test_bytes_that_are_no_text_pass() -> None:
    assert StartupLines().feed(b"\xff\x00\xfe\n") == b"\xff\x00\xfe\n"


def test_the_terminal_is_spared_and_the_log_has_everything(tmp_path: Path) -> None:
    log, shown = tmp_path / "workerlog.0", bytearray()
    log.write_text(PADDLES + "one\n" + PADDLES + "Wait")
    follower = Follower(log, write=shown.extend, passing=StartupLines())
    follower.pump()
    assert bytes(shown) == b"one\n"
    follower.pump()  # nothing has come since
    assert bytes(shown) == b"one\nWait"
    follower.close()
    assert bytes(shown) == b"one\nWait\n"
    assert end_of(log).count("ccache") == 2


def test_a_follower_without_patterns_shows_everything(tmp_path: Path) -> None:
    log, shown = tmp_path / "workerlog.0", bytearray()
    log.write_text(PADDLES)
    follower = Follower(log, write=shown.extend)
    follower.pump()
    follower.close()
    assert shown.decode() == PADDLES
