"""One node's examination from start to end: its own facts, the rendezvous, the network, the exchange of results."""

from __future__ import annotations

import json
import os
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace

import click

from fleet_train import timeouts
from fleet_train.cluster.cluster import Cluster, Rank
from fleet_train.cluster.flight.stands import from_json
from fleet_train.cluster.network import free_port, interface_addresses, interface_of, interface_variables
from fleet_train.doctor import measure_apart, measure_machine, measure_network, report
from fleet_train.doctor.facts import (
    PASS,
    Examination,
    Finding,
    Folder,
    GroupResult,
    NodeFacts,
    NodeReport,
    Options,
    exit_code,
    verdict,
)
from fleet_train.doctor.judge import judge
from fleet_train.doctor.participants import Participants, find
from fleet_train.doctor.peer_group import PeerGroup
from fleet_train.doctor.responder import ReplicatedState, Responder, held_ports
from fleet_train.errors import printable
from fleet_train.launch.node import Node
from fleet_train.launch.on_ranks import Subject, Where, environ_of
from fleet_train.launch.processes import StopRequested, request_name, stopping_signals
from fleet_train.launch.signpost import Signpost
from fleet_train.log import logger
from fleet_train.selftest.options import FAIL, TOGETHER, Result
from fleet_train.selftest.options import Options as SelftestOptions

_DEFAULT_MTU = 1500


def start(options: Options, where: Where, as_json: bool) -> int:
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
    for line in _shown(participants, examined, findings, seconds):
        click.echo(printable(line), err=as_json)  # names come from other machines: they cannot control this terminal
    return exit_code(findings)


class Examiner:
    """Every part has a bound, and all together ``options.whole_seconds``."""

    def __init__(self, participants: Participants, options: Options) -> None:
        self.participants = participants
        self.options = options
        self.mark = f"{measure_apart.MARK}{secrets.token_hex(8)}"
        self._deadline = time.monotonic() + options.whole_seconds
        self._folders: tuple[Folder, ...] = ()

    def run(self) -> Examination:
        """The results of all nodes; all present nodes return the same, unless one is lost meanwhile."""
        try:
            return self._alone() if self.participants.is_alone else self._among_others()
        finally:
            measure_apart.clean(self._folders, self.mark)

    def _left(self, most: float) -> float:
        return max(0.5, min(most, self._deadline - time.monotonic()))

    def _alone(self) -> Examination:
        addresses, (ports,) = self.participants.addresses, self.participants.ports
        facts = self._facts(held_ports(self.participants.address, ports))
        return Examination(addresses, {0: NodeReport(facts, (0,))}, {}, ports[0])

    def _among_others(self) -> Examination:
        state, participants, index = ReplicatedState(), self.participants, self.participants.index
        responder = Responder(
            participants.address, participants.ports[index], participants.access, participants.addresses, state
        ).start()
        peer_group = PeerGroup(participants, state, responder)
        signpost = self._signpost()
        peer_group.waits_in_vain = lambda: signpost.difference
        try:
            facts = self._facts(responder.held)
            here = {"open": responder.ports, "extra": responder.extra_port, "udp": responder.udp_port}
            state.put(f"here/{index}", here | {"subject": free_port(participants.address), "mark": self.mark})
            present = peer_group.wait_for_nodes(self._left(self.options.join_timeout_seconds))
            signpost.close()
            state.put(f"report/{index}", asdict(self._report(peer_group, facts, present)))
            exchange_seconds = timeouts.DOCTOR_PAIRS_SECONDS + timeouts.DOCTOR_EXCHANGE_SECONDS
            missing = peer_group.collect("report", present, self._left(exchange_seconds))
            reached = sorted(set(present) - missing)
            if "group" in self.options.groups:
                state.put(f"group/{index}", asdict(self._form_group(state, reached)))
                peer_group.collect("group", reached, self._left(timeouts.DOCTOR_GROUP_SECONDS))
            peer_group.leave(reached, self._left(timeouts.DOCTOR_LEAVE_SECONDS))
            return replace(self._examination(state), difference=signpost.difference)
        finally:
            signpost.close()
            responder.close()

    def _signpost(self) -> Signpost:
        """Doctors that were started with different flags look at each other's ports in vain, as launchers do."""
        there = self.participants
        node = Node(there.addresses, there.index, there.ports[there.index][0], there.processes, None, None)
        facts = {
            "the node list (--ips)": ",".join(there.addresses),
            "--started_port": node.started_port,
            "the number of processes per node (--nproc)": node.processes,
        }
        return Signpost(node, there.access, ["doctor"], facts)

    def _facts(self, held: dict[int, str]) -> NodeFacts:
        """Of this node, as far as they are requested."""
        groups, participants, options = self.options.groups, self.participants, self.options
        facts = NodeFacts(participants.index, participants.processes)
        if "machine" in groups:
            self._folders = measure_apart.examine_all(options.log_dir, options.output_dir, self.mark)
            memory, processors = measure_machine.memory(), measure_machine.processors()
            limits = measure_machine.limits()
            facts = replace(facts, memory=memory, processors=processors, limits=limits, folders=self._folders)
        if "software" in groups:
            facts = replace(facts, software=measure_machine.software(options.strategy, options.script))
        if "network" in groups:
            here = measure_network.network(
                participants.addresses, participants.index, held, participants.is_named, os.environ
            )
            facts = replace(facts, network=here)
        if "gpus" in groups:
            facts = replace(facts, gpus=measure_machine.gpus())
        if "data" in groups and options.data:
            facts = replace(facts, data=measure_apart.of_data(options.data))
        return facts

    def _report(self, peer_group: PeerGroup, facts: NodeFacts, present: tuple[int, ...]) -> NodeReport:
        """The facts, with the folders that other nodes see, and what is measured between this node and others."""
        state, index = peer_group.state, self.participants.index
        marks = {node: str((state.get(f"here/{node}") or {}).get("mark", "")) for node in state.nodes("here") - {index}}
        folders = []
        for folder in facts.folders:
            others = (n for n, mark in marks.items() if _is_mark(mark) and measure_apart.seen(folder, mark))
            folders.append(replace(folder, shared_with=tuple(sorted(others))))
        report = NodeReport(replace(facts, folders=tuple(folders)), present)
        if facts.network is None or len(present) < 2:
            return report
        mtus = {interface.name: interface.mtu for interface in facts.network.interfaces}
        towards = {node: mtus.get(route.interface, _DEFAULT_MTU) for node, route in facts.network.routes.items()}
        with ThreadPoolExecutor(1, "doctor sweep") as pool:
            swept = pool.submit(peer_group.sweep, present, towards)
            tries = (*peer_group.try_ports(present), *peer_group.refusals.values())
            datagrams = swept.result()
        seconds = self._deadline - time.monotonic() - timeouts.DOCTOR_RESERVE_SECONDS
        echoes, streams = peer_group.measure_pairs(present, min(timeouts.DOCTOR_PAIRS_SECONDS, seconds))
        return replace(report, tries=tries, datagrams=datagrams, echoes=tuple(echoes), streams=tuple(streams))

    def _form_group(self, state: ReplicatedState, present: list[int]) -> GroupResult:
        """One process per node forms a process group and adds exact integers: the selftest's subject."""
        ports, skipped = self._group_ports(state, present)
        if skipped:
            return GroupResult(True, "", skipped=skipped)
        addresses = [self.participants.addresses[node] for node in present]
        ranks = tuple(Rank(i, address, ports[i], i, 0) for i, address in enumerate(addresses))
        cluster = Cluster(ranks, present.index(self.participants.index), formed_by="the doctor")
        seconds = self._left(timeouts.DOCTOR_GROUP_SECONDS) - timeouts.DOCTOR_LEAVE_SECONDS
        options = SelftestOptions(groups=("collectives",), join_timeout_seconds=seconds)
        environ = environ_of(cluster, seconds, os.environ)
        interface = interface_of(cluster.this.host, interface_addresses())
        if interface is not None:  # as in the launcher: the host name might stand for another interface
            environ = interface_variables(interface) | environ
        began = time.monotonic()
        log = self.options.log_dir / f"doctor.{self.participants.index}.log"
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

    def _group_ports(self, state: ReplicatedState, present: list[int]) -> tuple[list[int], str]:
        """A port of each node for the process group; or why it is not formed."""
        reports = [state.get(f"report/{node}") for node in present]
        agreed = all(isinstance(content, dict) and sorted(content.get("present", [])) == present for content in reports)
        if len(present) < 2 or not agreed:
            return [], "the nodes do not agree on which nodes are present"
        if self._deadline - time.monotonic() < timeouts.DOCTOR_GROUP_NEEDS_SECONDS:
            return [], "no time was left for it; --only group has more"
        subjects = [(state.get(f"here/{node}") or {}).get("subject") for node in present]
        ports = [port for port in subjects if isinstance(port, int)]
        return ports, "" if len(ports) == len(present) else "a node reported no port for it"

    def _examination(self, state: ReplicatedState) -> Examination:
        reports, groups = {}, {}
        for node in sorted(state.nodes("report")):
            try:
                reports[node] = from_json(NodeReport, state.get(f"report/{node}"))
                group = state.get(f"group/{node}")
                if group is not None:
                    groups[node] = from_json(GroupResult, group)
            except ValueError:
                continue  # listed as a node whose report did not arrive
        addresses, index = self.participants.addresses, self.participants.index
        return Examination(addresses, reports, groups, self.participants.ports[index][0])


def _is_mark(text: str) -> bool:
    """It becomes part of a path, and comes from another machine."""
    return text.startswith(measure_apart.MARK) and text.removeprefix(measure_apart.MARK).isalnum()


def _shown(participants: Participants, examined: Examination, findings: list[Finding], seconds: float) -> list[str]:
    """The lowest present node prints everything, the others their own findings."""
    own = examined.host(participants.index)
    if participants.index == min(examined.reports, default=participants.index):
        table = report.matrix(examined)
        return [*report.lines(findings), *([""] if table else []), *table, "", verdict(findings, seconds)]
    mine = [finding.line for finding in findings if finding.level != PASS and own in finding.hosts]
    where = f"the whole report is on {examined.host(min(examined.reports))}"
    return [*mine, f"{verdict(findings, seconds)}; {where}"]
