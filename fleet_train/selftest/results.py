"""The results of checks, as text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

OK, WARN, SKIP, FAIL = "ok", "warn", "skip", "FAIL"


@dataclass(frozen=True)
class Result:
    """One line of the report. ``group``: the name for ``--only`` and ``--skip``."""

    group: str
    name: str
    status: str
    words: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> str:
        return f"{self.status:<5} {self.name}: {self.words}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Result:
        return cls(**data)


def failed(results: Iterable[Result]) -> list[str]:
    """The names of the failed checks, each once, in their order."""
    return list(dict.fromkeys(result.name for result in results if result.status == FAIL))


def verdict(results: Iterable[Result], seconds: float) -> str:
    """The last line of the report."""
    results = list(results)
    numbers = {status: sum(result.status == status for result in results) for status in (OK, WARN, SKIP)}
    counted = ", ".join(f"{number} {status}" for status, number in numbers.items() if number)
    wrong = failed(results)
    if wrong:
        return f"FAILED: {', '.join(wrong)}{'; ' if counted else ''}{counted}, in {seconds:.0f} s"
    word = "PASSED" if exit_code(results) == 0 else "NOTHING was checked"
    return f"{word}: {counted or 'no check'}, in {seconds:.0f} s"


def exit_code(results: Iterable[Result]) -> int:
    """0: none failed, and not all were left out."""
    results = list(results)
    return 0 if any(result.status in (OK, WARN) for result in results) and not failed(results) else 1
