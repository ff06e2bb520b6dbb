"""Losses and networks of ``tests.joint_batch``: ranks of unlike batches reach what one process does with all the data,
or the line is named where they cannot.

``make test`` trains one of each kind, `make test-long` all: by default, with micro-batches, and with one more profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from tests.joint_batch import cases
from tests.joint_batch.judge import Verdict, judge
from tests.joint_batch.profiles import IN_TURN, WAYS, Job

CASES = cases()
_PART = 60
# One of each kind; the others differ in how their authors write them.
SHORT = (
    "plain_mean", "cross_entropy_ignore_index", "cross_entropy_weights_and_ignore", "nll_weighted", "sum_and_l2",
    "times_worker_num", "masked_mean_large_epsilon", "masked_mean_clip", "masked_select", "boolean_index",
    "weights_with_mean_one", "size_from_numel", "own_count_fed", "static_masked_mean", "standard_deviation",
    "soft_dice", "tversky", "learned_weights", "normalized_by_hand", "class_balance", "padded_sequence",
    "bert_masked_words", "proposals", "adversaries", "contrastive", "unequal_parts_joined",
    "cond_on_numbers", "cond_with_sums_inside",
)  # fmt: skip
MERGED = ("several_means", "masked_mean_clip", "masked_mean_large_epsilon", "cross_entropy_weights_and_ignore", "focal")
OTHERS = {
    "int8": "masked_mean", "sharding": "masked_mean", "rows": "masked_mean", "recompute": "soft_dice",
    "amp": "masked_mean_clip", "sync": "masked_mean", "equal": "masked_mean", "ranks": "plain_mean",
}  # fmt: skip
NAMED = (
    ("contrastive", "strict"),
    ("all_but_the_first", "strict"),
    ("two_masks", "strict, merge"),
    ("root_of_mean", "strict, merge"),
)
IN_TIME = [
    *[Job(name, "momentum", 2, "default") for name in SHORT],
    *[Job(name, "momentum", 2, "merge") for name in MERGED],
    *[Job(name, "momentum", 2, way) for way, name in OTHERS.items()],
    *[Job(name, "momentum", 2, way) for name, way in NAMED],
]


def matrix() -> list[Job]:
    """Every case by default, on 2 to 4 ranks in turn, and with micro-batches or with another profile."""
    jobs = []
    for number, name in enumerate(CASES):
        other = "merge" if number % 2 else IN_TURN[number // 2 % len(IN_TURN)]
        jobs.append(Job(name, ("momentum", "adam")[number // 3 % 2], 2 + number % 3, "default"))
        jobs.append(Job(name, "momentum", 2, other))
    return [job for job in jobs if job.way not in CASES[job.case].without]


MATRIX = matrix()


def judged(jobs: Sequence[Job], factory: pytest.TempPathFactory) -> dict[Job, Verdict]:
    return {verdict.job: verdict for verdict in judge(jobs, factory.mktemp("judge") / "jobs")}


@pytest.fixture(scope="module")
def in_time(tmp_path_factory: pytest.TempPathFactory) -> dict[Job, Verdict]:
    return judged(IN_TIME, tmp_path_factory)


@pytest.fixture(scope="module")
def of_matrix(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], Verdict]:
    """Judges jobs in parts, each within a test's time."""
    found: dict[Job, Verdict] = {}

    def verdict(job: Job) -> Verdict:
        if job not in found:
            first = MATRIX.index(job) // _PART * _PART
            found.update(judged(MATRIX[first : first + _PART], tmp_path_factory))
        return found[job]

    return verdict


def each(jobs: Iterable[Job]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("job", jobs, ids=lambda job: f"{job.label}, {job.ranks} ranks")


@each(IN_TIME)
def test_ranks_train_as_one_process_or_name_the_line(in_time: dict[Job, Verdict], job: Job) -> None:
    assert not in_time[job].wrong, in_time[job]


@each([job for job in IN_TIME if WAYS[job.way].strict])
def test_what_is_named_is_an_error_with_strict(in_time: dict[Job, Verdict], job: Job) -> None:
    assert "ConversionError" in in_time[job].refused


@pytest.mark.long
@each(MATRIX)
def test_every_case_with_several_profiles(of_matrix: Callable[[Job], Verdict], job: Job) -> None:
    verdict = of_matrix(job)
    assert not verdict.wrong, verdict
