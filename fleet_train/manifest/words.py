"""The comments of the written files: paragraphs, and tables of commands."""

from __future__ import annotations

import textwrap

from fleet_train.manifest.training import Training

_WIDTH = 110
_COLUMN = 9


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
    if training.starts_anew and not counts_starts:
        lines += paragraph(
            "NOTE: the reference trainer is started without --resume. Restarted by the engine, it refuses the "
            "checkpoints that it finds; write --resume after `fleet_train train`."
        )
    return lines


def about_ends(training: Training, end_seconds: int) -> list[str]:
    """The behaviour of pods that must stop."""
    return paragraph(
        "When a pod must stop (an eviction, a drained machine, pause, stop) it gets SIGTERM. All ranks then save their "
        f"state after the same step, within --grace_seconds={training.grace_seconds}, and every launcher ends with "
        f"exit code 12; {end_seconds} s are left for that. To continue from there, the script loads its newest "
        "checkpoint, if any (the reference trainer: --resume), from a volume that all pods mount."
    )
