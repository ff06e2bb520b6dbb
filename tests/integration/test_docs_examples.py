"""Python that users copy from the pages runs as printed, and so does the notebook."""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import re
import sys
from pathlib import Path

import pytest

from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT, Ended, python, run_alone, write_script

NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def blocks(page: str) -> list[str]:
    return fenced_blocks((ROOT / "docs" / f"{page}.md").read_text(), "python")


def block(page: str, word: str) -> str:
    return next(each for each in blocks(page) if word in each)


def run(example: str, folder: Path, *arguments: str) -> Ended:
    """In a process of its own: it changes Paddle's mode and flags, and may start a job."""
    return run_alone(folder / "job", python(str(write_script(example, folder)), *arguments))


@pytest.mark.parametrize("example", blocks("paddle"))
def test_what_is_said_of_paddle_is_so(example: str, tmp_path: Path) -> None:
    ended = run(example, tmp_path)
    assert ended.exit_code == 0, ended.output


@pytest.mark.long
@pytest.mark.parametrize(
    "example",
    [
        *blocks("training"),
        *blocks("checkpoints"),
        "\n".join(each for each in blocks("data") if "batch_slice" not in each and "SEED" not in each),
        block("data", "batch_slice"),
        block("data", "SEED"),
    ],
)
def test_examples_about_training_run(example: str, tmp_path: Path) -> None:
    ended = run(example, tmp_path)
    assert ended.exit_code == 0, ended.output


@pytest.mark.long
def test_examples_for_old_programs_do_what_they_promise(tmp_path: Path) -> None:
    tested = run(block("old-programs", "unique_name"), tmp_path)
    assert tested.output.splitlines()[-1] == "tested twice: True", tested.output
    learned = run(block("old-programs", "QueueDataset"), tmp_path)
    losses = [float(value) for value in re.findall(r"batch [48], loss: (\S+)", learned.output)]
    assert len(losses) == 40
    # The start values are random, so the first loss may be small, too.
    assert losses[-1] < min(0.05, losses[0] / 100.0)


@pytest.mark.long
def test_spawn_trains_on_two_ranks_and_fails_as_printed(tmp_path: Path) -> None:
    trained = run(block("engines", "SGD"), tmp_path)
    assert trained.exit_code == 0, trained.output
    one, other = trained.output.splitlines()[-1].strip("[]").split(", ")
    assert one == other
    assert float(one) < 1.0
    failed = run(block("engines", "len(samples)"), tmp_path)
    (shown,) = fenced_blocks((ROOT / "docs" / "engines.md").read_text(), "text")
    assert failed.exit_code == 1
    assert [line for line in shown.splitlines() if line not in failed.output] == []
    assert "fleet_train.errors.RankFailed: rank 1 of 2 failed first" in failed.output


def run_cells(notebook: Path, written: Path) -> None:
    """In one namespace, as a kernel does: stdout has no descriptor, cells no file. Writes what each has printed."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    namespace: dict[str, object] = sys.modules["__main__"].__dict__
    printed = []
    for number, cell in enumerate(cells):
        source, name = "".join(cell["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(source, name, "exec"), namespace)
        printed.append(output.getvalue())
    written.write_text(json.dumps(printed))


@pytest.mark.long
def test_every_cell_of_the_notebook_runs_and_shows_what_its_text_says(tmp_path: Path) -> None:
    written = tmp_path / "printed.json"
    ended = run_alone(tmp_path / "job", python(__file__, str(NOTEBOOK), str(written)), timeout_seconds=150)
    assert ended.exit_code == 0, ended.output
    defining, training, curve, mistake = json.loads(written.read_text())
    assert defining == ""
    steps = [line for line in training.splitlines() if line.startswith("step ")]
    assert [line.partition(":")[0] for line in steps] == [f"step {step}" for step in range(0, 100, 20)]
    same, numbers = curve.splitlines()
    assert same == "the same on both ranks: True"
    losses = [float(number) for number in numbers.split()]
    assert len(losses) == 10
    assert losses[-1] < 0.2 * losses[0], "nothing was learned"
    first, *rest = mistake.splitlines()
    assert first.startswith("rank 1 of 2 failed first: ZeroDivisionError: division by zero, after ")
    assert any("return sum(samples) / len(samples)" in line for line in rest), "the traceback shows the cell's line"


FORKED = """
import gc, os, signal, sys
import numpy as np
if sys.argv[1:]:
    import fleet_train.fleet
import paddle

gc.disable()  # the parent keeps its garbage until the child collects it
paddle.enable_static()
exe, main = paddle.static.Executor(), paddle.static.Program()
with paddle.static.program_guard(main):
    total = (2 * paddle.static.data("x", [None, 8])).sum()
for _ in range(2):
    exe.run(main, feed={"x": np.ones([4, 8], "float32")}, fetch_list=[total])
cycle = [exe]
cycle.append(cycle)
del exe, cycle
child = os.fork()
if not child:
    signal.alarm(60)  # its end, should it hang: nobody else would end it
    gc.collect()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize(("arguments", "code"), [([], "-11"), (["with fleet_train"], "0")])
def test_forked_process_collects_no_executor_of_its_parent(arguments: list[str], code: str, tmp_path: Path) -> None:
    assert run(FORKED, tmp_path, *arguments).output.splitlines()[-1] == code


if __name__ == "__main__":
    run_cells(Path(sys.argv[1]), Path(sys.argv[2]))
