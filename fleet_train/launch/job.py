"""What a launcher does about its job, as one pure function: `step` maps a state and an event to a state and actions.

Every launcher runs it: who leads, which nodes take part in the next attempt, whether there is one, how the job ends.
Nothing here waits, connects or prints: `launcher` carries the actions out and brings what came of the last
one back as the next event, so that the tests replay it in virtual time, with machines and networks that fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fleet_train import timeouts
from fleet_train.errors import WorkerFailed
from fleet_train.launch.attempts import Attempt, Kind, pause_seconds, what_failed, why_not_again
from fleet_train.launch.election import (
    Heard,
    Standing,
    Status,
    Unheard,
    elected,
    is_at_work,
    leader_among,
    may_go_on,
    silent,
)
from fleet_train.launch.events import (
    Action,
    Answered,
    Ask,
    Connected,
    Decision,
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
from fleet_train.launch.job_state import JobState, Phase, Step, enter, say_again, seconds_left
from fleet_train.launch.report import counted

_ASKED_AT_A_TIME = 8
"""With a long list, a new launcher asks the first node and this many others at a time for the leader."""


def step(job: JobState, event: Event) -> Step:
    """The next state and what is to be done. Raises KeyError for an event that the phase does not wait for."""
    return _STEPS[job.phase, type(event)](job, event)


def first(job: JobState, now: float) -> Step:
    """The state and the actions of a launcher that begins."""
    can_be_at_work = job.policy.max_restarts > 0 and job.nodes > 1
    if job.me != 0:
        return _seek(job, now, job.join_timeout_seconds)
    if not can_be_at_work:
        return replace(job, phase=Phase.STARTING), [Publish(job.status(Standing.FRESH)), Lead(0)]
    job = enter(job, Phase.STARTING, now, job.join_timeout_seconds)
    return job, [Publish(job.status(Standing.FRESH)), Ask(job.others)]


# The start.


def _asked_at_start(job: JobState, event: Answered) -> Step:
    deaf = [node for node, how in event.heard.items() if how is Unheard.DEAF]
    if not deaf:
        if is_at_work(event.heard):
            return _seek(job, event.now, job.join_timeout_seconds)
        return job, [Lead(0)]
    if seconds_left(job, event.now) < 0:
        message = (
            f"{job.named(deaf)} refuses connections from {job.address}: the name {job.host} still has another address "
            f"there after {job.join_timeout_seconds:g} s (--join_timeout)"
        )
        return _over(job, Finish(Why.NO_ANSWER, message))
    waited = f"waiting until {job.named(deaf)} knows this node's new address, {job.address}"
    job, said = say_again(job, event.now, waited)
    return job, [*said, Wait(timeouts.FIND_LEADER_SECONDS)]


def _seek(job: JobState, now: float, bound_seconds: float) -> Step:
    job = enter(replace(job, leader=-1), Phase.SEEKING, now, bound_seconds)
    return job, [Publish(job.status(Standing.FRESH)), Ask(_some(job))]


def _some(job: JobState) -> tuple[int, ...]:
    """Node 0 and some others in turn."""
    some = {0, *(1 + (job.turn + each) % max(1, job.nodes - 1) for each in range(_ASKED_AT_A_TIME))}
    return tuple(node for node in sorted(some) if node < job.nodes and node != job.me)


def _sought(job: JobState, event: Answered) -> Step:
    leader = leader_among(event.heard, job.term)
    if leader is not None:
        return _try(job, leader, event.heard, job.began + job.bound_seconds)
    if event.refusal:
        return _over(job, Finish(Why.REFUSED, event.refusal))
    return _seek_on(job, event.now)


def _seek_on(job: JobState, now: float) -> Step:
    if seconds_left(job, now) < 0:
        message = (
            f"the launcher of {job.describe(0)}, which hosts the job store at {job.endpoint}, did not connect within "
            f"{job.bound_seconds:g} s; start it with the same --cluster_node_ips, --nproc_per_node and --started_port, "
            "or check that this port is not blocked by a firewall"
        )
        return _over(job, Finish(Why.NO_ANSWER, message))
    return replace(job, turn=job.turn + _ASKED_AT_A_TIME), [Wait(timeouts.LAUNCHERS_POLL_SECONDS)]


def _try(job: JobState, leader: int, heard: Heard, deadline: float) -> Step:
    """Follow a launcher that says it leads."""
    status = heard[leader]
    assert isinstance(status, Status)
    return replace(job, candidate=(leader, status.term)), [Follow(leader, status.term, deadline)]


def _followed(job: JobState) -> tuple[JobState, Publish]:
    assert job.candidate is not None
    leader, term = job.candidate
    job = replace(job, leader=leader, term=term, candidate=None)
    return job, Publish(job.status(Standing.FOLLOWING))


def _leads(job: JobState, term: int) -> tuple[JobState, Publish]:
    job = replace(job, leader=job.me, term=term)
    return job, Publish(job.status(Standing.LEADING))


def _connected_at_start(job: JobState, _: Connected) -> Step:
    job, shown = _leads(job, 0)
    return replace(job, phase=Phase.MEETING), [shown, Look()]


def _found(job: JobState, event: Connected) -> Step:
    if event.refusal:
        return _over(job, Finish(Why.REFUSED, event.refusal))
    if not event.connected:
        return _seek_on(job, event.now)
    job, shown = _followed(job)
    if job.attempt is None and job.decision is None and job.round == 0:
        return replace(job, phase=Phase.MEETING), [shown, Look(with_facts=True)]
    return _join(job, event.now, shown)


def _met(job: JobState, event: StoreSeen) -> Step:
    """Whether the job has started without this launcher."""
    if event.lost:
        return _seek(job, event.now, job.join_timeout_seconds)
    if event.decision is None:
        return _run(job, Attempt(0, 0, tuple(job.every)))
    if job.policy.max_restarts == 0:
        message = (
            f"the job of {job.endpoint} started without this launcher of {job.describe(job.me)}; end it first, or "
            "choose another --started_port (a launcher can join a running job if all are started with --max_restarts)"
        )
        return _over(job, Finish(Why.LATE, message))
    if event.difference:
        return _over(job, Finish(Why.UNLIKE, event.difference))
    job = replace(job, decision=event.decision, round=int(event.decision.get("round", 0)))
    said = Say(f"the job is running; {job.describe(job.me)} joins at the next restart")
    return _join(job, event.now, said)


def _join(job: JobState, now: float, *before: Action) -> Step:
    job = replace(enter(job, Phase.JOINING, now, 0.0), bounded=False)
    return job, [*before, Look(ready=job.round + 1)]


# An attempt, and what follows.


def _run(job: JobState, attempt: Attempt, *before: Action) -> Step:
    earlier = job.earlier if job.result is None else (*job.earlier, job.result)
    return replace(job, phase=Phase.RUNNING, attempt=attempt, earlier=earlier), [*before, Run(attempt)]


def begun(job: JobState, attempt: Attempt) -> tuple[JobState, list[Action]]:
    """Called when all nodes of an attempt are connected: with the first one, the job has begun for latecomers."""
    if not job.leads or attempt.round != 0:
        return job, []
    decision = _decision_of(job, attempt)
    return replace(job, decision=decision), [Write(decision, with_facts=True)]


def _decision_of(job: JobState, attempt: Attempt) -> Decision:
    return {"round": attempt.round, "nodes": list(attempt.nodes), "restarts": job.restarts}


def _ended(job: JobState, event: Ended) -> Step:
    result, attempt = event.result, event.attempt
    job = replace(job, attempt=attempt, result=result, round=attempt.round, number=attempt.number)
    if job.policy.max_restarts == 0 or result.kind in (Kind.DONE, Kind.PREEMPTED) or result.final:
        return _end(job)
    if job.leads:
        if len(attempt.nodes) > 1:
            return enter(job, Phase.CHECKING, event.now, 0.0), [Ask(job.others)]
        return _lead_on(job, event.now)
    said = Say(f"{what_failed(attempt, result)}; waiting for the decision of {job.describe(job.leader)}")
    if result.store_lost:
        return _lost(job, event.now, said)
    return _await_decision(job, event.now, said)


def _end(job: JobState, word: str = "") -> Step:
    """This launcher's last attempt is over; the leader tells those that wait."""
    assert job.result is not None
    said: list[Action] = [Say(word)] if word else []
    if job.leads:
        message = word or job.result.kind.value
        said.append(Write({"end": job.result.exit_code, "message": message}))
    return _over(job, *said, Finish(Why.RESULT, result=job.result))


def _no_more(job: JobState, why: str) -> Step:
    return _end(job, f"not restarted: {why}")


def _over(job: JobState, *actions: Action) -> Step:
    return replace(job, phase=Phase.OVER), list(actions)


def _checked_for_later_leader(job: JobState, event: Answered) -> Step:
    """Before the leader decides: whether the others follow a later one, since this one was frozen or cut off."""
    later = leader_among(event.heard, job.term + 1)
    if later is not None:
        return _try(job, later, event.heard, event.now + timeouts.FIND_LEADER_SECONDS)
    return _go_on_leading(job, event.now)


def _go_on_leading(job: JobState, now: float) -> Step:
    """Nobody else leads, or the one that does cannot be reached."""
    if job.phase is Phase.CHECKING:
        return _lead_on(job, now)
    return replace(job, phase=Phase.GATHERING, candidate=None), [Look(here=job.round + 1)]


def _gave_way(job: JobState, event: Connected) -> Step:
    if not event.connected:
        return _go_on_leading(job, event.now)
    job, shown = _followed(job)
    said = Say(f"this launcher was unreachable for too long; {job.describe(job.leader)} is the leader now")
    return _await_decision(job, event.now, shown, said)


def _lead_on(job: JobState, now: float, *before: Action) -> Step:
    """As the leader, after an attempt: end the job, or pause, and gather the nodes of the next attempt."""
    assert job.result is not None
    assert job.attempt is not None
    if job.result.kind is not Kind.FAILED:
        return _gather(job, now, *before)
    why = why_not_again(job.result, job.earlier, job.restarts, job.policy)
    if why is not None:
        ended, actions = _no_more(job, why) if why else _end(job)
        return ended, [*before, *actions]
    what, pause = what_failed(job.attempt, job.result), pause_seconds((*job.earlier, job.result))
    job = replace(job, restarts=job.restarts + 1)
    when = f"in {pause:g} s" if pause else "now"
    said = f"{what}; restart {job.restarts} of {job.policy.max_restarts} {when}"
    return replace(job, phase=Phase.PAUSING, candidate=None), [*before, Say(said), Wait(pause)]


def _gather(job: JobState, now: float, *before: Action) -> Step:
    return enter(job, Phase.GATHERING, now, job.policy.rejoin_timeout_seconds), [*before, Look(here=job.round + 1)]


def _gathered(job: JobState, event: StoreSeen) -> Step:
    assert job.attempt is not None
    needed = job.policy.min_nodes or job.nodes
    here = set(event.here) | {job.me}
    missing = set(job.attempt.nodes) - here
    if not missing and len(here) >= needed:
        return _next(job, here)
    if event.stopped is not None:
        return _no_more(job, event.stopped)
    away = job.named(missing or set(job.every) - here)
    if seconds_left(job, event.now) < 0:
        return _without(job, away, missing, here, needed)
    waited = f"waiting for {away} to come back ({seconds_left(job, event.now):.0f} s more, --rejoin_timeout)"
    job, said = say_again(job, event.now, waited)
    if missing and event.now > job.look_at:
        return replace(job, look_at=event.now + timeouts.CHECK_OTHER_LEADER_SECONDS), [*said, Ask(job.others)]
    return job, [*said, Wait(timeouts.LAUNCHERS_POLL_SECONDS)]


def _next(job: JobState, nodes: set[int], *before: Action) -> Step:
    assert job.attempt is not None
    following = Attempt(job.attempt.round + 1, job.attempt.number + 1, tuple(sorted(nodes)))
    decision = _decision_of(job, following)
    return _run(replace(job, decision=decision), following, *before, Write(decision))


def _without(job: JobState, away: str, missing: set[int], here: set[int], needed: int) -> Step:
    timeout = job.policy.rejoin_timeout_seconds
    if len(here) < needed:
        return _no_more(
            job,
            f"{away} did not come back within {timeout:g} s (--rejoin_timeout), and {counted(needed, 'node')} are "
            "needed (--min_nodes)",
        )
    if not missing:
        return _next(job, here)
    return replace(job, phase=Phase.DIVIDED, here=tuple(sorted(here))), [Ask(tuple(sorted(missing)))]


def _divided(job: JobState, event: Answered) -> Step:
    """Whether the nodes that are here may go on without those that are missing: not if they follow a later leader, or
    are more and may be alive, on another side of the network or looking for a leader."""
    later = leader_among(event.heard, job.term + 1)
    if later is not None:
        return _try(job, later, event.heard, event.now + timeouts.FIND_LEADER_SECONDS)
    timeout, missing = job.policy.rejoin_timeout_seconds, tuple(event.heard)
    assert job.attempt is not None
    here = set(job.here)
    away = job.named(missing)
    # Nodes that were not part of the last attempt count for no side: the other one does not know them either.
    ours = here & set(job.attempt.nodes)
    members = {node for node, how in event.heard.items() if isinstance(how, Status) and how.state is not Standing.FRESH}
    other = silent(event.heard, missing) | members
    if not may_go_on(ours, other, set(missing) - other):
        return _no_more(
            job,
            f"{away} cannot be reached and may be alive, and this side of the network, with "
            f"{counted(len(ours), 'node')}, is not the larger one: if both continued, they would train two models",
        )
    said = Say(f"{away} did not come back within {timeout:g} s (--rejoin_timeout); continuing with fewer nodes")
    return _next(job, here, said)


# A node that does not lead.


def _await_decision(job: JobState, now: float, *before: Action) -> Step:
    patience = job.policy.rejoin_timeout_seconds + timeouts.LEADER_BUSY_SECONDS
    job = replace(enter(job, Phase.FOLLOWING, now, patience), bounded=True)
    return job, [*before, Look(ready=job.round + 1)]


def _decided(job: JobState, event: StoreSeen) -> Step:
    """What the leader has decided, if anything."""
    if event.lost:
        return _lost_while_waiting(job, event.now)
    decision = event.decision or {}
    job = replace(job, decision=event.decision or job.decision, restarts=int(decision.get("restarts", job.restarts)))
    if "end" in decision:
        return _told_to_end(job, int(decision["end"]), str(decision["message"]))
    if int(decision.get("round", job.round)) > job.round:
        job = replace(job, round=int(decision["round"]))
        if job.me in decision["nodes"]:
            # This number is a proposal: the highest that any node knows is used.
            return _run(job, Attempt(job.round, job.number + 1, tuple(decision["nodes"])))
        job = replace(job, bounded=False)  # as long as the leader keeps the store
        said = Say("the job continues without this node, which joins at the next restart")
        return job, [said, Look(ready=job.round + 1)]
    if job.bounded and seconds_left(job, event.now) < 0:
        return _told_to_end(job, WorkerFailed.exit_code, f"{job.describe(job.leader)} did not report its decision")
    return job, [Wait(timeouts.LAUNCHERS_POLL_SECONDS)]


def _told_to_end(job: JobState, exit_code: int, message: str) -> Step:
    if job.result is None:  # it has never been part of the job
        return _over(job, Finish(Why.ENDED, message, exit_code))
    said = [Say(f"{job.describe(job.leader)} ended the job: {message}")] if message and exit_code else []
    return _over(job, *said, Finish(Why.RESULT, result=job.result))


def _look_again(job: JobState, _: Woken) -> Step:
    return job, [Look(here=job.round + 1) if job.phase is Phase.GATHERING else Look()]


def _lost_while_waiting(job: JobState, now: float) -> Step:
    # A new leader that knows of no decision yet names no nodes.
    is_left_out = job.decision is not None and job.me not in (job.decision.get("nodes") or [job.me])
    if job.result is not None and not is_left_out:
        return _lost(job, now)
    said = Say(f"{_lost_leader(job)}; waiting for another leader")
    job, actions = _seek(job, now, job.policy.rejoin_timeout_seconds)
    return job, [said, *actions]


def _lost_leader(job: JobState) -> str:
    return f"the launcher of {job.describe(job.leader)}, the leader of the job, cannot be reached"


# The leader was lost.


def _lost(job: JobState, now: float, *before: Action) -> Step:
    said = Say(f"{_lost_leader(job)}; looking for another leader")
    job = enter(job, Phase.LOOKING, now, job.policy.rejoin_timeout_seconds)
    return job, [*before, said, Publish(job.status(Standing.LOOKING)), Ask(job.others)]


def _looked(job: JobState, event: Answered) -> Step:
    assert job.attempt is not None
    leader = leader_among(event.heard, job.term)
    if leader is not None:
        return _try(job, leader, event.heard, job.began + job.bound_seconds)
    term = elected(job.me, job.term, event.heard, job.attempt.nodes, job.nodes)
    if term is not None:
        return replace(job, candidate=(job.me, term)), [Lead(term)]
    return _look_on(job, event.now, silent(event.heard, job.attempt.nodes) - {job.me})


def _look_on(job: JobState, now: float, away: set[int]) -> Step:
    if seconds_left(job, now) <= 0:
        what = f"no launcher of this job became leader within {job.bound_seconds:g} s (--rejoin_timeout)"
        if away:
            what += (
                f": {job.named(away)} cannot be reached and may be alive, so this side of the network must not "
                "continue alone unless it is the larger one, or one of two halves with the first node"
            )
        return _no_more(job, what)
    waited = (
        f"waiting for {job.named(away) or 'a launcher'} to lead ({seconds_left(job, now):.0f} s more, --rejoin_timeout)"
    )
    job, said = say_again(job, now, waited)
    return job, [*said, Wait(timeouts.FIND_LEADER_SECONDS)]


def _has_another_leader(job: JobState, event: Connected) -> Step:
    assert job.candidate is not None
    leader, term = job.candidate
    if event.refusal:
        return _no_more(job, event.refusal)
    if not event.connected:
        return _look_on(replace(job, candidate=None), event.now, set())
    if leader != job.me:
        job, shown = _followed(job)
        return _await_decision(job, event.now, shown, Say(f"{job.describe(leader)} is the leader"))
    job, shown = _leads(replace(job, candidate=None), term)
    said = Say(f"{job.describe(leader)} is the leader from now on")
    decision = job.decision or {"round": job.round, "nodes": []}
    return _lead_on(job, event.now, shown, said, Write(decision, with_facts=True))


_STEPS: dict[tuple[Phase, type], Callable[[JobState, Any], Step]] = {
    (Phase.STARTING, Answered): _asked_at_start,
    (Phase.STARTING, Woken): lambda job, _: (job, [Ask(job.others)]),
    (Phase.STARTING, Connected): _connected_at_start,
    (Phase.SEEKING, Answered): _sought,
    (Phase.SEEKING, Woken): lambda job, _: (job, [Ask(_some(job))]),
    (Phase.SEEKING, Connected): _found,
    (Phase.MEETING, StoreSeen): _met,
    (Phase.JOINING, StoreSeen): _decided,
    (Phase.JOINING, Woken): _look_again,
    (Phase.RUNNING, Ended): _ended,
    (Phase.CHECKING, Answered): _checked_for_later_leader,
    (Phase.CHECKING, Connected): _gave_way,
    (Phase.PAUSING, Woken): lambda job, event: _gather(job, event.now),
    (Phase.GATHERING, StoreSeen): _gathered,
    (Phase.GATHERING, Answered): _checked_for_later_leader,
    (Phase.GATHERING, Connected): _gave_way,
    (Phase.GATHERING, Woken): _look_again,
    (Phase.DIVIDED, Answered): _divided,
    (Phase.DIVIDED, Connected): _gave_way,
    (Phase.FOLLOWING, StoreSeen): _decided,
    (Phase.FOLLOWING, Woken): _look_again,
    (Phase.LOOKING, Answered): _looked,
    (Phase.LOOKING, Woken): lambda job, _: (job, [Ask(job.others)]),
    (Phase.LOOKING, Connected): _has_another_leader,
}
"""What happens in a phase when such an event comes."""
