"""Faults: planned ahead from a seed or a list, then injected into the running job."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

from fleet_train.errors import WorkerFailed
from tools.soaking.job import Running, SoakFailed, send
from tools.soaking.ledger import Ledger

OF_RANKS = {
    "step": "a rank is killed in a step, or between two",
    "save": "a rank is killed while a checkpoint is written",
    "start": "a rank is killed while the job starts again",
    "freeze": "a rank is stopped (SIGSTOP) for up to 5 s and continued",
}
OF_MACHINES = {
    "machine": "everything on a machine is killed and its disk is empty when it returns",
    "frozen": "a launcher is stopped (SIGSTOP) and continued later",
    "cut": "a machine's link is taken down and brought up again",
    "relay": "a launcher, with its relay, is killed and restarted",
}
KINDS = OF_RANKS | OF_MACHINES
LEADER = -1
"""The leader at the time of the fault."""
LOST_NODE_SECONDS, REJOIN_SECONDS = 4.0, 10.0
"""The launchers' own timeouts; they determine how long faults last."""
_LONGEST_DELAY_SECONDS = {"step": 3.0, "save": 0.01, "start": 6.0, "freeze": 3.0}
_AWAY_SECONDS = {
    "freeze": (0.1, 5.0),
    "machine": (1.0, REJOIN_SECONDS * 0.6),
    "frozen": (LOST_NODE_SECONDS + 1.0, LOST_NODE_SECONDS + REJOIN_SECONDS),
    "cut": (LOST_NODE_SECONDS + 1.0, LOST_NODE_SECONDS + REJOIN_SECONDS),
    "relay": (0.5, REJOIN_SECONDS * 0.5),
}
# After so long the soak has failed.
_PATIENCE_SECONDS = 240.0
_POLL_SECONDS = 0.1
_WORD = re.compile(rf"(?P<kind>{'|'.join(KINDS)})(:(?:(?P<leader>leader)|(?P<victim>\d+)))?(?P<late>:late)?")


@dataclass(frozen=True)
class PlannedFault:
    """``victim``: a machine's number, or LEADER; of OF_RANKS a rank. ``away_seconds``: from the fault to its end.
    ``until_gone_on``: it ends instead when the others have trained a step without this machine. ``delay_seconds``: to
    wait once all machines train together again."""

    kind: str
    victim: int
    away_seconds: float
    until_gone_on: bool
    delay_seconds: float


def launch_flags(plans: Sequence[PlannedFault]) -> tuple[str, ...]:
    flags = f"--max_restarts={2 * len(plans)} --job_id=soak"
    if any(plan.kind in OF_MACHINES for plan in plans):
        flags += f" --min_nodes=2 --lost_node_timeout={LOST_NODE_SECONDS:g} --rejoin_timeout={REJOIN_SECONDS:g}"
        flags += " --direct_ranks=0"
    return tuple(flags.split())


def plan_faults(words: Sequence[str], count: int | None, nodes: int, ranks: int, seed: int) -> list[PlannedFault]:
    """Faults such as ``machine:0``, ``frozen:leader``, ``cut:2:late``, ``save``, in the order of the list. With
    ``count``, so many of their kinds, each equally often (within one), in random order. Raises SoakFailed."""
    chance, matches = random.Random(seed), []
    for word in words:
        match = _WORD.fullmatch(word)
        if match is None or int(match["victim"] or 0) >= (ranks if match["kind"] in OF_RANKS else nodes):
            raise SoakFailed(
                f"--faults={word}: write {', '.join(KINDS)}, each with nothing, :leader or a number of a node (of a "
                f"rank: {', '.join(OF_RANKS)}), then :late for a machine that returns when the others have trained on"
            )
        matches.append(match)
    if count is not None:
        order = [matches[index % len(matches)]["kind"] for index in range(count)]
        chance.shuffle(order)
        return [_drawn(kind, nodes, ranks, chance) for kind in order]
    plans = []
    for match in matches:
        plan = replace(_drawn(match["kind"], nodes, ranks, chance), until_gone_on=bool(match["late"]))
        named = LEADER if match["leader"] else int(match["victim"]) if match["victim"] else plan.victim
        plans.append(replace(plan, victim=named))
    return plans


def _drawn(kind: str, nodes: int, ranks: int, chance: random.Random) -> PlannedFault:
    away = round(chance.uniform(*_AWAY_SECONDS.get(kind, (0.0, 0.0))), 2)
    if kind in OF_RANKS:
        # Rank 0 is the one that writes.
        victim = 0 if kind == "save" and chance.random() < 0.5 else chance.randrange(ranks)
        return PlannedFault(kind, victim, away, False, round(chance.uniform(0.0, _LONGEST_DELAY_SECONDS[kind]), 4))
    victim = chance.choice([LEADER, LEADER, 0, *range(nodes)])
    until_gone_on = kind != "relay" and chance.random() < 0.25
    return PlannedFault(kind, victim, away, until_gone_on, round(chance.uniform(0.5, 6.0), 2))


class Faults:
    """Injects faults one after the other; ``done`` records what was done and observed."""

    def __init__(self, running: Running, ledger: Ledger, say: Callable[[str], None]) -> None:
        self.running, self.ledger, self._say = running, ledger, say
        self.done: list[dict[str, Any]] = []

    def carry_out(self, plans: Sequence[PlannedFault]) -> None:
        """Raises SoakFailed if the job does not recover, or ends before all faults were injected."""
        strength = self.running.job.world_size
        self._await_step(time.time(), -1, strength, "its first step")
        for number, plan in enumerate(plans, start=1):
            fault = self._of_a_rank(plan) if plan.kind in OF_RANKS else self._of_a_machine(plan)
            began, attempt = fault["time"], fault["attempt"]
            fault["away_seconds"] = round(time.time() - began, 1)
            # A rank that was only stopped trains on, in the same attempt.
            moment, attempt = (time.time(), attempt - 1) if plan.kind == "freeze" else (began, attempt)
            for name, world_size in (("seconds_to_next_step", 1), ("seconds_to_full_strength", strength)):
                step = self._await_step(moment, attempt, world_size, "a step after the fault", restarted=fault)
                fault[name] = round(step - began, 1)
            self.done.append(fault)
            self._say(
                f"fault {number} of {len(plans)}: {plan.kind}, {fault['victim']}{fault['role']}, next step after "
                f"{fault['seconds_to_next_step']} s (attempt {self.ledger.newest_attempt()})"
            )

    def _begun(self, plan: PlannedFault, victim: int, leader: int) -> dict[str, Any]:
        what = asdict(plan) | {"victim": victim, "leader": leader, "attempt": self.ledger.newest_attempt()}
        role = " (leads)" if victim == leader and plan.kind in OF_MACHINES else ""
        return what | {"role": role, "time": time.time(), "given_up": 0, "checkpoint_under_way": self._draft()}

    def _draft(self) -> str | None:
        """What is being written now; those that a fault has ended may still be there."""
        return self.running.draft(self.done[-1]["time"] + 1.0 if self.done else 0.0)

    def _of_a_rank(self, plan: PlannedFault) -> dict[str, Any]:
        # Every attempt saves before it is disturbed, so that the job makes progress.
        self._await(self.ledger.newest_attempt_has_saved, "its first checkpoint")
        if plan.kind == "start":  # of the next attempt: this one is ended first
            self._kill(0)
            self._await(lambda: len(self.running.rank_pids()) == self.running.job.world_size, "its start")
        elif plan.kind == "save":
            self._await(lambda: self._draft() is not None, "a checkpoint", 0.0005)
        time.sleep(plan.delay_seconds)
        fault = self._begun(plan, plan.victim, self.running.leader())
        if plan.kind != "freeze":
            self._kill(plan.victim)
            return fault
        pid = self._pid(plan.victim)
        send(pid, signal.SIGSTOP)
        try:
            time.sleep(plan.away_seconds)
        finally:
            send(pid, signal.SIGCONT)
        return fault

    def _pid(self, rank: int) -> int:
        self._await(lambda: rank in self.running.rank_pids(), f"its start of rank {rank}")
        return self.running.rank_pids()[rank]

    def _kill(self, rank: int) -> None:
        pid = self._pid(rank)
        send(pid, signal.SIGKILL)
        self._await(lambda: self.running.rank_pids().get(rank) != pid, f"the end of rank {rank}")

    def _of_a_machine(self, plan: PlannedFault) -> dict[str, Any]:
        self._pause(plan.delay_seconds)
        leader, running = self.running.leader(), self.running
        node = leader if plan.victim == LEADER else running.job.nodes[plan.victim]
        both: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "machine": (lambda: running.lose(node), lambda: running.start(node)),
            "frozen": (lambda: running.signal(node, signal.SIGSTOP), lambda: running.signal(node, signal.SIGCONT)),
            "cut": (lambda: running.set_link(node, "down"), lambda: running.set_link(node, "up")),
            "relay": (lambda: running.kill_launcher(node), lambda: running.start(node)),
        }
        begin, end = both[plan.kind]
        fault = self._begun(plan, node, leader)
        begin()
        if plan.until_gone_on:
            self._await_step(fault["time"], fault["attempt"], 1, "a step without the lost machine", without=node)
        else:
            self._pause(max(0.0, fault["time"] + plan.away_seconds - time.time()), without=node)
        end()
        return fault

    def _await_step(
        self, moment: float, attempt: int, world_size: int, what: str, without: int | None = None,
        restarted: dict[str, Any] | None = None,
    ) -> float:  # fmt: skip
        def has_trained() -> bool:
            self.running.leader()
            is_there = self.ledger.first_step_after(moment, attempt, world_size) is not None
            if not is_there and restarted is not None:
                self._start_again(restarted)
            return is_there

        self._await(has_trained, what, without=without)
        return self.ledger.first_step_after(moment, attempt, world_size) or 0.0

    def _await(
        self, condition: Callable[[], bool], what: str, pause_seconds: float = _POLL_SECONDS, without: int | None = None
    ) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not condition():
            self._refuse_ended(without)
            if time.monotonic() > deadline:
                raise SoakFailed(f"the job did not reach {what} within {_PATIENCE_SECONDS:g} s")
            time.sleep(pause_seconds)

    def _pause(self, seconds: float, without: int | None = None) -> None:
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._refuse_ended(without)
            self.running.leader()
            time.sleep(min(left, _POLL_SECONDS))

    def _start_again(self, fault: dict[str, Any]) -> None:
        """Restart a launcher that ended because it was cut off, as a service manager would."""
        node = fault["victim"]
        if fault["kind"] in OF_MACHINES and self.running.ended().get(node) == WorkerFailed.exit_code:
            fault["given_up"] += 1
            self._say(f"  the launcher of node {node} gave up and is restarted")
            self.running.start(node)

    def _refuse_ended(self, without: int | None) -> None:
        ended = {node: code for node, code in self.running.ended().items() if node != without}
        if ended:
            raise SoakFailed(f"launchers ended before the last fault: {ended} (node: exit code)")


def recovery_of(faults: Sequence[dict[str, Any]], what: str = "seconds_to_next_step") -> dict[str, float | int]:
    """Recovery in seconds from the start of a fault: how many were measured, median, longest."""
    seconds = [fault[what] for fault in faults if fault.get(what) is not None]
    if not seconds:
        return {"measured": 0}
    return {"measured": len(seconds), "median": round(median(seconds), 1), "longest": max(seconds)}
