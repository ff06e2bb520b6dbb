"""The programs, as users write them, one module per subject. ``programs()`` is the list."""

from __future__ import annotations

from importlib import import_module

from tests.programs.catalogue.entry import REGISTERED, Program

SUBJECTS = ("sharing", "optimizers", "settings", "layers", "sequences", "control", "loops", "values", "schedules")


def programs() -> dict[str, Program]:
    """Every program by its name, in the order of ``SUBJECTS``. Imports Paddle."""
    for subject in SUBJECTS:
        import_module(f"tests.programs.catalogue.{subject}")
    return dict(REGISTERED)
