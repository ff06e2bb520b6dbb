"""One node's examination from start to end: its own facts, the rendezvous, the network, the exchange of results."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from fleet_train.doctor import measure_folders, measure_machine, measure_network, report
from fleet_train.doctor import measure_machine as machine
from fleet_train.doctor import measure_machine as software
from fleet_train.doctor.facts import (
    GROUP_NEEDS_SECONDS,
    GROUP_SECONDS,
    PASS,
    Examination,
    Finding,
    Folder,
    GroupResult,
    NodeFacts,
    NodeReport,
    Options,
    exit_code,
    from_json,
    verdict,
)
from fleet_train.doctor.judge import judge
from fleet_train.doctor.participants import Participants, find
from fleet_train.doctor.peer_group import PeerGroup
from fleet_train.doctor.responder import ReplicatedState, Responder
from fleet_train.errors import printable
from fleet_train.launch.processes import StopRequested, request_name, stopping_signals
from fleet_train.selftest.child import free_port
from fleet_train.selftest.supervisor import Where

Say = Callable[[str], None]
_PAIRS_SECONDS = 14.0
_RESERVE_SECONDS = 14.0
"""Reserved for a pair that hangs, and for the exchange."""
_EXCHANGE_SECONDS, _LEAVE_SECONDS = 12.0, 4.0
_DEFAULT_MTU = 1500


class Examiner:
    """``say`` gets progress messages. Every part has a bound, and all together ``options.whole_seconds``."""

    def __init__(self, participants: Participants, options: Options, say: Say) -> None:
        self.participants = participants
        self.options = options
        self.mark = f"{measure_folders.MARK}{secrets.token_hex(8)}"
        self._say = say
        self._deadline = time.monotonic() + options.whole_seconds
        self._folders: tuple[Folder, ...] = ()

    def run(self) -> Examination:
        """The results of all nodes; all present nodes return the same, unless one is lost meanwhile."""
        try:
            return self._alone() if self.participants.is_alone else self._among_others()
        finally:
            measure_folders.clean(self._folders, self.mark)

    def _left(self, most: float) -> float:
        return max(0.5, min(most, self._deadline - time.monotonic()))

    # this node

    def _alone(self) -> Examination:
        state = ReplicatedState()
        responder = Responder(
            self.participants.address, self.participants.ports[0], self.participants.access, ["127.0.0.1"], state
        )
        responder.close()
        facts = self._facts(responder.held)
        return Examination(self.participants.addresses, {0: NodeReport(facts, (0,))}, {}, self.participants.ports[0][0])

    def _facts(self, held: dict[int, str]) -> NodeFacts:
        asked, participants = self.options.groups, self.participants
        facts = NodeFacts(participants.index, participants.processes)
        if "machine" in asked:
            self._folders = self._examine_folders()
            facts = replace(
                facts,
                memory=machine.memory(),
                processors=machine.processors(),
                limits=machine.limits(),
                folders=self._folders,
            )
        if "software" in asked:
            facts = replace(facts, software=software.software(self.options.strategy, self.options.script))
        if "network" in asked:
            here = measure_network.network(
                participants.addresses, participants.index, held, participants.is_named, os.environ
            )
            facts = replace(facts, network=here)
        if "gpus" in asked:
            facts = replace(facts, gpus=measure_machine.gpus())
        return facts

    def _examine_folders(self) -> tuple[Folder, ...]:
        wanted = {"logs": self.options.log_dir, "output": self.options.output_dir}
        if measure_folders.nearest(self.options.log_dir) == measure_folders.nearest(self.options.output_dir):
            wanted = {"logs and output": self.options.log_dir}
        with ThreadPoolExecutor(len(wanted), "doctor folders") as beside:
            found = [
                beside.submit(measure_folders.examine, purpose, path, self.mark) for purpose, path in wanted.items()
            ]
            return tuple(one.result() for one in found)

    # among others

    def _among_others(self) -> Examination:
        state, participants = ReplicatedState(), self.participants
        responder = Responder(
            participants.address,
            participants.ports[participants.index],
            participants.access,
            participants.addresses,
            state,
        ).start()
        peer_group = PeerGroup(participants, state, responder)
        try:
            facts = self._facts(responder.held)
            state.put(f"here/{participants.index}", self._here(responder, facts))
            present = peer_group.wait_for_nodes(self._left(self.options.join_timeout_seconds), self._say)
            self._network(peer_group, facts, present)
            missing = peer_group.collect(["report"], present, self._left(_PAIRS_SECONDS + _EXCHANGE_SECONDS))
            if "group" in self.options.groups:
                self._group(peer_group, [node for node in present if node not in missing])
                peer_group.collect(["group"], set(present) - missing, self._left(GROUP_SECONDS))
            peer_group.leave(set(present) - missing, self._left(_LEAVE_SECONDS))
            return self._examination(state)
        finally:
            responder.close()

    def _here(self, responder: Responder, facts: NodeFacts) -> dict[str, Any]:
        return {
            "open": responder.ports,
            "extra": responder.extra_port,
            "udp": responder.udp_port,
            "subject": free_port(self.participants.address),
            "mark": self.mark,
            "folders": [folder.purpose for folder in facts.folders],
        }

    def _network(self, peer_group: PeerGroup, facts: NodeFacts, present: tuple[int, ...]) -> None:
        report = NodeReport(self._with_shared_folders(peer_group.state, facts), present)
        if "network" in self.options.groups and len(present) > 1:
            assert facts.network is not None
            mtus = {one.name: one.mtu for one in facts.network.interfaces}
            towards = {node: mtus.get(route.interface, _DEFAULT_MTU) for node, route in facts.network.routes.items()}
            with ThreadPoolExecutor(1, "doctor sweep") as beside:
                swept = beside.submit(peer_group.sweep, present, towards)
                tries = peer_group.try_ports(present)
                report = replace(report, tries=(*tries, *peer_group.refusals.values()), datagrams=swept.result())
            seconds = min(_PAIRS_SECONDS, self._deadline - time.monotonic() - _RESERVE_SECONDS)
            echoes, streams = peer_group.measure_pairs(present, seconds)
            report = replace(report, echoes=tuple(echoes), streams=tuple(streams))
        peer_group.state.put(f"report/{self.participants.index}", asdict(report))

    def _with_shared_folders(self, state: ReplicatedState, facts: NodeFacts) -> NodeFacts:
        marks = {node: str((state.get(f"here/{node}") or {}).get("mark", "")) for node in state.nodes("here")}
        others = {node: mark for node, mark in marks.items() if node != self.participants.index and _is_mark(mark)}
        shared = tuple(
            replace(
                folder, shared_with=tuple(sorted(n for n, mark in others.items() if measure_folders.seen(folder, mark)))
            )
            for folder in facts.folders
        )
        return replace(facts, folders=shared)

    def _group(self, peer_group: PeerGroup, present: list[int]) -> None:
        peer_group.state.put(f"group/{self.participants.index}", asdict(self._form(peer_group.state, sorted(present))))

    def _form(self, state: ReplicatedState, present: list[int]) -> GroupResult:
        from fleet_train.doctor.peer_group import form

        agreed = all(_present(state, node) == present for node in present)
        if len(present) < 2 or not agreed:
            return GroupResult(True, "", skipped="the nodes do not agree on which nodes are present")
        if self._deadline - time.monotonic() < GROUP_NEEDS_SECONDS:
            return GroupResult(True, "", skipped="no time was left for it; --only group has more")
        if not all(isinstance((state.get(f"here/{node}") or {}).get("subject"), int) for node in present):
            return GroupResult(True, "", skipped="a node reported no port for it")
        ports = [int(state.get(f"here/{node}")["subject"]) for node in present]
        log = self.options.log_dir / f"doctor.{self.participants.index}.log"
        addresses = [self.participants.addresses[node] for node in present]
        seconds = self._left(GROUP_SECONDS) - _LEAVE_SECONDS
        return form(addresses, ports, present.index(self.participants.index), Path(log), seconds)

    def _examination(self, state: ReplicatedState) -> Examination:
        reports, groups = {}, {}
        for node in sorted(state.nodes("report")):
            try:
                reports[node] = from_json(NodeReport, state.get(f"report/{node}"))
                told = state.get(f"group/{node}")
                if told is not None:
                    groups[node] = from_json(GroupResult, told)
            except ValueError:
                continue  # listed as a node whose report did not arrive
        return Examination(
            self.participants.addresses, reports, groups, self.participants.ports[self.participants.index][0]
        )


def _present(state: ReplicatedState, node: int) -> list[int]:
    report = state.get(f"report/{node}")
    return sorted(report.get("present", [])) if isinstance(report, dict) else []


def _is_mark(text: str) -> bool:
    """It becomes part of a path, and comes from another machine."""
    return text.startswith(measure_folders.MARK) and text.removeprefix(measure_folders.MARK).isalnum()


# From the command to the verdict.


def start(options: Options, where: Where, as_json: bool) -> int:
    """Examine; returns the exit code. Raises FleetTrainError for flags that describe no cluster."""
    began = time.monotonic()
    participants = find(where, options.join_timeout_seconds)
    if participants is None:
        return 0  # the first process of this node does it
    examiner = Examiner(participants, options, lambda text: _echo(f"fleet_train: {text}", err=True))
    try:
        with stopping_signals():  # so that files are also deleted on SIGTERM
            examined = examiner.run()
    except StopRequested as stop:
        click.echo(f"fleet_train: stopped by {request_name(stop.number)}; there is no result", err=True)
        return 128 + stop.number
    findings = judge(examined, options.groups)
    seconds = time.monotonic() - began
    if as_json:
        click.echo(json.dumps(report.as_json(examined, findings, seconds), indent=1))
    for line in _shown(participants, examined, findings, seconds):
        _echo(line, err=as_json)
    return exit_code(findings)


def _echo(line: str, err: bool) -> None:
    """Facts and names come from other machines: they cannot control this terminal."""
    click.echo(printable(line), err=err)


def _shown(participants: Participants, examined: Examination, findings: list[Finding], seconds: float) -> list[str]:
    """The lowest present node prints everything, the others their own findings."""
    own = examined.host(participants.index)
    if participants.index == min(examined.reports, default=participants.index):
        table = report.matrix(examined)
        return [*report.lines(findings), *([""] if table else []), *table, "", verdict(findings, seconds)]
    mine = [one.line for one in findings if one.level != PASS and own in one.hosts]
    where = f"the whole report is on {examined.host(min(examined.reports))}"
    return [*mine, f"{verdict(findings, seconds)}; {where}"]
