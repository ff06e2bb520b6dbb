"""One launcher from start to end: take the seat, run attempt after attempt, say how the job ended."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from fleet_train.errors import JoinTimeout, WorkerFailed
from fleet_train.launch.attempt import run_attempt
from fleet_train.launch.council import Council, JobEnded
from fleet_train.launch.meeting import Meeting
from fleet_train.launch.prepare import Launch
from fleet_train.launch.report import failure_report, headline
from fleet_train.launch.restart import Attempt, Kind, Outcome
from fleet_train.launch.roster import Roster
from fleet_train.launch.signals import Stopping, StopRequested, signal_name, stopping_signals

_LINGER_SECONDS = 12.0


def say(text: str) -> None:
    print(f"fleet_train: {text}", file=sys.stderr, flush=True)


def run(launch: Launch, environ: Mapping[str, str]) -> int:
    """Carry out the launch; returns the exit code for the shell. Raises FleetTrainError before the first rank."""
    node = launch.node
    roster: Roster | None = None
    with stopping_signals() as stopping:
        try:
            roster = Roster(node, launch.faults, launch.join_timeout_seconds)
            return _run_attempts(launch, Council(roster, launch.faults, launch.facts, say), environ, stopping)
        except StopRequested as stop:
            say(f"{_stop_message(launch, stop)}; no rank was running")
            return 128 + stop.number
        finally:
            if roster is not None:
                roster.linger(_LINGER_SECONDS)
                roster.close()


def _run_attempts(launch: Launch, council: Council, environ: Mapping[str, str], stopping: Stopping) -> int:
    try:
        attempt = council.first()
        while True:
            attempt, outcome = _run_one(launch, council, attempt, environ, stopping)
            following = council.next(attempt, outcome)
            if following is None:
                council.end(outcome)
                return _tell(outcome)
            attempt = following
    except JobEnded as end:
        say(f"the job has ended before it could take this node in: {end}")
        return end.exit_code
    except StopRequested as stop:
        council.stop(128 + stop.number, _stop_message(launch, stop))
        raise


def _stop_message(launch: Launch, stop: StopRequested) -> str:
    return f"{launch.node.describe()} was stopped by {signal_name(stop.number)}"


def _run_one(
    launch: Launch, council: Council, attempt: Attempt, environ: Mapping[str, str], stopping: Stopping
) -> tuple[Attempt, Outcome]:
    """One attempt, with the number that the nodes agreed on. Raises FleetTrainError when the first one cannot begin."""
    launch = launch.for_nodes(attempt.nodes)
    meeting: Meeting | None = None
    must_meet = attempt.number == 0
    try:
        meeting = Meeting.open(
            launch.node, attempt.scope, launch.join_timeout_seconds, launch.faults.lost_node_timeout_seconds
        )
        number = meeting.join(launch.facts, attempt.number, launch.join_timeout_seconds, say)
        must_meet = False
        attempt = replace(attempt, number=number)
        council.begun(attempt)
        environ = launch.environ_of(attempt.scope, number, environ)
        newcomers = partial(council.newcomers, attempt)
        return attempt, run_attempt(launch, meeting, environ, number, stopping, newcomers, say)
    except (JoinTimeout, WorkerFailed) as error:
        if must_meet:
            raise
        return attempt, Outcome(Kind.FAILED, error.exit_code, str(error), without_culprit=True)
    except StopRequested as stop:
        if meeting is not None:
            meeting.fail(_stop_message(launch, stop), 128 + stop.number, no_culprit=True, final=True)
        raise
    finally:
        if meeting is not None:
            meeting.close()


def _tell(outcome: Outcome) -> int:
    """Say how the job has ended; returns the exit code."""
    if outcome.kind is Kind.DONE:
        return 0
    if outcome.kind is not Kind.FAILED or outcome.without_culprit:
        say(outcome.message)
    elif outcome.culprit is None:
        say(f"the job has failed: {outcome.message}")
    else:
        say(f"the job has failed: {headline(outcome.culprit)}")
        print(failure_report(outcome.ends, outcome.silent), file=sys.stderr, flush=True)
    for line in outcome.output:
        print(f"  | {line}", file=sys.stderr, flush=True)
    return outcome.exit_code
