"""Scripts as they are found: with characters that web pages put in place of Python's own, for other frameworks, or too
old for the Paddle that runs them."""

from __future__ import annotations

import ast
import io
import re
import shlex
import tokenize
import unicodedata
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet_train.errors import GUIDE

_SPACES = "\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000"
_UNSEEN = "\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff"
_SINGLE, _DOUBLE = "\u00b4\u2018-\u201b\u2032\uff07", "\u201c-\u201f\u2033\uff02"
_OTHERS = {
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if not chr(code).isalpha()},  # of full width
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"),
    "\u2026": "...",
    "\u3000": "  ",
    "\u3010": "[",
    "\u3011": "]",
}
# Comments and strings of Python's own come first, and stay. A quotation mark ends at the next one of its kind.
_PIECE = re.compile(
    rf"""(?P<kept> \#[^\n]* | (?P<three>\"\"\"|''') (?:\\.|.)*? (?P=three)
                   | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*' )
       | \uff03 (?P<comment> [^\n]* )
       | [{_DOUBLE}]{{3}} (?P<long_double> .*? ) [{_DOUBLE}]{{3}}
       | [{_SINGLE}]{{3}} (?P<long_single> .*? ) [{_SINGLE}]{{3}}
       | ["{_DOUBLE}] (?P<double> [^"{_DOUBLE}\n]* ) ["{_DOUBLE}]
       | ['{_SINGLE}] (?P<single> [^'{_SINGLE}\n]* ) ['{_SINGLE}]
       | (?P<space> [{_SPACES}] ) | [{_UNSEEN}] | [{"".join(_OTHERS)}]""",
    re.VERBOSE | re.DOTALL,
)
_AROUND = {
    "comment": ("#", ""),
    "long_double": ('"""', '"""'),
    "long_single": ("'''", "'''"),
    "double": '""',
    "single": "''",
}
_MOST_LINES = 10


@dataclass(frozen=True)
class Script:
    """A script's bytes as Python reads them. ``replaced``: which characters were others, and in which lines; empty if
    none were. ``problem``: why it cannot be read all the same, with the line."""

    content: bytes
    replaced: str = ""
    problem: SyntaxError | None = None


def read(content: bytes) -> Script:
    """The script with Python's own characters in its code, if that is what it takes to read it; else as it was."""
    problem = _problem(content)
    if problem is None:
        return Script(content)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
        new = _PIECE.sub(_of_python, text)
        made = new.encode(encoding)
    except (SyntaxError, UnicodeError):
        return Script(content, problem=problem)
    left = _problem(made)
    if left is not None or new == text:
        return Script(content, problem=left or problem)
    lines = list(zip(text.split("\n"), new.split("\n"), strict=True))
    changed = [str(number) for number, (old, now) in enumerate(lines, 1) if old != now]
    seen = sorted(set[str]().union(*(Counter(old) - Counter(now) for old, now in lines)))
    names = ", ".join(f"{unicodedata.name(each, 'character').lower()} (U+{ord(each):04X})" for each in seen)
    more = f" and {len(changed) - _MOST_LINES} more" if len(changed) > _MOST_LINES else ""
    where = f"line{'s' * (len(changed) > 1)} {', '.join(changed[:_MOST_LINES])}{more}"
    return Script(made, f"{names} in {where}")


def _of_python(found: re.Match[str]) -> str:
    kind = found.lastgroup
    if kind == "kept":
        return found[0]
    if kind in _AROUND:
        return found[kind].join(_AROUND[kind])
    return _OTHERS.get(found[0], " " if kind == "space" else "")


def _problem(content: bytes) -> SyntaxError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strings with unknown escapes
            ast.parse(content)
    except SyntaxError as error:
        return error
    except ValueError as error:  # a null byte, in Python 3.10 and 3.11
        return SyntaxError(str(error))
    return None


_FRAMEWORKS = {
    "PyTorch": "torch torchvision apex pytorch_lightning lightning horovod.torch nvidia.dali.plugin.pytorch",
    "TensorFlow": "tensorflow keras horovod.tensorflow horovod.keras nvidia.dali.plugin.tf",
    "MXNet": "mxnet gluoncv gluonnlp horovod.mxnet nvidia.dali.plugin.mxnet",
}


def framework_of(imported: Collection[str]) -> str:
    """The other framework that a script with these imports (full names) is written for; empty: none is known."""
    for framework, modules in _FRAMEWORKS.items():
        if any(f"{name}.".startswith(f"{module}.") for name in imported for module in modules.split()):
            return framework
    return ""


_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?::.*)?")
_NO_FLUID = re.compile(
    r"ModuleNotFoundError: No module named 'paddle\.fluid|ImportError: cannot import name 'fluid' from 'paddle'|"
    r"AttributeError: module 'paddle' has no attribute 'fluid'"
)
_OF_TORCHRUN = re.compile(r"KeyError: '(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'")

_OS = ("os", "<frozen os>")


def after_failure(last_lines: Sequence[str]) -> str:
    """What to do about a rank whose log ends with these lines, if its script is one that `port` rewrites, or reads
    variables of another launcher; empty otherwise."""
    error = next((line for line in reversed(last_lines) if _ERROR.fullmatch(line)), "")
    files = re.findall(r'^ *File "(.+)", line \d+', "\n".join(last_lines), re.MULTILINE)
    if files and Path(files[-1]).stem in _OS and (variable := _OF_TORCHRUN.fullmatch(error)):
        return (
            f"{variable[1]} is not set by this launcher: a rank's numbers are fleet.local_rank(), fleet.worker_index() "
            f"and fleet.worker_num() ({GUIDE})"
        )
    if not files or {"site-packages", "dist-packages"} & set(Path(files[-1]).parts):
        return ""
    path, here = Path(files[-1]), Path.cwd()
    if error.startswith("SyntaxError: "):
        replaced = read(path.read_bytes()).replaced if path.is_file() else ""
        why = f"has characters of web pages in its code: {replaced}" if replaced else ""
    else:
        why = "is written for Paddle 1.x or 2.x, which had paddle.fluid" if _NO_FLUID.match(error) else ""
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    command = f"python -m fleet_train port {shlex.quote(str(shown))}"
    return f"{shown} {why}; {command} shows what to change, and changes it with --write" if why else ""
