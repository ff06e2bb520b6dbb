from __future__ import annotations

import pytest

from fleet_train.plan.price import Phase, Task, finish_times


def task(queue: int, ready: float, *phases: tuple[str, float]) -> Task:
    return Task(queue, tuple(Phase(*phase) for phase in phases), ready)


def test_task_starts_when_it_is_ready() -> None:
    assert finish_times([task(0, 3.0, ("", 1.0), ("wire", 2.0))]) == [6.0]


def test_queue_keeps_its_order() -> None:
    assert finish_times([task(0, 5.0, ("wire", 1.0)), task(0, 0.0, ("wire", 1.0))]) == [6.0, 7.0]


def test_two_queues_share_a_resource() -> None:
    assert finish_times([task(0, 0.0, ("wire", 2.0)), task(1, 0.0, ("wire", 2.0))]) == [4.0, 4.0]


def test_shorter_one_leaves_the_rest_to_the_other() -> None:
    assert finish_times([task(0, 0.0, ("wire", 3.0)), task(1, 0.0, ("wire", 1.0))]) == [4.0, 2.0]


def test_waiting_and_other_resources_are_not_shared() -> None:
    both = [task(0, 0.0, ("", 1.0), ("wire", 2.0)), task(1, 0.0, ("", 1.0), ("bus", 2.0))]
    assert finish_times(both) == [3.0, 3.0]


def test_late_arrival_shares_from_then_on() -> None:
    ends = finish_times([task(0, 0.0, ("wire", 4.0)), task(1, 2.0, ("wire", 1.0))])
    assert ends == pytest.approx([5.0, 4.0])


def test_task_without_work_ends_when_it_is_ready() -> None:
    assert finish_times([task(0, 2.0), task(0, 0.0, ("wire", 1.0))]) == [2.0, 3.0]


def test_nothing_to_do() -> None:
    assert finish_times([]) == []
