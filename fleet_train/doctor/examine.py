"""One node's examination from start to end: its own facts, the rendezvous, the network, the exchange of results."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from hashlib import sha256

import click

from fleet_train import timeouts
from fleet_train.cluster.cluster import Cluster, Rank
from fleet_train.cluster.network import interface_addresses, interface_of, interface_variables
from fleet_train.doctor import measure_apart, measure_machine, measure_network, report
from fleet_train.doctor.facts import (
    PASS,
    DoctorOptions,
    Examination,
    Finding,
    Folder,
    GroupResult,
    NodeFacts,
    NodeReport,
    PortTry,
    exit_code,
    verdict,
)
from fleet_train.doctor.judge import judge
from fleet_train.doctor.meeting import Meeting
from fleet_train.doctor.pairs import Rounds, dial, sweep
from fleet_train.doctor.participants import Participants, find
from fleet_train.doctor.sockets import KEY_BYTES, Door, Sockets, held_ports
from fleet_train.errors import JoinTimeout, WorkerFailed, printable
from fleet_train.launch.on_ranks import Subject, Where, environ_of
from fleet_train.launch.processes import StopRequested, request_name, stopping_signals
from fleet_train.launch.signpost import Signpost
from fleet_train.log import logger
from fleet_train.selftest.options import FAIL, TOGETHER, Result, SelftestOptions

_DOCTOR_RESERVE_SECONDS = 14.0
"""Time that the doctor reserves for a pair that hangs, and for the exchange."""
_DOCTOR_GROUP_SECONDS, _DOCTOR_GROUP_NEEDS_SECONDS = 25.0, 12.0
"""How long a group of the doctor's may take before it is abandoned; the least time left with which one is started."""

_DEFAULT_MTU = 1500


def start(options: DoctorOptions, where: Where, as_json: bool) -> int:
    """Examine; returns the exit code. Raises FleetTrainError for flags that describe no cluster."""
    began = time.monotonic()
    participants = find(where, options.join_timeout_seconds)
    if participants is None:
        return 0  # the first process of this node does it
    try:
        with stopping_signals():  # so that files are also deleted on SIGTERM
            examined = Examiner(participants, options).run()
    except StopRequested as stop:
        logger.error(f"stopped by {request_name(stop.number)}; there is no result")
        return 128 + stop.number
    findings = judge(examined, options.groups)
    seconds = time.monotonic() - began
    if as_json:
        click.echo(json.dumps(report.as_json(examined, findings, seconds), indent=1))
    for line in _shown(participants.node.index, examined, findings, seconds, options.verbose):
        click.echo(printable(line), err=as_json)  # names come from other machines: they cannot control this terminal
    return exit_code(findings)


class Examiner:
    """Every part has a bound, and all together ``options.whole_seconds``."""

    def __init__(self, participants: Participants, options: DoctorOptions) -> None:
        self.participants = participants
        self.options = options
        self._node = participants.node
        self.key = secrets.token_hex(KEY_BYTES)
        self.mark = _mark_of(self.key)
        self._deadline = time.monotonic() + options.whole_seconds
        self._folders: tuple[Folder, ...] = ()
        self._own: NodeReport | None = None

    def run(self) -> Examination:
        """The results of all nodes; all present nodes return the same, unless one is lost meanwhile."""
        try:
            return self._alone() if len(self._node.addresses) == 1 else self._among_others()
        finally:
            measure_apart.clean(self._folders, self.mark)

    def _left(self, most: float) -> float:
        return max(0.5, min(most, self._deadline - time.monotonic()))

    def _alone(self) -> Examination:
        node, ports = self._node, self.participants.own_ports
        facts = self._facts(held_ports(node.address, ports))
        return Examination(node.addresses, {0: NodeReport(facts)}, started_port=ports[0])

    def _among_others(self) -> Examination:
        node, ports = self._node, self.participants.own_ports
        held = held_ports(node.address, ports)
        free = [port for port in ports if port not in held]
        with contextlib.ExitStack() as closing:
            signpost = self._signpost()
            closing.callback(signpost.close)
            meeting = Meeting(self.participants, free, lambda: signpost.difference)
            closing.callback(meeting.close)
            sockets = Sockets(node.address, free[node.index == 0 :], self.key)  # the store of node 0 has the first
            closing.callback(sockets.close)
            facts = self._facts(held)
            try:
                examined = self._met(meeting, sockets, facts)
            except (JoinTimeout, WorkerFailed) as lost:
                report = self._own or NodeReport(facts, meeting.dialled)
                examined = Examination(node.addresses, {node.index: report}, started_port=ports[0], cut_off=str(lost))
            return replace(examined, difference=signpost.difference, counts=node.counts)

    def _met(self, meeting: Meeting, sockets: Sockets, facts: NodeFacts) -> Examination:
        """Meet the other nodes, measure, exchange results. Raises JoinTimeout, WorkerFailed without node 0's store."""
        doors = meeting.join(sockets.door, self._left(self.options.join_timeout_seconds))
        present = tuple(doors)
        self._own = self._report(meeting, sockets, facts, doors)
        sockets.close()
        seconds = self._left(timeouts.DOCTOR_PAIRS_SECONDS + timeouts.DOCTOR_EXCHANGE_SECONDS)
        missing = meeting.share("report", asdict(self._own), present, seconds)
        if "group" in self.options.groups:
            ports = {node: door.ports[-1] for node, door in doors.items()}  # the kernel's choice, free again
            group = self._form_group(ports, why_not="the report of a node did not arrive" if missing else "")
            seconds = self._left(_DOCTOR_GROUP_SECONDS)
            meeting.share("group", asdict(group), set(present) - missing, seconds)
        reports, groups = meeting.read("report", NodeReport), meeting.read("group", GroupResult)
        meeting.leave(self._left(timeouts.DOCTOR_LEAVE_SECONDS))
        return Examination(self._node.addresses, reports, groups, self.participants.own_ports[0], present=present)

    def _signpost(self) -> Signpost:
        """Doctors that were started with different flags look at each other's ports in vain, as launchers do."""
        node = self._node
        facts = {
            "the node list (--ips)": ",".join(node.addresses),
            "--started_port": node.started_port,
            "the number of processes per node (--nproc)": node.processes_in_words,
        }
        return Signpost(node, self.participants.access, ["doctor"], facts)

    def _facts(self, held: dict[int, str]) -> NodeFacts:
        """Measure the facts of this node, as far as they are requested."""
        groups, node, options = self.options.groups, self._node, self.options
        facts = NodeFacts(node.index, node.processes)
        if "machine" in groups:
            self._folders = measure_apart.examine_all(options.log_dir, options.output_dir, self.mark)
            memory, processors = measure_machine.memory(), measure_machine.processors()
            limits = measure_machine.limits()
            facts = replace(facts, memory=memory, processors=processors, limits=limits, folders=self._folders)
        if "software" in groups:
            facts = replace(facts, software=measure_machine.software(options.strategy, options.script))
        if "network" in groups:
            here = measure_network.network(node.addresses, node.index, held, self.participants.is_named, os.environ)
            facts = replace(facts, network=here)
        if "gpus" in groups:
            facts = replace(facts, gpus=measure_machine.gpus())
        if "data" in groups and options.data:
            facts = replace(facts, data=measure_apart.of_data(options.data))
        return facts

    def _report(self, meeting: Meeting, sockets: Sockets, facts: NodeFacts, doors: Mapping[int, Door]) -> NodeReport:
        """The facts, with the folders that other nodes see, and what is measured between this node and others."""
        index, present = self._node.index, tuple(doors)
        folders = []
        for folder in facts.folders:
            others = (node for node in doors if node != index)
            seers = (node for node in others if measure_apart.seen(folder, _mark_of(doors[node].key)))
            folders.append(replace(folder, shared_with=tuple(sorted(seers))))
        facts = replace(facts, folders=tuple(folders))
        if facts.network is None:
            return NodeReport(facts)
        mtus = {interface.name: interface.mtu for interface in facts.network.interfaces}
        towards = {node: mtus.get(route.interface, _DEFAULT_MTU) for node, route in facts.network.routes.items()}
        ports = dict(enumerate(self.participants.ports)) | {node: door.ports for node, door in doors.items()}
        with ThreadPoolExecutor(1, "doctor sweep") as pool:
            swept = pool.submit(sweep, self._node, doors, towards)
            tries = dial(self._node, ports)
            datagrams = swept.result()
        if index:
            tries = (PortTry(0, meeting.port, "open"), *tries)
        meeting.share("tries", [asdict(each) for each in tries], present, timeouts.DOCTOR_ROUND_SECONDS)
        awaited = set(present)

        def late(number: int) -> set[int]:
            awaited.difference_update(meeting.share(f"round {number}", True, awaited, timeouts.DOCTOR_ROUND_SECONDS))
            return set(present) - awaited  # they are waited for once

        seconds = self._deadline - time.monotonic() - _DOCTOR_RESERVE_SECONDS
        pairs = Rounds(self._node, sockets, doors, meeting.read("tries", tuple[PortTry, ...]), late)
        pairs.measure(min(timeouts.DOCTOR_PAIRS_SECONDS, seconds))
        return NodeReport(facts, tries, tuple(pairs.echoes), datagrams, tuple(pairs.streams))

    def _form_group(self, ports: Mapping[int, int], why_not: str) -> GroupResult:
        """One process per node forms a process group and adds exact integers: the selftest's subject."""
        if not why_not and len(ports) < 2:
            why_not = "no other node is present"
        if not why_not and self._deadline - time.monotonic() < _DOCTOR_GROUP_NEEDS_SECONDS:
            why_not = "no time was left for it; --only group has more"
        if why_not:
            return GroupResult(True, "", skipped=why_not)
        present = sorted(ports)
        addresses = [self._node.addresses[node] for node in present]
        ranks = tuple(Rank(i, address, ports[present[i]], i, 0) for i, address in enumerate(addresses))
        cluster = Cluster(ranks, present.index(self._node.index), formed_by="the doctor")
        seconds = self._left(_DOCTOR_GROUP_SECONDS) - timeouts.DOCTOR_LEAVE_SECONDS
        options = SelftestOptions(groups=("collectives",), join_timeout_seconds=seconds)
        environ = environ_of(cluster, seconds, os.environ)
        interface = interface_of(cluster.this.host, interface_addresses())
        if interface is not None:  # as in the launcher: the host name might stand for another interface
            environ = interface_variables(interface) | environ
        began = time.monotonic()
        log = self.options.log_dir / f"doctor.{self._node.index}.log"
        child = Subject(TOGETHER, options.to_json(), environ, log, "fleet_train.selftest.subject")
        try:
            has_ended = child.wait(seconds) is not None
            results = [Result.from_json(entry["result"]) for entry in child.reports() if "result" in entry]
        finally:
            child.kill()
        failed = [f"{result.name}: {result.words}" for result in results if result.status == FAIL]
        words = ""
        if not has_ended:
            words = f"did not finish within {seconds:.0f} s"
        elif failed:
            words = failed[0][:300]
        elif child.status:
            last = (child.last_lines() or ("no message",))[-1]
            words = f"ended with exit code {child.status}: {last[:300]}"
        took = time.monotonic() - began
        return GroupResult(not words, words or f"{len(ranks)} processes added exact integers", took)


def _mark_of(key: str) -> str:
    """The name of a node's files, which others of its machine can read."""
    return f"{measure_apart.MARK}{sha256(key.encode()).hexdigest()[:16]}"


def _shown(index: int, examined: Examination, findings: list[Finding], seconds: float, everything: bool) -> list[str]:
    """The lowest present node prints everything, the others their own findings."""
    own = examined.host(index)
    if index == min(examined.reports, default=index):
        table = report.matrix(examined)
        return [*report.lines(findings, everything), *([""] if table else []), *table, "", verdict(findings, seconds)]
    mine = [finding.line for finding in findings if finding.level != PASS and own in finding.hosts]
    where = f"the whole report is on {examined.host(min(examined.reports))}"
    return [*mine, f"{verdict(findings, seconds)}; {where}"]
