"""Machine faults: planned ahead from a seed or a list, then injected into the running job."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from fleet_train.errors import WorkerFailed
from tools.soaking.kills import SoakFailed
from tools.soaking.ledger import Ledger
from tools.soaking.nodes import Machines

MACHINE, FROZEN, CUT, RELAY = KINDS = ("machine", "frozen", "cut", "relay")
MEANINGS = {
    MACHINE: "everything on a machine is killed and its disk is empty when it returns",
    FROZEN: "a launcher is stopped (SIGSTOP) and continued later",
    CUT: "a machine's link is taken down and brought up again",
    RELAY: "a launcher, with its relay, is killed and restarted",
}
LEADER = -1
"""The leader at the time of the fault."""
_LONGEST_DELAY_SECONDS = 6.0
# After so long the soak has failed.
_PATIENCE_SECONDS = 240.0
_POLL_SECONDS = 0.1
_WORD = re.compile(rf"(?P<kind>{'|'.join(KINDS)})(:(?:(?P<leader>leader)|(?P<node>\d+)))?(?P<late>:late)?")


@dataclass(frozen=True)
class Timeouts:
    """The launchers' own timeouts in seconds; they determine how long faults last."""

    lost_node: float = 4.0
    rejoin: float = 10.0


@dataclass(frozen=True)
class PlannedFault:
    kind: str
    node: int
    """A machine's number, or LEADER."""
    away_seconds: float
    """From the fault to its end; not used with ``until_gone_on``."""
    until_gone_on: bool
    """It ends only after the others have trained a step without this machine."""
    delay_seconds: float
    """Seconds to wait once all machines train together again."""


def plan_faults(kinds: Sequence[str], count: int, nodes: int, times: Timeouts, seed: int) -> list[PlannedFault]:
    """``count`` faults, each kind equally often (within one), in random order; a third hit the leader, of 3 nodes."""
    chance = random.Random(seed)
    order = [kinds[index % len(kinds)] for index in range(count)]
    chance.shuffle(order)
    return [_drawn(kind, None, nodes, times, chance) for kind in order]


def listed_faults(words: Sequence[str], nodes: int, times: Timeouts, seed: int) -> list[PlannedFault]:
    """Parse a list such as ``machine:0``, ``frozen:leader``, ``cut``, ``cut:2:late``. Raises SoakFailed."""
    chance = random.Random(seed)
    plans = []
    for word in words:
        found = _WORD.fullmatch(word)
        if found is None or int(found["node"] or 0) >= nodes:
            raise SoakFailed(
                f"--faults={word}: write {', '.join(KINDS)}, each with nothing, :leader or :0 to :{nodes - 1}, and "
                "then :late for a machine that returns only when the others have trained on without it"
            )
        node = LEADER if found["leader"] else int(found["node"]) if found["node"] else None
        plan = _drawn(found["kind"], node, nodes, times, chance)
        plans.append(replace(plan, until_gone_on=bool(found["late"])))
    return plans


def _drawn(kind: str, node: int | None, nodes: int, times: Timeouts, chance: random.Random) -> PlannedFault:
    drawn = chance.choice([LEADER, LEADER, 0, *range(nodes)])
    away = {
        MACHINE: chance.uniform(1.0, times.rejoin * 0.6),
        FROZEN: times.lost_node + chance.uniform(1.0, times.rejoin),
        CUT: times.lost_node + chance.uniform(1.0, times.rejoin),
        RELAY: chance.uniform(0.5, times.rejoin * 0.5),
    }[kind]
    until_gone_on = kind != RELAY and chance.random() < 0.25
    delay = chance.uniform(0.5, _LONGEST_DELAY_SECONDS)
    return PlannedFault(kind, drawn if node is None else node, round(away, 2), until_gone_on, round(delay, 2))


class Faults:
    """Injects faults one after the other; ``done`` records what was done and observed."""

    def __init__(self, machines: Machines, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.machines = machines
        self.ledger = ledger
        self.done: list[dict[str, Any]] = []
        self._say = say
        self._strength = len(machines.job.nodes)

    def carry_out(self, plans: Sequence[PlannedFault]) -> None:
        """Raises SoakFailed if the job does not recover, or ends before all faults were injected."""
        self._await_step(time.time(), -1, self._strength, "its first step")
        for number, plan in enumerate(plans, start=1):
            self._pause(plan.delay_seconds)
            fault = self._begin(plan)
            self._say(f"fault {number} of {len(plans)}: {plan.kind}, node {fault['node']}{fault['role']}")
            self.done.append(fault)
            self._end(plan, fault)
            self._note(fault)
            seconds, full = fault["seconds_to_next_step"], fault["seconds_to_full_strength"]
            self._say(
                f"  away for {fault['away_seconds']} s; next step after {seconds} s, all machines again after {full} s "
                f"(attempt {self.ledger.newest_attempt()})"
            )

    def _begin(self, plan: PlannedFault) -> dict[str, Any]:
        leader = self.machines.leader()
        node = leader if plan.node == LEADER else self.machines.job.nodes[plan.node]
        fault = asdict(plan) | {"node": node, "leader": leader, "attempt": self.ledger.newest_attempt()}
        fault |= {"role": " (leads)" if node == leader else "", "time": time.time(), "given_up": 0}
        begin = {
            MACHINE: self.machines.lose,
            FROZEN: self.machines.freeze_launcher,
            CUT: lambda node: self.machines.set_wire(node, "down"),
            RELAY: self.machines.kill_launcher,
        }[plan.kind]
        begin(node)
        return fault

    def _end(self, plan: PlannedFault, fault: dict[str, Any]) -> None:
        if plan.until_gone_on:
            self._await_step(
                fault["time"], fault["attempt"], 1, "a step without the lost machine", without=fault["node"]
            )
        else:
            self._pause(max(0.0, fault["time"] + plan.away_seconds - time.time()), without=fault["node"])
        fault["away_seconds"] = round(time.time() - fault["time"], 1)
        end = {
            MACHINE: self.machines.start,
            FROZEN: self.machines.thaw_launcher,
            CUT: lambda node: self.machines.set_wire(node, "up"),
            RELAY: self.machines.start,
        }[plan.kind]
        end(fault["node"])

    def _note(self, fault: dict[str, Any]) -> None:
        began, attempt = fault["time"], fault["attempt"]
        step = self._await_step(began, attempt, 1, "a step after the fault", service=fault)
        full = self._await_step(began, attempt, self._strength, "a step of all machines", service=fault)
        fault["seconds_to_next_step"] = round(step - began, 1)
        fault["seconds_to_full_strength"] = round(full - began, 1)

    def _await_step(
        self,
        moment: float,
        attempt: int,
        world_size: int,
        what: str,
        without: int | None = None,
        service: dict[str, Any] | None = None,
    ) -> float:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (found := self.ledger.first_step_after(moment, attempt, world_size)) is None:
            if service is not None:
                self._start_again(service)
            self._refuse_ended(without)
            if time.monotonic() > deadline:
                raise SoakFailed(f"the job did not reach {what} within {_PATIENCE_SECONDS:g} s")
            self.machines.leader()
            time.sleep(_POLL_SECONDS)
        return found

    def _pause(self, seconds: float, without: int | None = None) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._refuse_ended(without)
            self.machines.leader()
            time.sleep(min(left, _POLL_SECONDS))

    def _start_again(self, fault: dict[str, Any]) -> None:
        """Restart a launcher that ended because it was cut off, as a service manager would."""
        if self.machines.ended().get(fault["node"]) == WorkerFailed.exit_code:
            fault["given_up"] += 1
            self._say(f"  the launcher of node {fault['node']} gave up and is restarted")
            self.machines.start(fault["node"])

    def _refuse_ended(self, without: int | None) -> None:
        ended = {node: code for node, code in self.machines.ended().items() if node != without}
        if ended:
            raise SoakFailed(f"launchers ended before the last fault: {ended} (node: exit code)")


def recovery_of(faults: Sequence[dict[str, Any]], what: str = "seconds_to_next_step") -> dict[str, float | int]:
    """Recovery in seconds from the start of a fault: how many were measured, median, longest."""
    seconds = [fault[what] for fault in faults if fault.get(what) is not None]
    if not seconds:
        return {"measured": 0}
    return {"measured": len(seconds), "median": round(median(seconds), 1), "longest": max(seconds)}
