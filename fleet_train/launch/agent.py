"""One launcher from start to end: join the membership, run attempt after attempt, report how the job ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from fleet_train import timeouts
from fleet_train.errors import ClusterError, JoinTimeout, WorkerFailed
from fleet_train.launch.prepare import Launch
from fleet_train.launch.processes import Stopping, StopRequested, request_name, stopping_signals
from fleet_train.launch.rendezvous.coordinator import Attempt, Coordinator, JobEnded, Kind, RunResult
from fleet_train.launch.rendezvous.membership import Membership
from fleet_train.launch.rendezvous.round import Rendezvous
from fleet_train.launch.report import failure_report, headline
from fleet_train.launch.terminal import messages_in_order, tell
from fleet_train.launch.worker_group import run_worker_group
from fleet_train.log import logger


def run(launch: Launch, environ: Mapping[str, str], diagnose: Callable[[], str] = str) -> int:
    """Run the launch; returns the exit code for the shell. Raises FleetTrainError before the first rank.

    ``diagnose`` is called after a failure and returns a line about its likely cause on this node; empty: unknown.
    """
    node, request = launch.node, launch.request
    membership: Membership | None = None
    with messages_in_order(), stopping_signals() as stopping:
        try:
            membership = Membership(
                node, request.faults, request.join_timeout_seconds, launch.access, request.direct_ranks
            )
            coordinator = Coordinator(membership, request.faults, launch.facts, request.run)
            return _run_attempts(launch, coordinator, environ, stopping, diagnose)
        except (JoinTimeout, WorkerFailed):
            _tell_cause(diagnose)
            raise
        except StopRequested as stop:
            logger.info(f"{_stop_message(launch, stop)}; no rank was running")
            return stop.exit_code
        finally:
            if membership is not None:
                membership.exit_barrier(timeouts.LAUNCHERS_LEAVE_SECONDS)
                membership.close()


def _run_attempts(
    launch: Launch,
    coordinator: Coordinator,
    environ: Mapping[str, str],
    stopping: Stopping,
    diagnose: Callable[[], str],
) -> int:
    try:
        attempt = coordinator.first()
        while True:
            attempt, result = _run_one(launch, coordinator, attempt, environ, stopping)
            following = coordinator.next(attempt, result)
            if following is None:
                coordinator.end(result)
                return _tell(result, diagnose)
            attempt = following
    except JobEnded as end:
        logger.info(f"the job ended before this node could join: {end}")
        return end.exit_code
    except StopRequested as stop:
        coordinator.stop(stop.exit_code, _stop_message(launch, stop))
        raise


def _stop_message(launch: Launch, stop: StopRequested) -> str:
    return f"{launch.node.describe()} was stopped by {request_name(stop.number)}"


def _run_one(
    launch: Launch, coordinator: Coordinator, attempt: Attempt, environ: Mapping[str, str], stopping: Stopping
) -> tuple[Attempt, RunResult]:
    """One attempt, with the number that the nodes agreed on. Raises FleetTrainError if the first one cannot start."""
    membership, round_name = coordinator.membership, str(attempt.round)
    launch = launch.at(membership.place_of(attempt.nodes))
    timeout = launch.request.join_timeout_seconds
    rendezvous: Rendezvous | None = None
    must_meet = attempt.number == 0
    try:
        rendezvous = Rendezvous.open(
            launch.node, attempt.round, timeout, launch.request.faults.lost_node_timeout_seconds, launch.access
        )
        number = rendezvous.join(launch.facts, attempt.number, timeout, coordinator.launched)
        coordinator.launched = rendezvous.launched
        membership.learn(attempt.nodes, rendezvous.addresses)
        launch = launch.at(membership.place_of(attempt.nodes))
        must_meet = False
        attempt = replace(attempt, number=number)
        coordinator.begun(attempt)
        store = membership.open_tree(launch.node, round_name, timeout)
        environ = launch.environ_of(store, number, coordinator.launched, environ)
        waiting_nodes = partial(coordinator.waiting_nodes, attempt)
        return attempt, run_worker_group(launch, rendezvous, environ, number, stopping, waiting_nodes)
    except (ClusterError, WorkerFailed) as error:
        if must_meet:
            raise
        if rendezvous is not None:  # a relay that has not found its parent, for instance
            rendezvous.fail(str(error), error.exit_code, no_root_cause=True)
        return attempt, RunResult(Kind.FAILED, error.exit_code, str(error), without_root_cause=True)
    except StopRequested as stop:
        if rendezvous is not None:
            rendezvous.fail(_stop_message(launch, stop), stop.exit_code, no_root_cause=True, final=True)
        raise
    finally:
        if rendezvous is not None:
            rendezvous.close()
        membership.close_tree(round_name)


def _tell(result: RunResult, diagnose: Callable[[], str]) -> int:
    """Report how the job ended; returns the exit code."""
    if result.kind is Kind.DONE:
        return 0
    if result.kind is not Kind.FAILED or result.without_root_cause:
        logger.info(result.message)
    elif result.root_cause is None:
        logger.info(f"the job has failed: {result.message}")
    else:
        logger.info(f"the job has failed: {headline(result.root_cause)}")
        tell(failure_report(result.ends, result.silent))
    if result.kind is Kind.FAILED:
        _tell_cause(diagnose)
    return result.exit_code


def _tell_cause(diagnose: Callable[[], str]) -> None:
    line = diagnose()
    if line:
        logger.info(line)
