"""Launchers of one job in virtual time, on machines and a network that fail: what `job.step` decides, replayed.

A schedule follows from its seed: attempts that fail, launchers that are killed, frozen or started again, and networks
that are cut. What is true of every schedule is checked on the way (`Broken`), and at its end that nobody waits.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fleet_train.launch import events
from fleet_train.launch import job as jobs
from fleet_train.launch.attempts import Attempt, Kind, RunResult
from fleet_train.launch.election import Heard, Standing, Status, Unheard
from fleet_train.launch.job_state import JobState, Phase
from fleet_train.launch.report import WorkerResult
from fleet_train.launch.request import FaultPolicy

MOST_SECONDS = 3000.0
_JOIN_SECONDS = 30.0


class Broken(AssertionError):
    """What must never happen, in a schedule."""


@dataclass
class Store:
    """The leader's, of one term."""

    owner: int
    term: int
    serial: int
    decision: Any = None
    ready: dict[int, int] = field(default_factory=dict)
    heard_at: dict[int, float] = field(default_factory=dict)


@dataclass
class Launcher:
    """One process of a launcher; ``serial`` tells it from the one that ran on this machine before."""

    job: JobState
    serial: int
    status: Status = field(default_factory=lambda: Status(Standing.FRESH))
    own: Store | None = None
    """Where it is the leader."""
    at: Store | None = None
    """The store that it uses."""
    frozen_until: float = 0.0
    said: list[str] = field(default_factory=list)
    finish: events.Finish | None = None


@dataclass
class Running:
    """An attempt that its launchers meet for, or that runs."""

    store: Store
    attempt: Attempt
    there: dict[int, Launcher] = field(default_factory=dict)
    began: float | None = None


class World:
    """``nodes`` machines; ``faults``: how many happen in the first ``seconds``, several of them at once."""

    def __init__(self, seed: int, nodes: int, policy: FaultPolicy, faults: int, seconds: float = 200.0) -> None:
        self.random = random.Random(seed)
        self.nodes, self.policy = nodes, policy
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._serial = 0
        self.launchers: dict[int, Launcher] = {}
        self.side = [0] * nodes
        """Machines of one side reach one another."""
        self.running: list[Running] = []
        self.elections = 0
        self.done: list[Attempt] = []
        self.trace: list[str] = []
        for node in range(nodes):
            self.after(self.random.uniform(0.0, 3.0), partial(self.start, node))
        burst, apart = self.random.uniform(20.0, seconds), self.random.choice([5.0, 20.0, seconds])
        for _ in range(faults):
            self.after(max(3.0, min(seconds, burst + self.random.uniform(-apart, apart))), self._fault)

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, do))

    def play(self) -> None:
        """To the end. Raises Broken."""
        while self._queue:
            self.now, _, do = heapq.heappop(self._queue)
            if self.now > MOST_SECONDS:
                waiting = {node: each.job.phase.name for node, each in self.alive().items()}
                raise Broken(f"somebody waits without end: {waiting}")
            do()
        if left := self.alive():
            raise Broken(f"nothing wakes {sorted(left)}")

    def alive(self) -> dict[int, Launcher]:
        return {node: each for node, each in self.launchers.items() if each.finish is None}

    # The machines.

    def start(self, node: int) -> None:
        if node in self.alive():
            return
        self._serial += 1
        state = JobState(node, self.nodes, self.policy, _JOIN_SECONDS, lambda each: f"node {each}")
        launcher = self.launchers[node] = Launcher(state, self._serial)
        self._take(launcher, *jobs.first(state, self.now))

    def kill(self, node: int) -> None:
        launcher = self.launchers.pop(node, None)
        if launcher is not None:
            self._lose(launcher)

    def _lose(self, launcher: Launcher) -> None:
        """Its store and its connections are gone."""
        for running in self.running:
            if running.there.get(launcher.job.me) is launcher:
                del running.there[launcher.job.me]
                if running.began is not None:
                    self.after(self.random.uniform(0.1, 3.0), partial(self._fail, running))

    def reaches(self, one: int, other: int) -> bool:
        return self.side[one] == self.side[other]

    def _fault(self) -> None:
        node = self.random.randrange(self.nodes)
        kind = self.random.choice(["kill", "kill and start", "freeze", "freeze", "cut", "cut", "fail"])
        self.trace.append(f"{self.now:.1f} {kind} {node}")
        if kind.startswith("kill"):
            self.kill(node)
            if kind == "kill and start":
                self.after(self.random.uniform(0.5, 20.0), lambda: self.start(node))
        elif kind == "freeze" and node in self.launchers:
            self.launchers[node].frozen_until = self.now + self.random.choice([5.0, 60.0, 200.0]) * self.random.random()
        elif kind == "cut":
            self.side = [self.random.randrange(2) for _ in range(self.nodes)]
            for running in list(self.running):
                if running.began is not None and len({self.side[each] for each in running.there}) > 1:
                    self.after(self.policy.lost_node_timeout_seconds, partial(self._cut, running))
            self.after(self.random.choice([10.0, 60.0, 200.0]) * self.random.random(), self._heal)
        else:
            for running in self.running:
                if running.began is not None:
                    self._fail(running)

    def _heal(self) -> None:
        self.side = [0] * self.nodes

    # The actions of a launcher.

    def _take(self, launcher: Launcher, state: JobState, actions: list[events.Action]) -> None:
        launcher.job = state
        for action in actions:
            match action:
                case events.Say(text):
                    launcher.said.append(f"{self.now:.1f} {text}")
                    self.trace.append(f"{self.now:.1f} node {state.me}: {text}")
                case events.Publish(status):
                    launcher.status = status
                case events.Write(decision):
                    if launcher.own is not None:
                        launcher.own.decision = decision
                case events.Finish():
                    launcher.finish = action
                    self.trace.append(f"{self.now:.1f} node {state.me} ends: {action.why.name} {action.message}")
                    self._leave(launcher)
                case _:
                    self._wait(launcher, action)

    def _leave(self, launcher: Launcher) -> None:
        """The leader keeps its store for a while."""
        me, serial = launcher.job.me, launcher.serial

        def gone() -> None:
            if me in self.launchers and self.launchers[me].serial == serial:
                del self.launchers[me]

        self.after(12.0, gone)

    def _event(self, launcher: Launcher, seconds: float, make: Callable[[], events.Event | None]) -> None:
        """The event that comes of an action, unless the process has ended by then; a frozen one gets it later."""

        def happen() -> None:
            if self.launchers.get(launcher.job.me) is not launcher or launcher.finish is not None:
                return
            if self.now < launcher.frozen_until:
                self.after(launcher.frozen_until - self.now + 0.01, happen)
                return
            event = make()
            if event is not None:
                self._take(launcher, *jobs.step(launcher.job, event))

        self.after(seconds, happen)

    def _wait(self, launcher: Launcher, action: events.Action) -> None:
        me, draw = launcher.job.me, self.random
        match action:
            case events.Wait(seconds):
                self._event(launcher, seconds, lambda: events.Woken(self.now))
            case events.Ask(nodes):
                self._event(launcher, draw.uniform(0.01, 1.1), lambda: events.Answered(self.now, self._hear(me, nodes)))
            case events.Lead(term):
                self._lead(launcher, term)
                self._event(launcher, 0.01, lambda: events.Connected(self.now))
            case events.Follow(leader, term, deadline):
                self._follow(launcher, leader, term, deadline)
            case events.Look():
                self._event(launcher, draw.uniform(0.01, 0.2), lambda: self._see(launcher, action))
            case events.Run(attempt):
                self._run(launcher, attempt)

    def _hear(self, me: int, nodes: tuple[int, ...]) -> Heard:
        heard: dict[int, Status | Unheard] = {}
        for node in nodes:
            other = self.launchers.get(node)
            if not self.reaches(me, node) or (other is not None and self.now < other.frozen_until):
                heard[node] = Unheard.SILENT
            else:
                heard[node] = Unheard.DEAD if other is None else other.status
        return heard

    def _lead(self, launcher: Launcher, term: int) -> None:
        me = launcher.job.me
        rivals = [node for node, each in self.alive().items() if node != me and each.own and each.own.term == term > 0]
        if rivals:
            raise Broken(f"nodes {rivals[0]} and {me} both lead term {term}")
        self.elections += term > 0
        launcher.own = launcher.at = Store(me, term, launcher.serial)

    def _store_of(self, me: int, leader: int, term: int) -> Store | None:
        other = self.launchers.get(leader)
        if other is None or other.own is None or other.own.term != term or not self.reaches(me, leader):
            return None
        return None if self.now < other.frozen_until else other.own

    def _follow(self, launcher: Launcher, leader: int, term: int, deadline: float) -> None:
        me = launcher.job.me

        def attempt() -> events.Event | None:
            store = self._store_of(me, leader, term)
            if store is not None:
                launcher.own, launcher.at = None, store
                store.heard_at[me] = self.now
                return events.Connected(self.now)
            if self.now >= deadline:
                return events.Connected(self.now, connected=False)
            self._event(launcher, min(0.5, max(0.01, deadline - self.now)), attempt)
            return None

        self._event(launcher, 0.05, attempt)

    def _see(self, launcher: Launcher, look: events.Look) -> events.Event | None:
        me, at = launcher.job.me, launcher.at
        if at is None:
            return events.StoreSeen(self.now, lost=True)
        if at is launcher.own:
            here = [node for node in at.ready if self._is_connected(at, node)]
            ready = frozenset(node for node in here if look.here is not None and at.ready[node] >= look.here)
            return events.StoreSeen(self.now, at.decision, ready)
        if self._store_of(me, at.owner, at.term) is not at:
            leader = self.launchers.get(at.owner)
            is_silent = leader is not None and leader.own is at
            if is_silent and self.now < at.heard_at.get(me, 0.0) + self.policy.lost_node_timeout_seconds:
                self._event(launcher, 0.5, lambda: self._see(launcher, look))
                return None
            return events.StoreSeen(self.now, lost=True)
        at.heard_at[me] = self.now
        if look.ready is not None:
            at.ready[me] = look.ready
        return events.StoreSeen(self.now, at.decision)

    def _is_connected(self, store: Store, node: int) -> bool:
        other = self.launchers.get(node)
        return other is not None and other.finish is None and other.at is store and self.reaches(store.owner, node)

    # Attempts.

    def _run(self, launcher: Launcher, attempt: Attempt) -> None:
        assert launcher.at is not None
        meeting = next(
            (
                each
                for each in self.running
                if each.store is launcher.at and each.attempt.round == attempt.round and each.began is None
            ),
            None,
        )
        if meeting is None:
            meeting = Running(launcher.at, attempt)
            self.running.append(meeting)
        meeting.there[launcher.job.me] = launcher
        number = max(attempt.number, meeting.attempt.number)
        meeting.attempt = Attempt(attempt.round, number, meeting.attempt.nodes)
        if set(meeting.there) == set(attempt.nodes):
            self._begin(meeting)
        else:
            self.after(_JOIN_SECONDS, lambda: self._give_up(meeting))

    def _begin(self, running: Running) -> None:
        others = [each for each in self.running if each is not running and each.began is not None]
        for other in others:
            if any(each.job.phase is Phase.RUNNING for each in other.there.values()):
                raise Broken(f"{other.attempt} and {running.attempt} run at the same time")
        running.began = self.now
        for launcher in running.there.values():
            state, actions = jobs.begun(launcher.job, running.attempt)
            self._take(launcher, state, actions)
        seconds = self.random.expovariate(1 / 40.0)
        ends_well = self.random.random() < 0.1
        self.after(seconds, lambda: self._end(running, ends_well))

    def _give_up(self, running: Running) -> None:
        if running.began is None and running in self.running:
            self.running.remove(running)
            for launcher in running.there.values():
                if running.attempt.number == 0:  # the job has never begun: its launchers end with an error
                    self._event(launcher, 0.0, partial(self._take_error, launcher))
                else:
                    self._deliver(launcher, running, _failed("some node did not connect"))

    def _take_error(self, launcher: Launcher) -> None:
        launcher.finish = events.Finish(events.Why.NO_ANSWER, "the first attempt did not begin")
        self._leave(launcher)

    def _end(self, running: Running, ends_well: bool) -> None:
        if running not in self.running:
            return
        if not ends_well:
            self._fail(running)
            return
        self.running.remove(running)
        self.done.append(running.attempt)
        for launcher in running.there.values():
            self._deliver(launcher, running, RunResult(Kind.DONE, 0))

    def _fail(self, running: Running) -> None:
        """A rank has failed, or a launcher was lost: those that are left learn of it."""
        if running not in self.running:
            return
        self.running.remove(running)
        for node, launcher in running.there.items():
            is_lost = self._store_of(node, running.store.owner, running.store.term) is not running.store
            killed = WorkerResult(0, "", 0, None, 9, self.random.uniform(1.0, 9.0), False, "log")
            result = (
                _failed("the leader was lost", store_lost=True)
                if is_lost
                else RunResult(Kind.FAILED, 137, root_cause=killed)
            )
            self._deliver(launcher, running, result)

    def _cut(self, running: Running) -> None:
        if running in self.running and len({self.side[each] for each in running.there}) > 1:
            self._fail(running)

    def _deliver(self, launcher: Launcher, running: Running, result: RunResult) -> None:
        self._event(launcher, self.random.uniform(0.1, 2.0), lambda: events.Ended(self.now, running.attempt, result))


def _failed(message: str, *, store_lost: bool = False) -> RunResult:
    return RunResult(Kind.FAILED, 11, message, without_root_cause=True, store_lost=store_lost)


def replay(seed: int) -> World:
    """One schedule, to its end. Raises Broken."""
    draw = random.Random(f"policy {seed}")
    nodes = draw.choice([1, 2, 3, 3, 3, 4, 5])
    policy = FaultPolicy(
        max_restarts=draw.choice([0, 1, 10, 10, 10]),
        min_nodes=draw.choice([None, 1, 1, 2]) if nodes > 1 else None,
        rejoin_timeout_seconds=draw.choice([5.0, 30.0, 100.0]),
        lost_node_timeout_seconds=draw.choice([2.0, 20.0]),
    )
    world = World(seed, nodes, policy, draw.randrange(0, 10))
    try:
        world.play()
    except Exception as error:
        trace = "\n".join(world.trace)
        raise Broken(f"schedule {seed}, {nodes} nodes, {policy}: {type(error).__name__}: {error}\n{trace}") from error
    return world


if __name__ == "__main__":
    import sys

    first, last = int(sys.argv[1]), int(sys.argv[2])
    broken: list[str] = []
    for seed in range(first, last):
        try:
            replay(seed)
        except Broken as error:
            broken.append(str(error))
    print(f"{last - first} schedules, {len(broken)} broken")
    print("\n\n".join(sorted(broken, key=len)[:2]))
