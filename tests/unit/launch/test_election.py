"""Which launcher may lead, from the states that the others report."""

from __future__ import annotations

import pytest

from fleet_train.launch.election import (
    Heard,
    Standing,
    Status,
    Unheard,
    elected,
    is_at_work,
    leader_among,
    may_go_on,
)

LOOKING = Status(Standing.LOOKING, 0, 3)
FRESH = Status(Standing.FRESH)
FOLLOWING = Status(Standing.FOLLOWING, 0, 3)
NODES = (0, 1, 2)


@pytest.mark.parametrize(
    ("me", "heard", "term"),
    [
        (1, {0: Unheard.DEAD, 2: LOOKING}, 4),
        (2, {0: Unheard.DEAD, 1: LOOKING}, None),  # node 1 comes before it
        (1, {0: Unheard.SILENT, 2: LOOKING}, 4),  # two of three
        (1, {0: Unheard.SILENT, 2: Unheard.SILENT}, None),  # one of three
        (1, {0: Unheard.DEAD, 2: Unheard.SILENT}, None),  # node 2 may have gone on with node 0 before
        (2, {0: Unheard.DEAD, 1: Unheard.SILENT}, None),
        (2, {0: Unheard.DEAD, 1: Unheard.DEAD}, 5),
        (1, {0: FRESH, 2: LOOKING}, 4),  # started again, knows nothing: it has nothing to decide with
        (1, {0: Unheard.DEAD, 2: FOLLOWING}, None),  # node 2 still hears the leader, or has not noticed yet
        (1, {0: Unheard.DEAD, 2: Status(Standing.LOOKING, 1, 7)}, 10),
    ],
)
def test_the_first_living_node_of_the_larger_side_is_elected(me: int, heard: Heard, term: int | None) -> None:
    assert elected(me, 3, heard, NODES, 3) == term


def test_the_latest_term_leads_and_a_job_is_running_if_a_node_has_known_a_leader() -> None:
    heard = {0: Status(Standing.LEADING, 0, 3), 1: Status(Standing.LEADING, 1, 4), 2: FOLLOWING}
    assert leader_among(heard, 3) == 1
    assert leader_among(heard, 5) is None
    assert not is_at_work({0: FRESH, 1: Unheard.DEAD})
    assert is_at_work({0: FRESH, 1: LOOKING})
    # nodes that took no part do not count
    assert elected(1, 0, {0: Unheard.DEAD, 2: Unheard.SILENT, 3: Unheard.SILENT}, (0, 1), 4) == 1


def test_both_sides_of_a_broken_network_never_continue() -> None:
    for count in range(2, 7):
        everybody = set(range(count))
        for bits in range(1, 2**count - 1):
            here = {node for node in everybody if bits >> node & 1}
            assert may_go_on(here, everybody - here, set()) != may_go_on(everybody - here, here, set())
            for dead in everybody - here:  # it may have been on the other side
                if rest := everybody - here - {dead}:
                    assert may_go_on(here, rest, {dead}) == may_go_on(here, everybody - here, set())
    assert may_go_on({1}, set(), {0, 2})


def test_a_status_that_is_none_is_refused() -> None:
    for told in (None, {}, {"state": "king", "leader": 0, "term": 0}, {"state": "leading", "leader": "x", "term": 1}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Status.from_json(told)
    assert Status.from_json(LOOKING.to_json()) == LOOKING
