"""All findings of an examination, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fleet_train.doctor.facts import Examination
from fleet_train.doctor.judge import gpus, machine, network, pairs, software
from fleet_train.doctor.judge.finding import FAIL, PASS, WARN, Finding


def judge(examined: Examination, groups: Sequence[str]) -> list[Finding]:
    found: list[Finding] = []
    if "network" not in groups and len(examined.addresses) > 1:
        found += network.absent(examined)
    for group, read in _READERS.items():
        if group in groups:
            found += read(examined)
    return found


def group(examined: Examination) -> Iterator[Finding]:
    fix = "the logs of the group are beside the job's (doctor.N.log); python -m fleet_train selftest says more"
    for index, result in examined.groups.items():
        host = (examined.host(index),)
        if result.skipped:
            yield Finding("group", "group", WARN, host, f"not formed: {result.skipped}", "formed", fix)
        else:
            told = f"{result.words} ({result.seconds:.0f} s)"
            yield Finding("group", "group", PASS if result.ok else FAIL, host, told, "exact sums", fix)


_READERS = {
    "machine": machine.findings,
    "software": software.findings,
    "network": lambda one: [*network.findings(one), *pairs.findings(one)],
    "gpus": gpus.findings,
    "group": group,
}
