"""Between two attempts: node 0 decides whether there is another one, and with which nodes; the others wait for it."""

from __future__ import annotations

import time
from typing import Any

from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout, WorkerFailed
from fleet_train.launch.meeting import Facts, Say, refuse_differences
from fleet_train.launch.report import counted, headline
from fleet_train.launch.request import FaultPolicy
from fleet_train.launch.restart import Attempt, Kind, Outcome, pause_seconds, why_not_again
from fleet_train.launch.roster import Roster

_POLL_SECONDS = 0.2
_SAY_EVERY_SECONDS = 10.0
# What node 0 may need beside waiting for nodes: ending its ranks, hearing how the others ended, the pause.
_NODE_0_IS_BUSY_SECONDS = 40.0


class JobEnded(Exception):
    """Node 0 has ended the job while this launcher waited to be taken in."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Council:
    """This launcher's part in deciding what comes next."""

    def __init__(self, roster: Roster, policy: FaultPolicy, facts: Facts, say: Say) -> None:
        self.roster = roster
        self.policy = policy
        self._facts = facts
        self._say = say
        self._earlier: list[Outcome] = []
        self._last_word = ""
        self._takes_part = False
        self._every_node = tuple(range(len(roster.node.addresses)))

    # the first attempt

    def first(self) -> Attempt:
        """All nodes, from the beginning; or, when the job is at work already, the attempt that takes this node in.

        Raises ScheduleMismatch when this launcher was started differently, JobEnded when the job ends before that.
        """
        order = self.roster.order()
        if order is None:
            return Attempt(0, 0, self._every_node)
        if self.policy.max_restarts == 0:
            raise ClusterError(
                f"the job of {self.roster.node.store_endpoint} has begun without this launcher of "
                f"{self.roster.node.describe()}; end it first, or choose another --started_port (a launcher can join "
                "a job that is at work when all are started with --max_restarts)"
            )
        refuse_differences(self.roster.node, self._facts, 0, self.roster.facts())
        self._say(f"the job is at work; {self.roster.node.describe()} is taken in when it next restarts")
        return self._await_order(int(order.get("scope", 0)), deadline=None)

    def begun(self, attempt: Attempt) -> None:
        """All nodes of the attempt have met; after the first one, who comes later has to wait for the next."""
        self._takes_part = True
        if self.roster.node.index == 0 and attempt.scope == 0:
            self.roster.set_facts(self._facts)
            self.roster.give({"scope": attempt.scope, "nodes": list(attempt.nodes)})

    # every next one

    def newcomers(self, attempt: Attempt) -> str | None:
        """Node 0 asks while ranks run on fewer nodes than the job has: who has come back since."""
        if self.roster.node.index != 0 or len(attempt.nodes) == len(self._every_node):
            return None
        new = sorted(self.roster.here(attempt.scope + 1) - set(attempt.nodes))
        return f"{', '.join(map(self.roster.node.describe, new))} can be taken in again" if new else None

    def next(self, attempt: Attempt, outcome: Outcome) -> Attempt | None:
        """The attempt after this one; None when this outcome is the job's."""
        if self.policy.max_restarts == 0 or outcome.kind in (Kind.DONE, Kind.PREEMPTED) or outcome.final:
            return None
        if self.roster.node.index == 0:
            return self._lead(attempt, outcome)
        return self._follow(attempt, outcome)

    def end(self, outcome: Outcome) -> None:
        """Node 0 tells launchers that wait how the job has ended."""
        if self.roster.node.index == 0:
            self.roster.give({"end": outcome.exit_code, "message": self._last_word or outcome.kind.value})

    def stop(self, exit_code: int, message: str) -> None:
        """This launcher is stopped on purpose while no rank is running: the job, if it has part in it, is to end."""
        if self.roster.node.index == 0:
            self.roster.give({"end": exit_code, "message": message})
        elif self._takes_part:
            self.roster.stop(exit_code, message)

    def _no_more(self, why: str) -> None:
        self._last_word = f"not restarted: {why}"
        self._say(self._last_word)

    def _lead(self, attempt: Attempt, outcome: Outcome) -> Attempt | None:
        if outcome.kind is Kind.FAILED and not self._tries_again(attempt, outcome):
            return None
        nodes = self._await_nodes(attempt)
        if nodes is None:
            return None
        following = Attempt(attempt.scope + 1, attempt.number + 1, nodes)
        self.roster.give({"scope": following.scope, "nodes": list(nodes)})
        return following

    def _tries_again(self, attempt: Attempt, outcome: Outcome) -> bool:
        why = why_not_again(outcome, self._earlier, self.policy)
        if why is not None:
            if why:
                self._no_more(why)
            return False
        self._earlier.append(outcome)
        restart, pause = len(self._earlier), pause_seconds(len(self._earlier))
        self._say(f"{what_failed(attempt, outcome)}; restart {restart} of {self.policy.max_restarts} in {pause:g} s")
        time.sleep(pause)
        return True

    def _await_nodes(self, attempt: Attempt) -> tuple[int, ...] | None:
        """Those who take part next, or None when too few came back. Waits for the nodes of the attempt that failed."""
        began, word_at = time.monotonic(), time.monotonic() + 2.0
        timeout = self.policy.rejoin_timeout_seconds
        needed = self.policy.min_nodes or len(self._every_node)
        while True:
            here = self.roster.here(attempt.scope + 1)
            missing = set(attempt.nodes) - here
            if not missing and len(here) >= needed:
                return tuple(sorted(here))
            away = ", ".join(map(self.roster.node.describe, sorted(missing or set(self._every_node) - here)))
            waited = time.monotonic() - began
            if (order := self.roster.stopped()) is not None:
                self._no_more(str(order["message"]))
                return None
            if waited > timeout and len(here) >= needed:
                self._say(f"{away} did not come back within {timeout:g} s (--rejoin_timeout); going on without")
                return tuple(sorted(here))
            if waited > timeout:
                self._no_more(
                    f"{away} did not come back within {timeout:g} s (--rejoin_timeout), and {counted(needed, 'node')} "
                    "are needed (--min_nodes)"
                )
                return None
            if time.monotonic() > word_at:
                self._say(f"waiting for {away} to come back ({timeout - waited:.0f} s more, --rejoin_timeout)")
                word_at = time.monotonic() + _SAY_EVERY_SECONDS
            time.sleep(_POLL_SECONDS)

    def _follow(self, attempt: Attempt, outcome: Outcome) -> Attempt | None:
        self._say(f"{what_failed(attempt, outcome)}; waiting for the word of {self.roster.node.describe(0)}")
        patience = self.policy.rejoin_timeout_seconds + _NODE_0_IS_BUSY_SECONDS
        try:
            if outcome.store_lost or not self._is_seated(attempt.scope + 1):
                return self._again_from(attempt)
            return self._await_order(attempt.scope, time.monotonic() + patience, attempt.number)
        except WorkerFailed:
            return self._again_from(attempt)
        except JobEnded as end:
            if str(end) and end.exit_code:
                self._say(f"{self.roster.node.describe(0)} has ended the job: {end}")
            return None

    def _is_seated(self, scope: int) -> bool:
        """Whether the store still knows us; on the way there we say what we are ready for."""
        try:
            self.roster.ready_for(scope)
            return True
        except FleetTrainError:
            return False

    def _again_from(self, attempt: Attempt) -> Attempt | None:
        """Reconnect: to the same store after our network was away, or to that of a new launcher of node 0."""
        timeout = self.policy.rejoin_timeout_seconds
        self._say(
            f"{self.roster.node.describe(0)}, whose launcher hosts the job store, cannot be reached; waiting for it "
            f"to come back, or for its launcher to be started again ({timeout:g} s, --rejoin_timeout)"
        )
        try:
            self.roster.reconnect(timeout)
            order = self.roster.order()
            if order is None:  # a new store: the job begins again there, after what was trained already
                return Attempt(0, attempt.number + 1, self._every_node)
            last = int(order.get("scope", attempt.scope))
            return self._await_order(max(last, attempt.scope), None, attempt.number)
        except (JoinTimeout, ClusterError, WorkerFailed) as error:
            self._say(f"not restarted: {error}")
            return None

    def _await_order(self, scope: int, deadline: float | None, number: int = 0) -> Attempt:
        """The first attempt after ``scope`` that this node takes part in. Raises JobEnded."""
        self.roster.ready_for(scope + 1)
        while deadline is None or time.monotonic() < deadline:
            order: dict[str, Any] = self.roster.order() or {}
            if "end" in order:
                raise JobEnded(int(order["end"]), str(order["message"]))
            if order.get("scope", scope) > scope:
                scope = int(order["scope"])
                if self.roster.node.index in order["nodes"]:
                    # Our number is a proposal: the highest that any node knows will count.
                    return Attempt(scope, number + 1, tuple(order["nodes"]))
                self._say("the job goes on without this node, which is taken in when it next restarts")
                self.roster.ready_for(scope + 1)
                deadline = None  # as long as node 0 keeps the store
            time.sleep(_POLL_SECONDS)
        raise JobEnded(WorkerFailed.exit_code, f"{self.roster.node.describe(0)} has not said how to go on")


def what_failed(attempt: Attempt, outcome: Outcome) -> str:
    """One line for a failed attempt: ``attempt 0: rank 1 (10.0.0.2:6170) failed first: exit code 1 after 3 s``."""
    if outcome.kind is Kind.FAILED and outcome.culprit is not None and not outcome.without_culprit:
        return f"attempt {attempt.number}: {headline(outcome.culprit)}"
    return f"attempt {attempt.number}: {outcome.message}"
