"""Names, sizes and times that Kubernetes and Slurm accept. Every error says what was given, the rule and the fix."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePath

from fleet_train.errors import ClusterError

LONGEST_LABEL = 63
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
# kubernetes.io, "Quantity": binary, decimal and exponent suffixes.
_QUANTITY = re.compile(_NUMBER + r"(?:(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE])|[eE]([+-]?\d{1,3}))?", re.ASCII)
_FACTORS = {
    **{suffix: Decimal(1024) ** power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
    **{
        suffix: Decimal(1000) ** power
        for power, suffix in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
    },
}
_LEAST_MEMORY_BYTES = 1 << 20
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def check_name(flag: str, name: str, longest_suffix: str = "") -> str:
    """The name of a job whose pods get services and host names: an RFC 1035 label, which is an RFC 1123 label that
    begins with a letter. ``longest_suffix``: what the engine appends to it for its last pod."""
    check_label(flag, name, starts_with_letter=True)
    if len(name) + len(longest_suffix) > LONGEST_LABEL:
        raise ClusterError(
            f"{flag}={name} has {len(name)} characters, and the last pod is called {name}{longest_suffix}: a host name "
            f"has at most {LONGEST_LABEL} (RFC 1123); shorten it to {LONGEST_LABEL - len(longest_suffix)}"
        )
    return name


def check_label(flag: str, name: str, *, starts_with_letter: bool = False) -> str:
    """An RFC 1123 label. Raises ClusterError."""
    begins = starts_with_letter and not re.match("[a-z]", name)
    if not _LABEL.fullmatch(name) or len(name) > LONGEST_LABEL or begins:
        letter = ", beginning with a letter (RFC 1035) as services are named after it" if starts_with_letter else ""
        raise ClusterError(
            f"{flag}={name[:80]!r}: Kubernetes needs 1 to {LONGEST_LABEL} of a to z, 0 to 9 and '-', with a letter or "
            f"digit at both ends (RFC 1123){letter}; {_nearest(name, starts_with_letter)}"
        )
    return name


def check_subdomain(flag: str, name: str) -> str:
    """The name of an object such as a claim: RFC 1123 labels with dots between them. Raises ClusterError."""
    if len(name) > 253 or not all(_LABEL.fullmatch(part) for part in name.split(".")):
        raise ClusterError(
            f"{flag}: {name[:80]!r} is not an object's name: up to 253 of a to z, 0 to 9, '-' and '.', with a letter "
            f"or digit at both ends of each part (RFC 1123); {_nearest(name, False)}"
        )
    return name


def _nearest(name: str, starts_with_letter: bool) -> str:
    near = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:LONGEST_LABEL].strip("-")
    near = near.lstrip("0123456789-") if starts_with_letter else near
    return f"use for example {near}" if near else "use for example my-training"


def quantity(flag: str, text: str) -> Decimal:
    """The value of a Kubernetes quantity, above 0. Raises ClusterError."""
    match = _QUANTITY.fullmatch(text)
    if match is None or len(text) > 40:
        example = "8" if flag == "--cpu" else "32Gi"
        raise ClusterError(
            f"{flag}={text[:60]!r} is not a Kubernetes quantity: a number followed by Ki, Mi, Gi, Ti (powers of 1024), "
            f"k, M, G, T (of 1000), m (a thousandth) or nothing, without a space; as in {flag}={example}"
        )
    number, suffix, exponent = match.groups()
    value = Decimal(number) * (Decimal(10) ** int(exponent) if exponent else _FACTORS[suffix or ""])
    if value <= 0:
        raise ClusterError(f"{flag}={text}: give more than 0, or leave it out for no request")
    return value


def check_cpu(text: str) -> str:
    if (quantity("--cpu", text) * 1000) % 1:
        raise ClusterError(
            f"--cpu={text}: Kubernetes counts in thousandths of a processor; write for example 500m or 4"
        )
    return text


def check_memory(flag: str, text: str) -> Decimal:
    """Bytes. Raises ClusterError; also for the ``400m`` that is a fraction of a byte."""
    value = quantity(flag, text)
    if value % 1 or value < _LEAST_MEMORY_BYTES:
        digits = re.match(_NUMBER, text)
        raise ClusterError(
            f"{flag}={text} is {value.normalize():f} bytes; memory is counted in bytes, and no process starts in less "
            f"than 1Mi; did you mean {digits[0] if digits else 1}Gi?"
        )
    return value


def check_environment(pairs: Iterable[str], reserved: Iterable[str] = ()) -> dict[str, str]:
    """``NAME=VALUE`` texts. Raises ClusterError for one that is malformed, given twice, or reserved for the engine."""
    environment: dict[str, str] = {}
    taken = frozenset(reserved)
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise ClusterError(
                f"--env={name[:60]!r}{'=...' if equals else ''} is not NAME=VALUE; a name has letters, digits and "
                "underscores and does not begin with a digit: --env OMP_NUM_THREADS=4"
            )
        if name in environment:
            raise ClusterError(f"--env {name}=... is given twice; give one value")
        if name in taken:
            raise ClusterError(f"--env {name}=...: the engine's variables are set by this manifest; leave it out")
        if "\0" in value:
            raise ClusterError(f"--env {name}=... has a NUL in its value, which no variable can have; remove it")
        environment[name] = value
    return environment


def check_path(flag: str, path: str) -> str:
    """An absolute path inside a container."""
    if not path.startswith("/") or ":" in path or "\0" in path or ".." in path.split("/"):
        raise ClusterError(
            f"{flag}: {path[:80]!r} is not an absolute path without ':' and '..'; write for example /data"
        )
    return path


# The processes of every node, one launcher and under it the script; and the comments of the written files.


_LONGEST_NAME = 40
_WIDTH = 110
_COLUMN = 9


@dataclass(frozen=True)
class Training:
    """The launch that each node of the engine runs. Times in seconds."""

    program: tuple[str, ...]
    """Script (or module) and its arguments, unchanged."""
    nodes: int
    processes: int = 1
    """Ranks per node."""
    is_module: bool = False
    python: str = "python"
    strategy: str | None = None
    settings: tuple[str, ...] = ()
    """Of ``--set``, ``knob=value`` each."""
    max_restarts: int = 3
    """How often the launchers restart the ranks themselves before they report a failure to the engine."""
    grace_seconds: int = 30
    """How long ranks may take to save their state after SIGTERM."""
    join_timeout_seconds: int = 900
    """How long a node waits for the others: images are pulled, machines are added."""
    launch_flags: tuple[str, ...] = ()
    """Further flags of ``launch``, unchanged."""

    def __post_init__(self) -> None:
        for name in ("nodes", "processes"):
            if getattr(self, name) < 1:
                raise ClusterError(f"--{name}={getattr(self, name)} is too few; give 1 or more")
        for word in (self.python, *self.program):
            if "\0" in word:
                raise ClusterError(f"{word[:60]!r} has a NUL in it, which no argument of a program can have; remove it")

    def launch(self) -> list[str]:
        """The launcher's command line."""
        words = [self.python, "-m", "fleet_train", "launch", f"--nproc_per_node={self.processes}"]
        words += [f"--strategy={self.strategy}"] if self.strategy else []
        words += [f"--set={text}" for text in self.settings]
        words += [f"--join_timeout={self.join_timeout_seconds}", f"--grace_seconds={self.grace_seconds}"]
        words += [f"--max_restarts={self.max_restarts}"] if self.max_restarts else []
        words += self.launch_flags
        return [*words, *(["-m"] if self.is_module else []), *self.program]

    def shape(self) -> str:
        return f"{self.nodes} x {self.processes} = {self.nodes * self.processes}"

    @property
    def is_trainer(self) -> bool:
        """Whether it is the reference trainer, whose flags are known."""
        return self.is_module and self.program[:2] == ("fleet_train", "train")

    def default_name(self) -> str:
        """A name for the job, derived from the script's."""
        given = self.program[1] if self.is_trainer else PurePath(self.program[0].replace(".", "/")).name
        stem = given if self.is_module else PurePath(self.program[0]).stem
        name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_LONGEST_NAME].strip("-")
        return name if re.match("[a-z]", name) else f"train-{name}".strip("-")


def paragraph(text: str) -> list[str]:
    """Lines of a readable length, and an empty one."""
    return [*textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False), ""]


def rows(table: dict[str, str], column: int = _COLUMN) -> list[str]:
    """A name and its text, each on a line, which may continue on further lines; and an empty line."""
    lines = []
    for name, text in table.items():
        first, *more = text.split("\n")
        lines += [f"{name:<{column}}{first}", *(" " * column + line for line in more)]
    return [*lines, ""]


def about(training: Training, what: str, counts_starts: bool = False) -> list[str]:
    """The first paragraphs. ``counts_starts``: the engine tells a job that it was started before."""
    shape = f"nodes x ranks per node = {training.shape()}"
    lines = paragraph(f"{what}: {shape}. Written by `python -m fleet_train manifest`.")
    if training.is_trainer and "--resume" not in training.program and not counts_starts:
        lines += paragraph(
            "NOTE: the reference trainer is started without --resume. Restarted by the engine, it refuses the "
            "checkpoints that it finds; write --resume after `fleet_train train`."
        )
    return lines
