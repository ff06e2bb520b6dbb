"""Code as it was published: which characters become Python's own, which stay, and what is said of what cannot be read;
scripts for other frameworks; the launcher's words about a script that is too old."""

# ruff: noqa: RUF001  (they are what is tested)

from __future__ import annotations

import ast
import inspect
import tokenize
from pathlib import Path

import pytest

from fleet_train.errors import GUIDE, ConversionError
from fleet_train.port import port, published
from fleet_train.port.published import after_failure, framework_of

NBSP, ZERO, IDEOGRAPHIC = "\u00a0", "\u200b", "\u3000"
SICK = {
    f"def f():\n{NBSP} {NBSP} return 1\n": "def f():\n    return 1\n",
    f"if x:\n{IDEOGRAPHIC * 2}y = 1\n    z = 2\n": "if x:\n    y = 1\n    z = 2\n",
    f"x{NBSP}={ZERO} 1\ufeff\n": "x = 1\n",
    "a, b = ‘tanh‘, ‘relu’\n": "a, b = 'tanh', 'relu'\n",
    "a = f(“x”, „y”, “it’s”, ‘’)\n": 'a = f("x", "y", "it’s", \'\')\n',
    "a = 'tanh‘\nb = \"relu” + ‘x'\n": "a = 'tanh'\nb = \"relu\" + 'x'\n",
    "def f():\n    “””Text，\n    more “text”.”””\n": 'def f():\n    """Text，\n    more “text”."""\n',
    "a = ‘‘‘one\ntwo‘‘‘\n": "a = '''one\ntwo'''\n",
    "print（a，b［0］）；c＝｛1：2｝\n": "print(a,b[0]);c={1:2}\n",
    "a = 5 – 3 — x[−1]\n": "a = 5 - 3 - x[-1]\n",
    "data = …\n": "data = ...\n",
    "x = ‘a‘ ＃ text，（a）\n": "x = 'a' # text，（a）\n",
    "x = ‘a‘\r\ny = 1\r\n": "x = 'a'\r\ny = 1\r\n",
    # What is beside it stays: comments, and strings of Python's own, whatever is in them.
    f"# a{NBSP}（text），‘x‘\nx = ‘a‘\n": f"# a{NBSP}（text），‘x‘\nx = 'a'\n",
    f"x = ‘a‘ + '“b”，{NBSP}\\'c' + \"d’\\\n– e\"\n": f"x = 'a' + '“b”，{NBSP}\\'c' + \"d’\\\n– e\"\n",
    "x = ‘a‘\ny = '''1，\n\"2\" “3” it's'''\n": "x = 'a'\ny = '''1，\n\"2\" “3” it's'''\n",
    "x = ‘a‘\nｙ = {'，'： ‘，‘}\n": "x = 'a'\nｙ = {'，': '，'}\n",
}


@pytest.mark.parametrize("text", SICK)
def test_characters_of_web_pages_in_code_become_pythons_own(text: str) -> None:
    with pytest.raises(SyntaxError):
        ast.parse(text)
    content, replaced, problem = published.read(text.encode())
    assert (content.decode(), problem) == (SICK[text], None)
    assert replaced
    assert published.read(content) == (content, "", None), "nothing is left to replace"


def own_sources() -> list[Path]:
    """Modules of Python's library, with strings and comments of all kinds."""
    return sorted(Path(inspect.getfile(ast)).parent.glob("*.py"))[::4]


def test_what_python_reads_stays_as_it_is() -> None:
    healthy = [path.read_bytes() for path in own_sources()]
    healthy += [text.encode() for text in SICK.values()]
    healthy += ["\ufeffx = 1\n".encode(), "# coding: gbk\nx = '，（‘中’）'\n".encode("gbk"), b"", b"x = '\\d'\n"]
    assert len(healthy) > 50
    assert [each[:80] for each in healthy if published.read(each) != (each, "", None)] == []


def test_a_healthy_script_with_one_sick_line_keeps_every_other_line() -> None:
    for path in own_sources()[::3]:
        with tokenize.open(path) as file:
            text = file.read()
        content, replaced, _ = published.read(f"{text}\nx = f（‘a‘）\n".encode())
        assert content.decode() == f"{text}\nx = f('a')\n", path
        assert replaced.endswith(f" in line {len(text.splitlines()) + 2}"), path


def test_what_was_replaced_is_said_with_its_lines() -> None:
    _, replaced, _ = published.read(f"# ‘\nx = ‘a‘\n\ny ={NBSP}‘b’\n".encode())
    quotes = "left single quotation mark (U+2018), right single quotation mark (U+2019)"
    assert replaced == f"no-break space (U+00A0), {quotes} in lines 2, 4"
    _, of_many, _ = published.read("x = ‘a‘\n".encode() * 14)
    assert of_many.endswith(" in lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, and 4 more")


def test_the_encoding_of_a_script_stays() -> None:
    text = "# coding: gbk\nx = ‘中‘，1\n"
    assert published.read(text.encode("gbk"))[0] == "# coding: gbk\nx = '中',1\n".encode("gbk")
    assert published.read("\ufeffx = ‘中‘\n".encode())[0] == "\ufeffx = '中'\n".encode()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"import os\nx = ‘a‘\ny = 5 × 3{NBSP}\n", "train.py:3: not Python 3: invalid character '×' (U+00D7)"),
        ("x = 1\n\n“y = 2\n", "train.py:3: not Python 3: invalid character '“' (U+201C)"),
        ("x = 1\ny = f(‘it's‘)\n", "train.py:2: not Python 3: "),
        ("x = 1\nprint 'old'\n", "train.py:2: not Python 3: "),
        (f"x = 1\n{NBSP}\nprint ‘old‘\n", "train.py:3: not Python 3: "),
        ("x = ‘a‘\n'''" + "\\n" * 200, "train.py:2: not Python 3: unterminated triple-quoted string literal"),
        ("x = 1\n只有文字。\n", "train.py:2: not Python 3: invalid character '。' (U+3002)"),
    ],
)
def test_what_cannot_be_read_all_the_same_is_named_with_line_and_character(text: str, said: str) -> None:
    with pytest.raises(ConversionError) as refused:
        port(text.encode(), "train.py")
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    ("imported", "framework"),
    [
        ({"os", "torch"}, "PyTorch"),
        ({"torch.nn.functional"}, "PyTorch"),
        ({"apex.amp"}, "PyTorch"),
        ({"horovod.torch"}, "PyTorch"),
        ({"nvidia.dali.plugin.pytorch.DALIClassificationIterator"}, "PyTorch"),
        ({"tensorflow"}, "TensorFlow"),
        ({"horovod.tensorflow.keras"}, "TensorFlow"),
        ({"mxnet.gluon"}, "MXNet"),
        ({"torch", "paddle.nn"}, "Paddle"),
        ({"fleetx", "tensorflow"}, "Paddle"),
        ({"os", "numpy", "torchnothing", "nvidia.dali.ops", "my.torch"}, ""),
        (set(), ""),
    ],
)
def test_the_framework_of_a_script(imported: set[str], framework: str) -> None:
    assert framework_of(imported) == framework


def test_a_script_for_paddle_may_import_another_framework() -> None:
    both = port(b"import torch\nimport paddle.fluid as fluid\ny = fluid.layers.mean(x)\n", "train.py")
    assert (both.framework, both.new) == ("Paddle", b"import torch\nimport paddle\ny = paddle.mean(x)\n")
    alone = port("import torch\nx = ‘a‘\n".encode(), "train.py")
    assert (alone.framework, alone.changed) == ("PyTorch", False)
    neither = port("import os\nx = ‘a‘\n".encode(), "train.py")
    assert (neither.framework, neither.new) == ("", b"import os\nx = 'a'\n")


def traceback(file: str, error: str, *after: str) -> list[str]:
    return ["step 3", "Traceback (most recent call last):", f'  File "{file}", line 3, in <module>', error, *after]


NO_FLUID = "ModuleNotFoundError: No module named 'paddle.fluid'"


@pytest.mark.parametrize(
    "error",
    [
        NO_FLUID,
        "ModuleNotFoundError: No module named 'paddle.fluid.incubate'",
        "ImportError: cannot import name 'fluid' from 'paddle' (/venv/paddle/__init__.py)",
        "AttributeError: module 'paddle' has no attribute 'fluid'. Did you mean: 'linalg'?",
    ],
)
def test_a_script_that_is_too_old_is_led_to_port(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = "is written for Paddle 1.x or 2.x, which had paddle.fluid; fleet_train port"
    how = "shows what to change, and changes it with --write"
    lines = traceback(f"{tmp_path}/train.py", error, "a last line of a handler")
    assert after_failure(lines) == f"train.py {said} train.py {how}"
    assert after_failure(traceback("/w/my net.py", error)) == f"/w/my net.py {said} '/w/my net.py' {how}"


def test_a_script_with_characters_of_web_pages_is_led_to_port(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = ‘a‘\n")
    error = "SyntaxError: invalid character '‘' (U+2018)"
    said = after_failure(traceback(str(script), error))
    assert said.startswith(f"{script} has characters of web pages in its code: left single quotation mark (U+2018) in")
    assert f"fleet_train port {script} shows" in said
    script.write_text("import torch\nx = ‘a‘\n")
    said = after_failure(traceback(str(script), error))
    assert said.endswith(f"in line 2; and it is written for PyTorch: {GUIDE} has what to write for its lines")
    script.write_text("import torch\nimport paddle.nn\nx = ‘a‘\n")
    assert f"fleet_train port {script} shows" in after_failure(traceback(str(script), error))
    script.write_text("x = = 1\n")
    assert after_failure(traceback(str(script), "SyntaxError: invalid syntax")) == "", "port would not mend it"
    assert after_failure(traceback(str(tmp_path / "gone.py"), error)) == ""


def test_variables_of_torchrun_lead_to_what_takes_their_place() -> None:
    said = after_failure(traceback("<frozen os>", "KeyError: 'LOCAL_RANK'"))
    assert said.startswith("LOCAL_RANK is not set by this launcher: a rank's numbers are fleet.local_rank()")
    assert GUIDE in said
    for name in ("WORLD_SIZE", "HOROVOD_LOCAL_RANK"):
        assert after_failure(traceback("/usr/lib/python3.10/os.py", f"KeyError: '{name}'")).startswith(f"{name} ")


@pytest.mark.parametrize(
    "lines",
    [
        [],
        ["step 1", "killed"],
        traceback("/w/train.py", "ValueError: No module named 'paddle.fluid' was caught"),
        traceback("/w/train.py", "ModuleNotFoundError: No module named 'pandas'"),
        # Its guard has caught the first error; the second one is what ended it.
        [*traceback("/w/train.py", NO_FLUID), "During handling of it:", *traceback("/w/b.py", "OSError: no data")],
        traceback("/venv/lib/python3.11/site-packages/old_package/net.py", NO_FLUID),
        traceback("/w/train.py", "KeyError: 'LOCAL_RANK'"),
        traceback("<frozen os>", "KeyError: 'DATA_DIR'"),
    ],
)
def test_other_failures_are_not_explained(lines: list[str]) -> None:
    assert after_failure(lines) == ""
