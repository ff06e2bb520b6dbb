"""Between two attempts: the leader decides whether there is another one, and with which nodes; the others wait.

How one attempt ended (`RunResult`), and whether another one makes sense (`why_not_again`), is data and pure functions.
"""

from __future__ import annotations

import re
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fleet_train import timeouts
from fleet_train.errors import MISTAKES, ClusterError, FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed
from fleet_train.launch.membership import Membership
from fleet_train.launch.rendezvous import Facts, refuse_other_launcher
from fleet_train.launch.report import WorkerResult, counted, headline
from fleet_train.launch.request import FaultPolicy
from fleet_train.log import logger


class _OtherLeads(Exception):
    """While this launcher waited for nodes, they followed another leader."""


class JobEnded(Exception):
    """The leader ended the job while this launcher waited to join."""

    def __init__(self, exit_code: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Coordinator:
    """This launcher's part in deciding about the next attempt."""

    def __init__(self, membership: Membership, policy: FaultPolicy, facts: Facts, run: str = "") -> None:
        self.membership = membership
        self.policy = policy
        self._facts = facts
        self._earlier: list[RunResult] = []
        self._restarts = 0
        self.launched = run or secrets.token_hex(8)
        """A unique identifier of this launch of the job: the leader's at the first attempt."""
        self._last_word = ""
        self._takes_part = False
        self._every_node = tuple(range(len(membership.node.addresses)))

    # the first attempt

    def first(self) -> Attempt:
        """All nodes, at the start; or, if the job is already running, the attempt that this node joins.

        Raises ScheduleMismatch when this launcher was started differently, JobEnded when the job ends before that.
        """
        decision = self.membership.decision()
        if decision is None:
            return Attempt(0, 0, self._every_node)
        if self.policy.max_restarts == 0:
            raise ClusterError(
                f"the job of {self.membership.node.store_endpoint} started without this launcher of "
                f"{self.membership.node.describe()}; end it first, or choose another --started_port (a launcher can "
                "join a running job if all are started with --max_restarts)"
            )
        refuse_other_launcher(self.membership.node, self._facts, self.membership.leader, self.membership.facts())
        logger.info(f"the job is running; {self.membership.node.describe()} joins at the next restart")
        while True:
            try:
                return self._await_decision(int(decision.get("round", 0)), deadline=None)
            except WorkerFailed:
                logger.info(f"{self._lost_leader()}; waiting for another leader")
                self.membership.wait_for_leader(self.policy.rejoin_timeout_seconds)

    def _lost_leader(self) -> str:
        leader = self.membership.node.describe(self.membership.leader)
        return f"the launcher of {leader}, the leader of the job, cannot be reached"

    def begun(self, attempt: Attempt) -> None:
        """All nodes of the attempt are connected; from the first attempt on, later ones wait for the next attempt."""
        self._takes_part = True
        if self.membership.is_leader and attempt.round == 0:
            self.membership.set_facts(self._facts)
            self._decide(attempt)

    def _decide(self, attempt: Attempt) -> None:
        """``restarts``: how many there have been, so that a new leader continues the count."""
        decision = {"round": attempt.round, "nodes": list(attempt.nodes), "restarts": self._restarts}
        self.membership.decide(decision)

    # every next one

    def waiting_nodes(self, attempt: Attempt) -> str | None:
        """Called by the leader while ranks run on fewer nodes than the job has: which nodes have come back."""
        if not self.membership.is_leader or len(attempt.nodes) == len(self._every_node):
            return None
        new = sorted(self.membership.here(attempt.round + 1) - set(attempt.nodes))
        return f"{', '.join(map(self.membership.node.describe, new))} can join again" if new else None

    def next(self, attempt: Attempt, result: RunResult) -> Attempt | None:
        """The attempt after this one; None if this result is the job's."""
        if self.policy.max_restarts == 0 or result.kind in (Kind.DONE, Kind.PREEMPTED) or result.final:
            return None
        if self.membership.is_leader and not self._gives_way(attempt):
            following = self._lead(attempt, result)
        else:
            following = self._follow(attempt, result)
        self._earlier.append(result)
        return following

    def _gives_way(self, attempt: Attempt) -> bool:
        """Whether the others follow a new leader: this one was frozen, or cut off from them."""
        if len(attempt.nodes) == 1 or not self.membership.gives_way():
            return False
        leader = self.membership.node.describe(self.membership.leader)
        logger.info(f"this launcher was unreachable for too long; {leader} is the leader now")
        return True

    def end(self, result: RunResult) -> None:
        """The leader reports to waiting launchers how the job ended."""
        if self.membership.is_leader:
            self.membership.decide({"end": result.exit_code, "message": self._last_word or result.kind.value})

    def stop(self, exit_code: int, message: str) -> None:
        """This launcher is stopped on purpose while no rank is running: if it is part of the job, the job ends."""
        if self.membership.is_leader:
            self.membership.decide({"end": exit_code, "message": message})
        elif self._takes_part:
            self.membership.stop(exit_code, message)

    def _no_more(self, why: str) -> None:
        self._last_word = f"not restarted: {why}"
        logger.info(self._last_word)

    def _lead(self, attempt: Attempt, result: RunResult) -> Attempt | None:
        if result.kind is Kind.FAILED and not self._tries_again(attempt, result):
            return None
        try:
            nodes = self._await_nodes(attempt)
        except _OtherLeads:
            return self._await_leaders_decision(attempt)
        if nodes is None:
            return None
        following = Attempt(attempt.round + 1, attempt.number + 1, nodes)
        self._decide(following)
        return following

    def _tries_again(self, attempt: Attempt, result: RunResult) -> bool:
        why = why_not_again(result, self._earlier, self._restarts, self.policy)
        if why is not None:
            if why:
                self._no_more(why)
            return False
        self._restarts += 1
        restart, pause = self._restarts, pause_seconds(self._restarts)
        logger.info(f"{what_failed(attempt, result)}; restart {restart} of {self.policy.max_restarts} in {pause:g} s")
        time.sleep(pause)
        return True

    def _await_nodes(self, attempt: Attempt) -> tuple[int, ...] | None:
        """The nodes of the next attempt, or None if too few came back. Waits for the nodes of the failed attempt."""
        began, word_at, look_at = (
            time.monotonic(),
            time.monotonic() + timeouts.FIRST_WAITING_SECONDS,
            time.monotonic() + timeouts.CHECK_OTHER_LEADER_SECONDS,
        )
        timeout = self.policy.rejoin_timeout_seconds
        needed = self.policy.min_nodes or len(self._every_node)
        while True:
            here = self.membership.here(attempt.round + 1)
            missing = set(attempt.nodes) - here
            if not missing and len(here) >= needed:
                return tuple(sorted(here))
            away = ", ".join(map(self.membership.node.describe, sorted(missing or set(self._every_node) - here)))
            waited = time.monotonic() - began
            if (stopped := self.membership.stopped()) is not None:
                self._no_more(str(stopped["message"]))
                return None
            is_over = waited > timeout
            if is_over or (missing and time.monotonic() > look_at):  # it may have been frozen since the last look
                look_at = time.monotonic() + timeouts.CHECK_OTHER_LEADER_SECONDS
                if self._gives_way(attempt):
                    raise _OtherLeads
            if is_over:
                return self._go_on_without(away, missing, here, needed)
            if time.monotonic() > word_at:
                logger.info(f"waiting for {away} to come back ({timeout - waited:.0f} s more, --rejoin_timeout)")
                word_at = time.monotonic() + timeouts.REPORT_WAITING_SECONDS
            time.sleep(timeouts.LAUNCHERS_POLL_SECONDS)

    def _go_on_without(self, away: str, missing: set[int], here: set[int], needed: int) -> tuple[int, ...] | None:
        timeout = self.policy.rejoin_timeout_seconds
        if len(here) < needed:
            self._no_more(
                f"{away} did not come back within {timeout:g} s (--rejoin_timeout), and {counted(needed, 'node')} "
                "are needed (--min_nodes)"
            )
            return None
        if not self.membership.may_go_on_without(missing, here):
            self._no_more(
                f"{away} cannot be reached and may be alive, and this side of the network, with "
                f"{counted(len(here), 'node')}, is not the larger one: if both continued, they would train two models"
            )
            return None
        logger.info(f"{away} did not come back within {timeout:g} s (--rejoin_timeout); continuing with fewer nodes")
        return tuple(sorted(here))

    def _follow(self, attempt: Attempt, result: RunResult) -> Attempt | None:
        leader = self.membership.node.describe(self.membership.leader)
        logger.info(f"{what_failed(attempt, result)}; waiting for the decision of {leader}")
        if result.store_lost or not self._is_member(attempt.round + 1):
            return self._find_leader(attempt, result)
        try:
            return self._await_leaders_decision(attempt)
        except WorkerFailed:
            return self._find_leader(attempt, result)

    def _await_leaders_decision(self, attempt: Attempt) -> Attempt | None:
        patience = self.policy.rejoin_timeout_seconds + timeouts.LEADER_BUSY_SECONDS
        try:
            return self._await_decision(attempt.round, time.monotonic() + patience, attempt.number)
        except JobEnded as end:
            if str(end) and end.exit_code:
                leader = self.membership.node.describe(self.membership.leader)
                logger.info(f"{leader} ended the job: {end}")
            return None

    def _is_member(self, round_number: int) -> bool:
        """Whether the leader still knows this node; also reports the round for which this node is ready."""
        try:
            self.membership.ready_for(round_number)
            return True
        except FleetTrainError:
            return False

    def _find_leader(self, attempt: Attempt, result: RunResult) -> Attempt | None:
        """The leader cannot be reached: find it again, or another one, or become leader."""
        timeout = self.policy.rejoin_timeout_seconds
        logger.info(f"{self._lost_leader()}; looking for another leader")
        try:
            self.membership.find_again(attempt.nodes, timeout)
            leader = self.membership.node.describe(self.membership.leader)
            if not self.membership.is_leader:
                logger.info(f"{leader} is the leader")
                return self._await_leaders_decision(attempt)
            logger.info(f"{leader} is the leader from now on")
            self.membership.set_facts(self._facts)
            self.membership.decide(self.membership.last_decision or {"round": attempt.round, "nodes": []})
            return self._lead(attempt, result)
        except (JoinTimeout, ClusterError, WorkerFailed) as error:
            self._no_more(str(error))
            return None

    def _await_decision(self, round_number: int, deadline: float | None, number: int = 0) -> Attempt:
        """The first attempt after that round in which this node takes part. Raises JobEnded."""
        self.membership.ready_for(round_number + 1)
        while deadline is None or time.monotonic() < deadline:
            decision: dict[str, Any] = self.membership.decision() or {}
            if "end" in decision:
                raise JobEnded(int(decision["end"]), str(decision["message"]))
            self._restarts = int(decision.get("restarts", self._restarts))
            if decision.get("round", round_number) > round_number:
                round_number = int(decision["round"])
                if self.membership.node.index in decision["nodes"]:
                    # This number is a proposal: the highest that any node knows is used.
                    return Attempt(round_number, number + 1, tuple(decision["nodes"]))
                logger.info("the job continues without this node, which joins at the next restart")
                self.membership.ready_for(round_number + 1)
                deadline = None  # as long as the leader keeps the store
            time.sleep(timeouts.LAUNCHERS_POLL_SECONDS)
        leader = self.membership.node.describe(self.membership.leader)
        raise JobEnded(WorkerFailed.exit_code, f"{leader} did not report its decision")


def what_failed(attempt: Attempt, result: RunResult) -> str:
    """One line for a failed attempt: ``attempt 0: rank 1 (10.0.0.2:6170) failed first: exit code 1 after 3 s``."""
    if result.kind is Kind.FAILED and result.root_cause is not None and not result.without_root_cause:
        return f"attempt {attempt.number}: {headline(result.root_cause)}"
    return f"attempt {attempt.number}: {result.message}"


FAILS_AGAIN = MISTAKES | {ClusterError.exit_code, ScheduleMismatch.exit_code}
# These come from outside: an operator, the kernel out of memory, a batch system.
_FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True)
class Attempt:
    """``round`` is the rendezvous round, ``number`` the attempt of the job, both from 0.

    A new launcher knows only the round; the attempt gets the highest number that any launcher knows.
    """

    round: int
    number: int
    nodes: tuple[int, ...]
    """Positions in --cluster_node_ips of the nodes that take part, in the order of ranks."""


class Kind(Enum):
    DONE = "all ranks ended with 0"
    PREEMPTED = "all ranks have saved their state and stopped, as they were asked to"
    RESUMES = "all ranks have saved their state, to continue with nodes that have come back"
    FAILED = "a rank, a launcher or a machine failed"


@dataclass(frozen=True)
class RunResult:
    """The result of one attempt, as this launcher knows it."""

    kind: Kind
    exit_code: int
    message: str = ""
    ends: tuple[WorkerResult, ...] = ()
    """Of all nodes that reported theirs."""
    silent: tuple[str, ...] = ()
    root_cause: WorkerResult | None = None
    final: bool = False
    """The process that ended it does not want another attempt."""
    without_root_cause: bool = False
    """The failure has no root cause in a rank: the message is complete."""
    store_lost: bool = False
    """The leader's launcher, and its store, could not be reached any more."""

    @property
    def seconds(self) -> float:
        return max((end.seconds for end in self.ends), default=0.0)


def why_not_again(result: RunResult, earlier: Sequence[RunResult], restarts: int, policy: FaultPolicy) -> str | None:
    """Why there is no further attempt ("": no explanation is needed); None if another attempt makes sense."""
    root_cause = result.root_cause
    if result.final or policy.max_restarts == 0:
        return ""
    is_mistake = root_cause is not None and root_cause.shell_code in FAILS_AGAIN
    # With a silent node, a rank's error may only be a consequence of that node's loss.
    if is_mistake and not result.without_root_cause and not result.silent:
        mistake = "a mistake in flags, profile, data or numbers"
        return f"exit code {result.exit_code} means {mistake}; a restart would fail again"
    if earlier and _same_failure(result, earlier[-1]):
        return "it failed twice in the same way"
    if restarts >= policy.max_restarts:
        return f"all restarts are used up (--max_restarts={policy.max_restarts})"
    return None


def _same_failure(last: RunResult, earlier: RunResult) -> bool:
    mine, before = _signature(last), _signature(earlier)
    return mine is not None and mine == before and last.seconds < timeouts.ATTEMPT_PROGRESS_SECONDS


def _signature(result: RunResult) -> tuple[Any, ...] | None:
    """What two failures of one cause have in common; None for those that came from outside or were secondary."""
    root_cause = result.root_cause
    if result.without_root_cause or root_cause is None or root_cause.secondary:
        return None
    if (
        root_cause.report is not None and root_cause.report.traceback
    ):  # whatever it printed afterwards, and however it ended
        return root_cause.rank, root_cause.shell_code, None, re.sub(r"\d+", "#", root_cause.report.traceback[-1])
    if root_cause.signal_number in _FROM_OUTSIDE:
        return None
    last = root_cause.last_lines[-1] if root_cause.last_lines else ""
    return root_cause.rank, root_cause.exit_code, root_cause.signal_number, re.sub(r"\d+", "#", last)


def pause_seconds(restart: int) -> float:
    """How long to wait before restart 1, 2, ...: short, but without a storm if every attempt fails at once."""
    return min(2.0 ** (restart - 1), timeouts.LONGEST_RESTART_PAUSE_SECONDS)
