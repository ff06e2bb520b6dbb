"""One node's examination from start to end: its own facts, the rendezvous, the network, the exchange of results."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from fleet_train.doctor.facts import Examination, Folder, GroupResult, NodeFacts, NodeReport, from_json, to_json
from fleet_train.doctor.measure import folders, gpus, machine, network, software
from fleet_train.doctor.options import GROUP_NEEDS_SECONDS, GROUP_SECONDS, Options
from fleet_train.doctor.participants import Participants
from fleet_train.doctor.peers.peer_group import PeerGroup
from fleet_train.doctor.peers.replicated_state import ReplicatedState
from fleet_train.doctor.peers.responder import Responder
from fleet_train.selftest.child import free_port

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
        self.mark = f"{folders.MARK}{secrets.token_hex(8)}"
        self._say = say
        self._deadline = time.monotonic() + options.whole_seconds
        self._folders: tuple[Folder, ...] = ()

    def run(self) -> Examination:
        """The results of all nodes; all present nodes return the same, unless one is lost meanwhile."""
        try:
            return self._alone() if self.participants.is_alone else self._among_others()
        finally:
            folders.clean(self._folders, self.mark)

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
            here = network.network(participants.addresses, participants.index, held, participants.is_named, os.environ)
            facts = replace(facts, network=here)
        if "gpus" in asked:
            facts = replace(facts, gpus=gpus.gpus())
        return facts

    def _examine_folders(self) -> tuple[Folder, ...]:
        wanted = {"logs": self.options.log_dir, "output": self.options.output_dir}
        if folders.nearest(self.options.log_dir) == folders.nearest(self.options.output_dir):
            wanted = {"logs and output": self.options.log_dir}
        with ThreadPoolExecutor(len(wanted), "doctor folders") as beside:
            found = [beside.submit(folders.examine, purpose, path, self.mark) for purpose, path in wanted.items()]
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
        peer_group.state.put(f"report/{self.participants.index}", to_json(report))

    def _with_shared_folders(self, state: ReplicatedState, facts: NodeFacts) -> NodeFacts:
        marks = {node: str((state.get(f"here/{node}") or {}).get("mark", "")) for node in state.nodes("here")}
        others = {node: mark for node, mark in marks.items() if node != self.participants.index and _is_mark(mark)}
        shared = tuple(
            replace(folder, shared_with=tuple(sorted(n for n, mark in others.items() if folders.seen(folder, mark))))
            for folder in facts.folders
        )
        return replace(facts, folders=shared)

    def _group(self, peer_group: PeerGroup, present: list[int]) -> None:
        peer_group.state.put(f"group/{self.participants.index}", to_json(self._form(peer_group.state, sorted(present))))

    def _form(self, state: ReplicatedState, present: list[int]) -> GroupResult:
        from fleet_train.doctor.peers.forming import form

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
    return text.startswith(folders.MARK) and text.removeprefix(folders.MARK).isalnum()
