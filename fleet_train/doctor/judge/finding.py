"""One finding: a check of one host or of a pair, the measured value, the threshold, and the command that fixes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fleet_train.errors import JoinTimeout

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
ABSENT = "absent"
"""The id of the finding that names a node that did not connect."""


@dataclass(frozen=True)
class Finding:
    group: str
    id: str
    level: str
    hosts: tuple[str, ...]
    measured: str
    threshold: str = ""
    fix: str = ""

    @property
    def line(self) -> str:
        threshold = f" ({self.threshold})" if self.threshold else ""
        fix = f"; mend: {self.fix}" if self.fix and self.level != PASS else ""
        return f"{self.level}  {self.id}  {' -> '.join(self.hosts)}: {self.measured}{threshold}{fix}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def exit_code(findings: Iterable[Finding]) -> int:
    """0: no FAIL; 6: a node did not connect; 1: anything else has failed."""
    failed = [one for one in findings if one.level == FAIL]
    if any(one.id == ABSENT for one in failed):
        return JoinTimeout.exit_code
    return 1 if failed else 0


def verdict(findings: Sequence[Finding], seconds: float) -> str:
    """The last line."""
    numbers = {level: sum(one.level == level for one in findings) for level in (FAIL, WARN, PASS)}
    counted = ", ".join(f"{number} {level}" for level, number in numbers.items() if number)
    word = "SICK" if numbers[FAIL] else "FIT, with warnings" if numbers[WARN] else "FIT"
    failed = list(dict.fromkeys(f"{one.id} on {' -> '.join(one.hosts)}" for one in findings if one.level == FAIL))
    named = f": {'; '.join(failed[:4])}{f'; and {len(failed) - 4} more' if len(failed) > 4 else ''}" if failed else ""
    return f"{word}{named} ({counted or 'nothing was examined'}, in {seconds:.0f} s)"


def size(number: float) -> str:
    """``1.5 GB`` and the like, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB"


def rate(bytes_per_second: float) -> str:
    """``941 Mb/s``: the usual unit of networks."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.1f} Gb/s" if bits >= 10e9 else f"{bits / 1e6:.{0 if bits >= 10e6 else 2}f} Mb/s"
