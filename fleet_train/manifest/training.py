"""The processes of every node: one launcher, and under it the unchanged script."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePath

from fleet_train.errors import ClusterError

_LONGEST_NAME = 40


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

    def launch(self, *flags: str) -> list[str]:
        """The launcher's command line, with flags of the engine's own."""
        words = [self.python, "-m", "fleet_train", "launch", f"--nproc_per_node={self.processes}"]
        words += [f"--strategy={self.strategy}"] if self.strategy else []
        words += [f"--join_timeout={self.join_timeout_seconds}", f"--grace_seconds={self.grace_seconds}"]
        words += [f"--max_restarts={self.max_restarts}"] if self.max_restarts else []
        words += [*flags, *self.launch_flags]
        return [*words, *(["-m"] if self.is_module else []), *self.program]

    def shape(self) -> str:
        return f"{self.nodes} x {self.processes} = {self.nodes * self.processes}"

    @property
    def is_trainer(self) -> bool:
        """Whether it is the reference trainer, whose flags are known."""
        return self.is_module and self.program[:2] == ("fleet_train", "train")

    @property
    def starts_anew(self) -> bool:
        """Whether a second start would not continue from the state that the first one saved, as far as is known."""
        return self.is_trainer and "--resume" not in self.program

    def default_name(self) -> str:
        """A name for the job, derived from the script's."""
        given = self.program[1] if self.is_trainer else PurePath(self.program[0].replace(".", "/")).name
        stem = given if self.is_module else PurePath(self.program[0]).stem
        name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_LONGEST_NAME].strip("-")
        return name if re.match("[a-z]", name) else f"train-{name}".strip("-")
