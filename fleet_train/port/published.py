"""Scripts as they are found: with characters of web pages in their code, for other frameworks, or too old."""

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
from pathlib import Path

from fleet_train.errors import GUIDE

_UNSEEN = (0xAD, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x2065), *range(0x2066, 0x206A), 0xFEFF)
_OTHERS = {
    **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if not chr(code).isalpha()},  # of full width
    **dict.fromkeys(map(chr, (0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F)), " "),
    **dict.fromkeys(map(chr, _UNSEEN), ""),
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"),
    **dict(zip("\u2026\u3000\u3010\u3011", ("...", "  ", "[", "]"), strict=True)),
}
_QUOTES = {'"': "\u201c-\u201f\u2033\uff02", "'": "\u00b4\u2018-\u201b\u2032\uff07"}
# Comments and strings of Python's own come first, and stay. A quotation mark ends at the next one of its kind.
_PIECE = re.compile(
    r"""([#\uff03][^\n]*|(\"\"\"|''')(?:\\.|[^\\])*?\2|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
    + "".join(f"|[{m}]{{3}}(.*?)[{m}]{{3}}|[{own}{m}]([^{own}{m}\n]*)[{own}{m}]" for own, m in _QUOTES.items())
    + f"|[{''.join(_OTHERS)}]",
    re.DOTALL,
)
_AROUND = ("", "", "", '"""', '"', "'''", "'")
"""What stands around each group of a piece in Python."""


def read(content: bytes) -> tuple[bytes, str, SyntaxError | None]:
    """A script with Python's own characters in its code, if that is what it takes to read it, else as it was; which
    characters were others, in which lines; and why it cannot be read all the same, with the line."""
    problem = _problem(content)
    if problem is None:
        return content, "", None
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        text = content.decode(encoding)
    except (SyntaxError, UnicodeError):
        return content, "", problem
    new = _PIECE.sub(lambda found: _of_python(found[found.lastindex or 0], found.lastindex), text)
    left = _problem(new.encode(encoding))
    if new == text or left is not None:
        return content, "", left or problem
    lines = list(zip(text.split("\n"), new.split("\n"), strict=True))
    changed = [str(number) for number, (old, now) in enumerate(lines, 1) if old != now]
    seen = sorted(set[str]().union(*(Counter(old) - Counter(now) for old, now in lines)))
    names = ", ".join(f"{unicodedata.name(each, 'character').lower()} (U+{ord(each):04X})" for each in seen)
    where = ", ".join([*changed[:10], *[f"and {len(changed) - 10} more"] * (len(changed) > 10)])
    return new.encode(encoding), f"{names} in {'lines' if len(changed) > 1 else 'line'} {where}", None


def _of_python(text: str, group: int | None) -> str:
    if group is None:
        return _OTHERS[text]
    return f"#{text[1:]}" if text[:1] == "\uff03" else f"{_AROUND[group]}{text}{_AROUND[group]}"


def _problem(content: bytes) -> SyntaxError | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strings with unknown escapes
            ast.parse(content)
    except (SyntaxError, ValueError) as error:  # a null byte is a ValueError in Python 3.10 and 3.11
        return error if isinstance(error, SyntaxError) else SyntaxError(str(error))
    return None


PADDLE = "Paddle"
_FRAMEWORKS = {
    PADDLE: "paddle fleetx fleet_train",
    "PyTorch": "torch torchvision apex pytorch_lightning horovod.torch nvidia.dali.plugin.pytorch",
    "TensorFlow": "tensorflow keras horovod.tensorflow horovod.keras nvidia.dali.plugin.tf",
    "MXNet": "mxnet horovod.mxnet nvidia.dali.plugin.mxnet",
}


def framework_of(imported: Collection[str]) -> str:
    """The framework that a script with these imports (full names) is written for, `PADDLE` if it is one of several;
    empty: none is known."""
    known = ((each, module) for each, modules in _FRAMEWORKS.items() for module in modules.split())
    return next((each for each, module in known if any(f"{name}.".startswith(f"{module}.") for name in imported)), "")


_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)(?::.*)?")
_NO_FLUID = re.compile(
    r"ModuleNotFoundError: No module named 'paddle\.fluid|ImportError: cannot import name 'fluid' from 'paddle'|"
    r"AttributeError: module 'paddle' has no attribute 'fluid'"
)
_OF_OTHERS = re.compile(r"KeyError: '((?:HOROVOD_)?(?:LOCAL_)?(?:RANK|SIZE|WORLD_SIZE)|MASTER_ADDR|MASTER_PORT)'")


def after_failure(last_lines: Sequence[str]) -> str:
    """What to do about a rank whose log ends with these lines, if its script is one that `port` rewrites, or reads
    variables of another launcher; empty otherwise."""
    error = next((line for line in reversed(last_lines) if _ERROR.fullmatch(line)), "")
    files = re.findall(r'^ *File "(.+)", line \d+', "\n".join(last_lines), re.MULTILINE)
    path = Path(files[-1] if files else "")
    if path.stem in ("os", "<frozen os>") and (variable := _OF_OTHERS.fullmatch(error)):
        numbers = "fleet.local_rank(), fleet.worker_index() and fleet.worker_num()"
        return f"{variable[1]} is not set by this launcher: a rank's numbers are {numbers} ({GUIDE})"
    shown = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    why = ""
    if _NO_FLUID.match(error) and not {"site-packages", "dist-packages"} & set(path.parts):
        why = "is written for Paddle 1.x or 2.x, which had paddle.fluid"
    elif error.startswith("SyntaxError: ") and path.is_file():
        content, replaced, _ = read(path.read_bytes())
        why = f"has characters of web pages in its code: {replaced}" if replaced else ""
        imported = re.findall(r"^\s*(?:import|from)\s+([\w.]+)", content.decode(errors="replace"), re.MULTILINE)
        if why and (framework := framework_of(imported)) not in ("", PADDLE):
            return f"{shown} {why}; and it is written for {framework}: {GUIDE} has what to write for its lines"
    command = f"fleet_train port {shlex.quote(shown)}"
    return f"{shown} {why}; {command} shows what to change, and changes it with --write" if why else ""
