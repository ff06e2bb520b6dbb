"""What the package replaces in a user's process is put back; ``tests/parallel/test_facade.py`` does it on two ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import paddle
import pytest

from fleet_train import compat
from fleet_train.convert import process
from tests.support.processes import ROOT, clean_environ

JOB = """
import sys
import numpy as np
import paddle
from fleet_train import compat, fleet
from fleet_train.errors import DataError
from fleet_train.profile import Profile

run, serialize, names = paddle.static.Executor.run, paddle.base.core.serialize_pir_program, ["excepthook", "exit"]
paddle.enable_static()

def replaced():
    now = [sys.excepthook, sys.exit, paddle.static.Executor.run, paddle.base.core.serialize_pir_program]
    before = [sys.__excepthook__, exit_, run, serialize]
    return [was is not is_now for was, is_now in zip(before, now)]

exit_ = sys.exit
for number in range(2):
    fleet.init()
    main, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, startup):
        x = paddle.static.data("x", [None, 4])
        loss = paddle.mean(paddle.nn.Linear(4, 1)(x) ** 2)
        test, loader = compat.clone_for_test(main), compat.from_generator([x], 2, iterable=False)
        optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.01), Profile(accumulate_steps=2))
        optimizer.minimize(loss)
    loader.set_batch_generator(lambda: iter([np.ones((2, 4), "float32")] * 4))
    exe = paddle.static.Executor()
    exe.run(startup)
    loader.start()
    for _ in range(4):
        before_test = exe.run(main, fetch_list=[loss])[0]
    assert exe.run(test, feed={"x": np.ones((2, 4), "float32")}, fetch_list=[loss])[0] < before_test
    assert replaced() == [True, False, True, True], replaced()
    fleet.shutdown()
    assert replaced() == [False] * 4, replaced()
fleet.init()
try:
    raise DataError("bad row")
finally:
    fleet.shutdown()
"""


def test_a_job_of_one_process_puts_everything_back_and_can_begin_again(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    environ = {**clean_environ(), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, tmp_path / "job.py"], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    # The last job ends with an error of ours, which keeps its exit code though fleet.shutdown was called meanwhile.
    assert ended.returncode == 10, ended.stderr
    assert ended.stderr.splitlines()[-1] == "fleet_train.errors.DataError: bad row"


def test_what_was_replaced_twice_comes_back_in_the_opposite_order() -> None:
    owner = SimpleNamespace(first="a", second="b")
    assert process.replace(owner, "first", "c") == "a"
    assert process.replace(owner, "first", "d") == "c"
    assert process.replace(owner, "first", "d") == "c"  # not again
    process.replace(owner, "second", "e")
    owner.second = "somebody else's"
    process.put_back()
    assert vars(owner) == {"first": "a", "second": "somebody else's"}


def test_hooks_see_a_run_and_what_the_one_before_has_fed() -> None:
    seen: list[object] = []
    before = paddle.static.Executor.run

    def feed_more(_: object, feed: dict[str, object], fetch_list: object) -> tuple[object, object]:
        return {**feed, "y": np.zeros(1, "float32")}, fetch_list

    def note(_: object, feed: dict[str, object], fetch_list: object) -> tuple[object, object]:
        seen.append(sorted(feed))
        return feed, fetch_list

    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        total = paddle.static.data("x", [1], "float32") + paddle.static.data("y", [1], "float32")
    try:
        for hook in (feed_more, note, note):
            process.before_each_run(hook)
        feed = {"x": np.ones(1, "float32")}
        (value,) = paddle.static.Executor().run(main, feed=feed, fetch_list=[total])
    finally:
        process.put_back()
    assert (value.item(), seen) == (1.0, [["x", "y"]])
    assert paddle.static.Executor.run is before


def test_flags_come_back() -> None:
    flag = "FLAGS_check_nan_inf"
    before = paddle.get_flags(flag)
    process.set_flags({flag: not before[flag]})
    process.set_flags({flag: before[flag]})
    process.set_flags({flag: not before[flag]})
    assert paddle.get_flags(flag) != before
    process.put_back()
    assert paddle.get_flags(flag) == before


@pytest.mark.parametrize("times", [1, 2])
def test_a_loader_that_is_made_after_a_shutdown_feeds_its_program_too(times: int) -> None:
    for _ in range(times):
        main = paddle.static.Program()
        with paddle.static.program_guard(main, paddle.static.Program()):
            x = paddle.static.data("x", [2], "float32")
            doubled = x + x
            loader = compat.from_generator([x], 2, iterable=False)
        loader.set_batch_generator(lambda: iter([np.ones(2, "float32")]))
        loader.start()
        try:
            (values,) = paddle.static.Executor().run(main, fetch_list=[doubled])
        finally:
            loader.reset()
            process.put_back()
        assert values.tolist() == [2.0, 2.0]
