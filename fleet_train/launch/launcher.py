"""One launcher from start to end: it carries out what `job.step` decides, and brings back what came of it.

One attempt: meet the other launchers, start this node's ranks, monitor them, stop them, report how they ended.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from fleet_train import timeouts
from fleet_train.cluster.flight.witness import write_job
from fleet_train.errors import ClusterError, FleetTrainError, JoinTimeout, ScheduleMismatch, WorkerFailed
from fleet_train.launch.attempts import Attempt, Kind, RunResult
from fleet_train.launch.events import (
    Action,
    Answered,
    Ask,
    Connected,
    Ended,
    Event,
    Finish,
    Follow,
    Lead,
    Look,
    Publish,
    Run,
    Say,
    StoreSeen,
    Wait,
    Why,
    Woken,
    Write,
)
from fleet_train.launch.job import begun, first, step
from fleet_train.launch.job_state import JobState, Phase
from fleet_train.launch.logs import LogFolder, take_log_dir
from fleet_train.launch.membership import Membership
from fleet_train.launch.ports import give_back
from fleet_train.launch.prepare import Launch
from fleet_train.launch.processes import Stopping, StopRequested, request_name, stopping_signals
from fleet_train.launch.rendezvous import Rendezvous
from fleet_train.launch.report import failure_report, headline
from fleet_train.launch.request import OFF
from fleet_train.launch.signpost import Signpost, program_of
from fleet_train.launch.spares import Spares
from fleet_train.launch.terminal import messages_in_order, show_lines, told
from fleet_train.launch.worker_group import WorkerGroup, failed
from fleet_train.log import logger

Diagnose = Callable[[Sequence[str]], str]
"""Called after a failure, with the last lines of the rank that failed first, if an error of Python's has ended it:
returns a line about the likely cause; empty: unknown."""


def run(launch: Launch, environ: Mapping[str, str], diagnose: Diagnose = lambda _: "") -> int:
    """Run the launch; returns the exit code for the shell. Raises FleetTrainError before the first rank."""
    with messages_in_order(), stopping_signals() as stopping:
        launcher = Launcher(launch, environ, stopping)
        try:
            finish = launcher.run()
            return _report_end(finish.result, diagnose) if finish.result is not None else finish.exit_code
        except (JoinTimeout, WorkerFailed):
            _report_cause(diagnose)
            raise
        except StopRequested as stop:
            logger.info(f"{launcher.stop_message(stop)}; no rank was running")
            return stop.exit_code
        finally:
            launcher.close()
            give_back(launch.node)


class Launcher:
    """This node's launcher: its part in the job, and the attempts that it runs."""

    def __init__(self, launch: Launch, environ: Mapping[str, str], stopping: Stopping) -> None:
        node, request = launch.node, launch.request
        self._launch, self._environ, self._stopping = launch, environ, stopping
        self._launched = request.run or secrets.token_hex(8)
        """A unique identifier of this launch of the job: the leader's at the first attempt."""
        self._spares = Spares(
            request.faults.spares if request.faults.max_restarts else OFF, launch.command(), request.is_module
        )
        self._signpost = Signpost(node, launch.access, program_of(request), launch.facts)
        try:
            self._membership = Membership(node, request.faults, launch.access, launch.facts, request.direct_ranks)
        except BaseException as error:
            with closing(self._signpost):
                if isinstance(error, ClusterError):
                    self._signpost.look_longer()
            raise
        self._job = JobState(
            node.index,
            len(node.addresses),
            request.faults,
            request.join_timeout_seconds,
            lambda index: self._membership.node.describe(index),
            node.store_endpoint,
            node.address,
            node.host(node.index),
        )

    def run(self) -> Finish:
        """Until this launcher is done. Raises FleetTrainError if it cannot take part."""
        try:
            self._job, actions = first(self._job, time.monotonic())
            while not isinstance(actions[-1], Finish):
                self._job, actions = step(self._job, self._do(actions))
            self._do(actions[:-1])
        except StopRequested as stop:
            self._stop(stop)
            raise
        return self._finished(actions[-1])

    def close(self) -> None:
        """Leave the job; the leader keeps its store while others are connected."""
        self._spares.close()
        self._signpost.close()
        self._membership.exit_barrier(timeouts.LAUNCHERS_LEAVE_SECONDS)
        self._membership.close()

    def _finished(self, finish: Finish) -> Finish:
        match finish.why:
            case Why.REFUSED:
                self._signpost.look_longer()
                raise ClusterError(finish.message)
            case Why.LATE:
                raise ClusterError(finish.message)
            case Why.NO_ANSWER:
                raise JoinTimeout(finish.message)
            case Why.UNLIKE:
                raise ScheduleMismatch(finish.message)
            case Why.ENDED:
                logger.info(f"the job ended before this node could join: {finish.message}")
            case Why.RESULT:
                pass
        return finish

    def _stop(self, stop: StopRequested) -> None:
        """Stopped on purpose while no rank is running: if this launcher is part of the job, the job ends."""
        message = self.stop_message(stop)
        if self._job.leads:
            self._membership.write({"end": stop.exit_code, "message": message})
        elif self._job.attempt is not None:
            self._membership.stop(message)

    def stop_message(self, stop: StopRequested) -> str:
        return f"{self._launch.node.describe()} was stopped by {request_name(stop.number)}"

    # what `job.step` decides

    def _do(self, actions: list[Action]) -> Event:
        """Carry them out; what came of the last one."""
        event: Event = Woken(time.monotonic())
        for action in actions:
            match action:
                case Say(text):
                    logger.info(text)
                case Publish(status):
                    self._membership.publish(status)
                case Write(decision, with_facts):
                    self._membership.write(decision, with_facts)
                case Finish():
                    break
                case _:
                    event = self._await(action)
        return event

    def _await(self, action: Action) -> Event:
        match action:
            case Wait(seconds):
                self._rest(seconds)
                return Woken(time.monotonic())
            case Ask(nodes):
                heard, refusal = self._membership.ask(nodes)
                if self._job.phase is Phase.SEEKING:
                    self._signpost.refuse()
                return Answered(time.monotonic(), heard, refusal)
            case Follow(leader, term, deadline):
                return self._follow(leader, term, deadline)
            case Lead(term):
                self._membership.lead(term)
                return Connected(time.monotonic())
            case Look(ready):
                if ready is not None and self._job.result is None:
                    self._prepare_spares()
                return self._look(action)
            case Run(attempt):
                attempt, result = self._run_one(attempt)
                return Ended(time.monotonic(), attempt, result)
        raise AssertionError(action)

    def _rest(self, seconds: float) -> None:
        """No rank runs meanwhile."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._spares.tick(idle=True)
            time.sleep(min(timeouts.WATCH_TICK_SECONDS, left))

    def _follow(self, leader: int, term: int, deadline: float) -> Connected:
        try:
            return Connected(time.monotonic(), self._membership.follow(leader, term, deadline))
        except ClusterError as error:
            return Connected(time.monotonic(), connected=False, refusal=str(error))

    def _look(self, look: Look) -> StoreSeen:
        try:
            seen = self._membership.look(look)
            return StoreSeen(time.monotonic(), **seen)
        except FleetTrainError:
            return StoreSeen(time.monotonic(), lost=True)

    def _prepare_spares(self) -> None:
        """Before a node that comes back says that it is ready, and the others stop their ranks for it."""
        launch = self._launch
        common = launch.environ_of("", 0, "", self._environ)
        self._spares.prepare([{**common, **launch.variables_of(local)} for local in range(launch.node.processes)])

    # one attempt

    def _run_one(self, attempt: Attempt) -> tuple[Attempt, RunResult]:
        """With the number that the nodes agreed on. Raises FleetTrainError if the first one cannot start."""
        membership, round_name, request = self._membership, str(attempt.round), self._launch.request
        launch = replace(self._launch, node=membership.place_of(attempt.nodes))
        timeout = request.join_timeout_seconds
        rendezvous: Rendezvous | None = None
        must_meet = attempt.number == 0
        try:
            rendezvous = Rendezvous(
                launch.node, attempt.round, timeout, request.faults.lost_node_timeout_seconds, launch.access
            )
            number = rendezvous.join(launch.facts, attempt.number, timeout, self._launched, self._signpost.refuse)
            self._signpost.close()
            self._launched = rendezvous.launched
            membership.learn(attempt.nodes, rendezvous.addresses)
            launch = replace(launch, node=membership.place_of(attempt.nodes))
            must_meet = False
            attempt = replace(attempt, number=number)
            self._job, actions = begun(self._job, attempt)
            self._do(actions)
            store = membership.open_tree(launch.node, round_name, timeout)
            environ = launch.environ_of(store, number, self._launched, self._environ)
            with _unwritable_logs_refused(launch, rendezvous, number):
                launch = _with_own_log_dir(launch, rendezvous)
                script = None if request.is_module else Path(request.command[0])
                logs = LogFolder(launch.node, launch.log_dir, number, request.verbose, script)
                logs.prepare()
                write_job(launch.log_dir, f"{launch.node.store_endpoint}/{round_name}", launch.access.job)
            told(logs=str(launch.log_dir))
            logger.info(launch.summary() + (f"; attempt {number}" if number else ""))
            return attempt, WorkerGroup(
                launch, rendezvous, logs, environ, self._stopping, lambda: self._waiting_nodes(attempt), self._spares
            ).run()
        except (ClusterError, WorkerFailed) as error:
            if must_meet:
                raise
            if rendezvous is not None:  # a relay that has not found its parent, for instance
                rendezvous.fail(str(error), error.exit_code, no_root_cause=True)
            return attempt, failed(str(error), error.exit_code)
        except StopRequested as stop:
            if rendezvous is not None:
                rendezvous.fail(self.stop_message(stop), stop.exit_code, no_root_cause=True, final=True)
            raise
        finally:
            if rendezvous is not None:
                rendezvous.close()
            membership.close_tree(round_name)

    def _waiting_nodes(self, attempt: Attempt) -> str | None:
        """Asked by the leader while ranks run on fewer nodes than the job has: which nodes have come back."""
        node = self._launch.node
        if not self._job.leads or len(attempt.nodes) == len(node.addresses):
            return None
        new = sorted(self._membership.here(attempt.round + 1) - set(attempt.nodes))
        return f"{', '.join(map(node.describe, new))} can join again" if new else None


def _report_end(result: RunResult, diagnose: Diagnose) -> int:
    """Report how the job ended; returns the exit code."""
    if result.kind is Kind.DONE:
        return 0
    table = ""
    if result.kind is not Kind.FAILED or result.without_root_cause:
        message = result.message
    elif result.root_cause is None:
        message = f"the job has failed: {result.message}"
    else:
        message = f"the job has failed: {headline(result.root_cause)}"
        table = failure_report(result.ends, result.silent)
    if not told(report="\n".join([message, table])):
        logger.info(message)
        if table:
            show_lines(table)
    if result.kind is Kind.FAILED:
        cause = result.root_cause
        _report_cause(diagnose, cause.last_lines if cause and cause.exit_code == 1 else ())
    return result.exit_code


def _report_cause(diagnose: Diagnose, last_lines: Sequence[str] = ()) -> None:
    line = diagnose(last_lines)
    if line:
        logger.info(line)


@contextmanager
def _unwritable_logs_refused(launch: Launch, rendezvous: Rendezvous, number: int) -> Iterator[None]:
    """The first attempt must be able to write logs: raises ClusterError, on all nodes. Later attempts continue."""
    try:
        yield
    except OSError as error:
        message = (
            f"{launch.request.log_flag}={launch.log_dir}: {error.filename or 'it'} cannot be written: {error.strerror}"
        )
        if number == 0:
            message += "; make room, or choose another folder"
            rendezvous.fail(message, ClusterError.exit_code, no_root_cause=True, final=True)
            raise ClusterError(message) from None
        logger.warning(f"{message}; the job continues, logs are incomplete")


def _with_own_log_dir(launch: Launch, rendezvous: Rendezvous) -> Launch:
    """Nodes that share a folder: the first one keeps it, and each other node gets a folder of its own below it.

    A folder that another job uses is not shared: both would write into the same files.
    """
    launch.log_dir.mkdir(parents=True, exist_ok=True)
    shared = len(launch.node.addresses) > 1 and rendezvous.shares_folder(launch.log_dir)
    return replace(launch, log_dir=take_log_dir(launch.log_dir / launch.node.address if shared else launch.log_dir))
