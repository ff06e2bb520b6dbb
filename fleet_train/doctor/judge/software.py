"""Findings of the software that the nodes would run, which must be the same on all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fleet_train.doctor.facts import Examination, Software
from fleet_train.doctor.judge.finding import FAIL, PASS, WARN, Finding


@dataclass(frozen=True)
class _Rule:
    id: str
    name: str
    read: Callable[[Software], str]
    level: str
    """Of a node that differs."""
    fix: str


def _short_python(found: Software) -> str:
    return ".".join(found.python.split(".")[:2])


_RULES = (
    _Rule("python", "Python", _short_python, FAIL, "python -m venv with the same Python as on the other nodes"),
    _Rule("paddle", "Paddle", lambda one: one.paddle, FAIL, "pip install paddlepaddle==3.3.1 on every node"),
    _Rule("fleet_train", "fleet_train", lambda one: one.fleet_train, FAIL, "pip install the same version everywhere"),
    _Rule("numpy", "numpy", lambda one: one.numpy, WARN, "pip install the same numpy on every node"),
    _Rule(
        "package", "the files of fleet_train (digest)", lambda one: one.package_digest, FAIL,
        "git status in the checkout, or pip install --force-reinstall the same package on every node",
    ),
    _Rule("profile", "the profile (digest)", lambda one: one.profile, FAIL, "copy the profile to every node"),
    _Rule("script", "the script (digest)", lambda one: one.script, FAIL, "copy the script to every node"),
)  # fmt: skip


def findings(examined: Examination) -> Iterator[Finding]:
    found = {i: report.facts.software for i, report in examined.reports.items() if report.facts.software is not None}
    for index, one in found.items():
        for error in one.errors:
            yield Finding("software", "profile_or_script", FAIL, (examined.host(index),), error, "can be read", "ls -l")
        if not one.paddle:
            fix = "pip install paddlepaddle==3.3.1 (CPU), or see requirements-gpu.txt"
            yield Finding("software", "paddle", FAIL, (examined.host(index),), "Paddle is not installed", "3.3", fix)
    for rule in _RULES:
        yield from _compare(examined, {index: rule.read(one) for index, one in found.items()}, rule)


def _compare(examined: Examination, values: dict[int, str], rule: _Rule) -> Iterator[Finding]:
    """A node differs if its value is not that of the majority; of equally many, the lowest node's value counts."""
    values = {index: value for index, value in values.items() if value}
    if not values:
        return
    counts = Counter(values.values())
    usual = max(counts, key=lambda value: (counts[value], -min(i for i, v in values.items() if v == value)))
    first = next(index for index, value in values.items() if value == usual)
    for index, value in values.items():
        measured = f"{rule.name}: {value}"
        if value == usual:
            yield Finding("software", rule.id, PASS, (examined.host(index),), measured, "the same on all nodes")
            continue
        told = f"{measured}, but {usual} on {examined.host(first)}"
        host = (examined.host(index),)
        yield Finding("software", rule.id, rule.level, host, told, "the same on all nodes", rule.fix)
