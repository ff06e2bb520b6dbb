"""`fleet_train port`: its output, files and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from fleet_train.cli import cli
from fleet_train.errors import GUIDE, ConversionError, DataError
from tests.support.commands import fenced_blocks
from tests.support.processes import ROOT

OLD = "import paddle.fluid as fluid\ny = fluid.layers.mean(x)\n"
NEW = "import paddle\ny = paddle.mean(x)\n"
MARKED = "import paddle\nmain.clone(for_test=testing)\n"
PUBLISHED = "import paddle.fluid as fluid\ny = fluid.layers.cast\uff08x\uff0c \u2018int64\u2018\uff09\n"
REPLACED = (
    "Python's own characters for left single quotation mark (U+2018), fullwidth left parenthesis (U+FF08), fullwidth "
    "right parenthesis (U+FF09), fullwidth comma (U+FF0C) in line 2"
)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["port", *map(str, arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "train.py").write_text(OLD)
    (tmp_path / "models" / "net.py").write_text(OLD)
    (tmp_path / "models" / "notes.txt").write_text(OLD)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "a.py").write_text(OLD)
    return tmp_path


def test_default_prints_a_diff_and_writes_nothing(folder: Path) -> None:
    result = run(folder / "train.py")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[2:] == [
        "@@ -1,2 +1,2 @@",
        "-import paddle.fluid as fluid",
        "-y = fluid.layers.mean(x)",
        "+import paddle",
        "+y = paddle.mean(x)",
    ]
    assert "1 script(s), 1 would change (--write changes them)" in result.stderr
    assert (folder / "train.py").read_text() == OLD


def test_write_changes_files_and_folders_and_keeps_the_mode(folder: Path) -> None:
    (folder / "train.py").chmod(0o755)
    result = run("--write", folder)
    assert result.exit_code == 0
    assert (folder / "train.py").read_text() == (folder / "models" / "net.py").read_text() == NEW
    assert (folder / "train.py").stat().st_mode & 0o777 == 0o755
    assert (folder / "models" / "notes.txt").read_text() == (folder / ".hidden" / "a.py").read_text() == OLD
    assert sorted(path.name for path in folder.iterdir()) == [".hidden", "models", "train.py"]
    assert run("--write", folder).stderr.splitlines()[-1] == "2 script(s), 0 changed"


def test_check_fails_while_something_would_change(folder: Path) -> None:
    before = run("--check", folder)
    assert before.exit_code == 1
    assert before.stdout.splitlines() == [f"would change {folder}/models/net.py", f"would change {folder}/train.py"]
    assert (folder / "train.py").read_text() == OLD
    run("--write", folder)
    after = run("--check", folder)
    assert (after.exit_code, after.stdout) == (0, "")


def test_what_is_left_is_listed_again_by_every_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MARKED)
    for _ in range(2):
        result = run("--write", script)
        assert "To do by hand (1; lines of the ported scripts):" in result.stderr
        assert f"  {script}:3: clone(for_test=testing) -> compat.clone_for_test(program)" in result.stderr


def test_files_that_do_not_parse_are_listed_and_the_others_are_ported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_train.cli.port.PORT_PROGRESS_SECONDS", 0.0)
    (folder / "aaa.py").write_text("print 'old'\n")
    (folder / "models" / "binary.py").write_bytes(b"\x00\xff")
    before = run("--check", folder)
    assert isinstance(before.exception, ConversionError), "something would change, too, but not all could be read"
    assert len(before.stdout.splitlines()) == 2
    result = run("--write", folder)
    assert str(result.exception) == "2 of 4 file(s) are not Python 3 and were skipped, see above"
    assert (folder / "train.py").read_text() == (folder / "models" / "net.py").read_text() == NEW
    assert (folder / "aaa.py").read_text() == "print 'old'\n"
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith(f"skipped {folder}/aaa.py:1: not Python 3: ")]
    assert [line for line in lines if line.startswith(f"skipped {folder}/models/binary.py:1: not ")]
    assert "4 of 4 scripts read" in lines
    assert "2 script(s), 2 changed" in lines


def test_the_error_about_a_single_file_names_its_line(folder: Path) -> None:
    (folder / "aaa.py").write_text("x = 1\nprint 'old'\n")
    result = run("--write", folder / "aaa.py")
    assert isinstance(result.exception, ConversionError)
    assert str(result.exception).startswith(f"{folder}/aaa.py:2: not Python 3")


def test_a_script_in_another_encoding_is_named_with_its_line_and_what_to_do(folder: Path) -> None:
    (folder / "aaa.py").write_bytes('import paddle\n\nx = "\u4e2d\u6587"\n'.encode("gbk"))
    said = str(run("--write", folder / "aaa.py").exception)
    assert said.startswith(f"{folder}/aaa.py:3: not readable as Python: ")
    assert "save it as UTF-8, or begin it with # -*- coding: gbk -*-" in said
    (folder / "aaa.py").write_bytes('# -*- coding: gbk -*-\nx = "\u4e2d\u6587"\n'.encode("gbk"))
    assert run("--write", folder / "aaa.py").exception is None


def test_python_2_with_quotes_of_a_web_page_is_led_to_2to3(folder: Path) -> None:
    (folder / "aaa.py").write_text("import paddle\nprint \u201ca\u201d\n")
    assert str(run(folder / "aaa.py").exception).endswith("it looks like Python 2: run 2to3 on it first")


def test_a_notebook_is_no_script(folder: Path) -> None:
    (folder / "net.ipynb").write_text("{}")
    result = run("--check", folder / "net.ipynb")
    assert isinstance(result.exception, DataError)
    assert "net.ipynb: a notebook is no script; save its cells" in str(result.exception)


@pytest.mark.parametrize("name", ["missing.py", "empty"])
def test_what_is_not_there_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    assert isinstance(run(tmp_path / name).exception, DataError)


def test_folders_that_are_skipped_by_their_name_are_listed_and_ported_where_they_are_named(tmp_path: Path) -> None:
    for name in ("train.py", "dist/a.py", "dist/lib/b.py", "lib/build/c.py", ".venv/d.py", "node_modules/readme.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(OLD)
    result = run("--write", tmp_path)
    assert [line for line in result.stderr.splitlines() if line.startswith("skipped")] == [
        f"skipped {tmp_path}/.venv (1 script(s)): hidden; name the folder itself to port it",
        f"skipped {tmp_path}/dist (2 script(s)): a name of build output; name the folder itself to port it",
        f"skipped {tmp_path}/lib/build (1 script(s)): a name of build output; name the folder itself to port it",
    ]
    named = run("--write", tmp_path, tmp_path / "dist")
    assert "skipped" in named.stderr
    assert f"{tmp_path}/dist (" not in named.stderr
    assert (tmp_path / "dist/a.py").read_text() == (tmp_path / "dist/lib/b.py").read_text() == NEW
    assert (tmp_path / "lib/build/c.py").read_text() == OLD
    assert f"skipped {tmp_path}/lib/build (1 script(s))" in str(run(tmp_path / "lib").exception)


def test_code_of_a_web_page_is_mended_and_ported_at_once(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PUBLISHED)
    shown = run(script)
    assert (shown.exit_code, script.read_text()) == (0, PUBLISHED)
    assert "+y = paddle.cast(x, 'int64')" in shown.stdout.splitlines()
    assert f"{script}: {REPLACED}" in shown.stderr.splitlines()
    before = run("--check", script)
    assert (before.exit_code, before.stdout) == (1, f"would change {script}\n")
    assert f"{script}: {REPLACED}" in run("--write", script).stderr.splitlines()
    assert script.read_text() == "import paddle\ny = paddle.cast(x, 'int64')\n"
    after = run("--check", script)
    assert (after.exit_code, after.stdout, after.stderr.splitlines()) == (0, "", ["1 script(s), 0 would change"])


def test_scripts_for_another_framework_are_refused_where_none_is_for_paddle(folder: Path) -> None:
    (folder / "ddp.py").write_text("import os\nimport torch\n")
    for flags in ([], ["--write"], ["--check"]):
        alone = run(*flags, folder / "ddp.py")
        assert isinstance(alone.exception, ConversionError)
        assert str(alone.exception).startswith(
            f"{folder}/ddp.py: a script for PyTorch; port translates none: it rewrites"
        )
        assert GUIDE in str(alone.exception)
    (folder / "models" / "hvd.py").write_text("import horovod.tensorflow as hvd\n")
    skipped = [
        f"skipped {folder}/ddp.py: a script for PyTorch",
        f"skipped {folder}/models/hvd.py: a script for TensorFlow",
    ]
    among_others = run("--write", folder)
    assert among_others.exit_code == 0
    assert [line for line in among_others.stderr.splitlines() if ": a script for " in line] == skipped
    assert (folder / "train.py").read_text() == NEW
    assert (folder / "ddp.py").read_text() == "import os\nimport torch\n"
    assert run("--check", folder).exit_code == 0, "helpers for another framework do not fail a check for ever"
    for name in ("train.py", "models/net.py"):
        (folder / name).write_text("import os\n")
    nothing = run(folder)
    assert [line for line in nothing.stderr.splitlines() if ": a script for " in line] == skipped
    assert isinstance(nothing.exception, ConversionError)
    assert run(folder / "train.py").exit_code == 0, "a script without any framework is not refused"


def test_write_and_check_exclude_each_other(folder: Path) -> None:
    result = run("--write", "--check", folder)
    assert result.exit_code == 2
    assert "give only one of them" in result.stderr


def test_the_page_of_old_programs_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shown,) = fenced_blocks((ROOT / "docs" / "old-programs.md").read_text(), "text")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("".join(f"{line[1:]}\n" for line in shown.splitlines() if line[0] in " -"))
    result = run("train.py")
    printed = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    assert [line for line in shown.splitlines() if line not in printed] == []
    assert printed[3 : 3 + len(shown.splitlines()) - 1] == shown.splitlines()[:-1]
