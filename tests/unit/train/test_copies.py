"""Who keeps copies and which checkpoint a job goes on from; what one rank's answer, or error, is on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fleet_train import timeouts
from fleet_train.errors import CheckpointError
from fleet_train.train import agree
from fleet_train.train.checkpoint import claim, copies, storage
from fleet_train.train.checkpoint.copies import Copies
from fleet_train.train.checkpoint.newest import Held, folders_apart, held_of, latest_run, read_record, write_record
from fleet_train.train.checkpoint.storage import Run
from tests.support.agreeing import ThreadRanks
from tests.support.checkpoints import held_by_another_process
from tests.support.checkpoints import publish as published
from tests.support.processes import until
from tests.unit.train.test_copying import files, names, publish

OLD, NEW = Run(1, 100.0, "aa"), Run(2, 50.0, "bb")  # the clocks are not equal


class Job(ThreadRanks):
    """Ranks whose nodes have a disk each."""

    def __init__(self, folder: Path, nodes: int, ranks_per_node: int = 1) -> None:
        super().__init__(nodes, ranks_per_node)
        self.folder = folder
        self.said: list[str] = []

    def checkpoints(self, node: int) -> Path:
        return self.folder / f"node{node}" / "checkpoints"

    def copied(
        self, do: Callable[[Copies], Any], number: int = 2, keep_best: bool = False, shared: bool = False
    ) -> Any:
        """What ``do`` returns or raises on each rank, with copies on so many nodes."""

        def work(rank: int) -> Any:
            node = 0 if shared else rank // (self.size // self.node_num())
            made = Copies(self.checkpoints(node), number, keep_best, self.said.append)
            try:
                return do(made)
            finally:
                made.close()

        return self.run(work)

    def saved(self, made: Copies, wait: float = 10.0) -> tuple[str, dict[str, float]]:
        """What is told at the end, and the curves."""
        made.begin_saving()
        if self.is_first_worker():
            made.offer()
        return made.finish(wait), made.scalars()

    def held(self) -> list[list[str]]:
        """By node."""
        return [names(self.checkpoints(node)) for node in range(self.node_num())]


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    def make(nodes: int, ranks_per_node: int = 1) -> Job:
        job = Job(tmp_path, nodes, ranks_per_node)
        monkeypatch.setattr(copies, "fleet", job)
        monkeypatch.setattr(agree, "fleet", job)
        monkeypatch.setattr(timeouts, "RANKS_SYNC_SECONDS", 0.1)
        return job

    return make


MakeJob = Callable[..., Job]


def newest(made: Copies) -> Any:
    made.bring_newest()
    return made.run


def begun(made: Copies) -> Any:
    made.start_new_run()
    return made.run


def ended(made: Copies) -> str:
    made.holders()
    return made.finish(10.0)


def full_disk(_to: Any, _source: str, folder: Path, *_: Any, **__: Any) -> bool:
    if folder.name == "step-00000010":
        raise CheckpointError("the disk is full")
    return True


def damage(folder: Path) -> None:
    (folder / "persistables.safetensors").write_text("{}")


def test_the_newest_checkpoint_comes_once_from_the_node_that_has_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(3)
    publish(job.checkpoints(0), 10)
    publish(job.checkpoints(1), 20)
    publish(job.checkpoints(2), 20, b"another one of that step")
    assert job.copied(newest) == [OLD] * 3
    assert names(job.checkpoints(0)) == ["run.json", "step-00000010", "step-00000020"]
    assert (job.checkpoints(0) / "step-00000020" / "persistables.safetensors").read_bytes().endswith(b"tensors")
    assert job.said == [
        "--checkpoint_copies 2: checkpoints are kept on rank 0 (127.0.0.2:6170), rank 1 (127.0.0.3:6170)",
        "the newest checkpoint, step-00000020, comes from rank 1 (127.0.0.3:6170)",
    ]
    monkeypatch.setattr(copies, "send", None)
    assert job.copied(newest) == [OLD] * 3, "what rank 0 has is not sent"


def test_a_damaged_checkpoint_gives_way_to_a_whole_one_of_another_node_or_to_an_older_one(make_job: MakeJob) -> None:
    job = make_job(2)
    publish(job.checkpoints(0), 10)
    damage(publish(job.checkpoints(0), 20))
    publish(job.checkpoints(1), 30).joinpath("complete.json").write_text("no JSON")
    assert job.copied(newest) == [OLD] * 2
    assert job.held() == [["damaged", "run.json", "step-00000010"], ["damaged", "run.json"]]
    assert names(job.checkpoints(0) / "damaged") == ["step-00000020"]
    assert any("rank 0 (127.0.0.2:6170): a damaged checkpoint was moved to" in line for line in job.said)
    damage(job.checkpoints(0) / "step-00000010")
    publish(job.checkpoints(1), 10)
    assert job.copied(newest) == [OLD] * 2
    assert storage.read(job.checkpoints(0) / "step-00000010").state == {"step": 10}


def test_nothing_is_moved_and_every_rank_is_told_where_none_is_whole(make_job: MakeJob) -> None:
    job = make_job(2)
    damage(publish(job.checkpoints(1), 20))
    for error in job.copied(newest):
        assert isinstance(error, CheckpointError)
        assert str(error).startswith("rank 1 (127.0.0.3:6170): ")
        assert "persistables.safetensors is cut off before its first tensor 'w'" in str(error)
    assert names(job.checkpoints(1)) == ["run.json", "step-00000020"]


def test_a_newest_one_that_does_not_arrive_is_no_reason_to_go_back(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(2)
    publish(job.checkpoints(0), 5)
    publish(job.checkpoints(1), 10)
    monkeypatch.setattr(copies, "send", full_disk)
    assert [str(error) for error in job.copied(newest)] == ["rank 1 (127.0.0.3:6170): the disk is full"] * 2


def test_a_run_that_begins_anew_is_later_than_every_other_and_alone(make_job: MakeJob) -> None:
    job, future = make_job(3), Run(7, 4e9, "a clock that is wrong")
    assert job.copied(begun) == [read_record(job.checkpoints(node)) for node in range(3)], "it replaces none"
    for node in range(3):
        (job.checkpoints(node) / "run.json").unlink()
    publish(job.checkpoints(1), 500, run=future)
    publish(job.checkpoints(2), 400, run=OLD)
    ours, *others = job.copied(begun)
    assert others == [ours] * 2
    assert ours > future
    assert job.held() == [[], ["step-00000500"], ["step-00000400"]], "until the new run has a checkpoint"
    ours = job.copied(lambda made: (begun(made), made.remove_earlier())[0])[0]
    assert job.held() == [["run.json"]] * 3
    assert [read_record(job.checkpoints(node)) for node in range(3)] == [ours] * 3


def test_a_folder_that_another_run_uses_on_another_node_is_refused_on_all(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(made: Copies) -> bool:
        return claim.claim(job.checkpoints(job.worker_index()), made.is_member(), 10.0, must_be_writable=True)

    job = make_job(2)
    monkeypatch.setattr(claim, "fleet", job)
    monkeypatch.setattr(timeouts, "FOLDER_HERE_SECONDS", 0.2)
    job.checkpoints(1).mkdir(parents=True)
    with held_by_another_process(job.checkpoints(1)) as other:
        said = job.copied(take)
    expected = f"rank 1 (127.0.0.3:6170): {job.checkpoints(1)} is in use by process {other.pid} of "
    assert [str(each)[: len(expected)] for each in said] == [expected] * 2
    assert job.copied(take) == [True] * 2
    for node in range(2):
        claim.release(job.checkpoints(node))


@pytest.mark.parametrize("linked", [False, True])
def test_a_shared_folder_is_seen_and_nothing_is_sent(make_job: MakeJob, linked: bool) -> None:
    job = make_job(2)
    publish(job.checkpoints(0), 10)
    if linked:
        job.checkpoints(1).parent.mkdir()
        job.checkpoints(1).symlink_to(job.checkpoints(0))
    saved = job.copied(lambda made: (made.bring_newest(), job.saved(made)[1])[1], shared=not linked)
    assert saved == [{}, {}]
    assert job.said == [
        "--checkpoint_copies 2: all nodes see rank 0's checkpoints in one shared folder; nothing is sent"
    ]
    assert sorted(path.name for path in job.checkpoints(0).iterdir()) == ["run.json", "step-00000010"]


@pytest.mark.parametrize("later", [0, 1])
@pytest.mark.parametrize("steps", [[20], []], ids=["saved", "only heard of"])
def test_the_run_begun_last_counts_and_others_are_moved_aside(make_job: MakeJob, later: int, steps: list[int]) -> None:
    job = make_job(2)
    ours, theirs = job.checkpoints(later), job.checkpoints(1 - later)
    publish(theirs, 500, run=OLD)
    write_record(ours, NEW)
    for step in steps:
        publish(ours, step, run=NEW)
    assert job.copied(newest) == [NEW] * 2
    saved = [f"step-{step:08d}" for step in steps]
    assert names(ours) == ["run.json", *saved]
    assert names(theirs) == ["of-run-aa", "run.json", *(saved if later else [])]
    assert names(theirs / "of-run-aa") == ["step-00000500"]
    assert read_record(theirs) == NEW


def test_a_run_that_rank_0_begins_anew_is_later_although_its_checkpoints_were_removed_before(
    make_job: MakeJob,
) -> None:
    """The other node is away then, and has one whose clock was ahead."""
    ahead = Run(1, 4e9, "aa")
    job = make_job(1)
    publish(job.checkpoints(0), 500, run=ahead)
    write_record(job.checkpoints(0), ahead)
    storage.remove_others(job.checkpoints(0), Run())

    (later,) = job.copied(begun)
    assert later.began < ahead.began
    publish(job.checkpoints(0), 20, run=later)
    both = make_job(2)
    publish(both.checkpoints(1), 500, run=ahead)
    assert both.copied(newest) == [later] * 2
    assert both.held() == [["run.json", "step-00000020"], ["of-run-aa", "run.json"]]


def test_of_two_runs_that_began_apart_only_the_launched_jobs_own_is_continued(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Run(3, 100.0, "one"), Run(3, 200.0, "other")
    job = make_job(2)
    publish(job.checkpoints(0), 10, run=one)
    publish(job.checkpoints(1), 20, run=other)
    for error in job.copied(newest):
        assert isinstance(error, CheckpointError)
        assert "checkpoints of two runs, 'one' on rank 0 and 'other' on rank 1, each of which began" in str(error)
    assert job.held() == [["step-00000010"], ["step-00000020"]]
    monkeypatch.setattr(storage, "launched_job", lambda _: "one")
    assert job.copied(newest) == [one] * 2


def test_the_best_comes_with_the_newest_where_it_is_kept(make_job: MakeJob) -> None:
    job = make_job(2)
    for step, score in ((10, 0.9), (20, 0.5)):
        published(job.checkpoints(1), step, {"step": step}, score, NEW)
    job.copied(newest, keep_best=True)
    assert names(job.checkpoints(0)) == ["run.json", "step-00000010", "step-00000020"]


def test_what_is_saved_is_kept_on_the_first_rank_of_the_next_node_with_a_folder(make_job: MakeJob) -> None:
    job = make_job(3, ranks_per_node=2)
    publish(job.checkpoints(0), 10)
    assert job.copied(job.saved)[0] == ("", {"checkpoint/copies": 1.0, "checkpoint/copies_failed": 0.0})
    assert files(job.checkpoints(1)) == files(job.checkpoints(0))
    assert names(job.checkpoints(2)) == []
    assert job.copied(job.saved, number=9)[0][1]["checkpoint/copies"] == 1.0  # the second node has it
    assert files(job.checkpoints(2)) == files(job.checkpoints(0))
    assert job.said[-1].endswith("rank 4 (127.0.0.4:6170), as many as there are")


def test_a_copy_that_hangs_is_not_waited_for_longer_than_was_said(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, job = threading.Event(), make_job(2)
    publish(job.checkpoints(0), 10)
    monkeypatch.setattr(copies, "send", lambda *_: go.wait(60.0))
    told, same = job.copied(lambda made: job.saved(made, 0.3)[0])
    go.set()
    assert told == same
    assert told.startswith("step-00000010 is whole on rank 0 (127.0.0.2:6170), but --checkpoint_copies 2 asks for more")
    assert "no copy on rank 1 (127.0.0.3:6170): the wait for its transfer was over before it ended. Mend" in told


def test_what_stays_behind_at_the_end_is_tried_once_more_and_told(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def fails(_to: Any, _source: str, folder: Path, *_: Any) -> bool:
        tries.append(folder.name)
        if len(tries) in fails_at:
            raise CheckpointError("the disk is full")
        return True

    def end(made: Copies) -> str:
        made.begin_saving()
        if job.is_first_worker():
            made.offer()
            until(lambda: bool(tries), 20)
        return made.finish(10.0)

    monkeypatch.setattr(copies, "send", fails)
    job = make_job(2)
    for step in (10, 20):
        publish(job.checkpoints(0), step)
    fails_at = {1, 2}
    told, same = job.copied(end)
    assert told == same
    assert "step-00000020 is whole on rank 0" in told
    assert "no copy on rank 1 (127.0.0.3:6170): the disk is full. Mend that" in told
    assert tries == ["step-00000020"] * 2
    tries.clear()
    fails_at = {1}
    assert job.copied(end) == ["", ""]
    assert tries == ["step-00000020", "step-00000020", "step-00000010"]


def test_only_the_last_checkpoint_must_be_everywhere(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "send", full_disk)
    job = make_job(2)
    assert job.copied(lambda made: made.finish(10.0)) == ["", ""]  # nothing was looked for, or saved
    for step in (10, 20):
        publish(job.checkpoints(0), step)
    assert job.copied(ended) == ["", ""]


def test_a_node_that_can_keep_nothing_is_told_unless_others_do(make_job: MakeJob) -> None:
    job = make_job(3)
    publish(job.checkpoints(0), 10)
    job.checkpoints(1).parent.mkdir()
    job.checkpoints(1).touch()
    assert job.copied(ended, number=2) == [""] * 3
    told, *others = job.copied(ended, number=3)
    assert others == [told] * 2
    assert "no copy on rank 1 (127.0.0.3:6170): " in told
    assert "is not a folder" in told
    two = make_job(2)
    assert two.copied(lambda made: made.begin_saving()) == [None, None]
    assert two.said[0].startswith("no copies of checkpoints on rank 1 (127.0.0.3:6170): ")
    assert two.said[1].endswith("no second node to keep them; checkpoints are kept on rank 0 (127.0.0.2:6170) alone")


@pytest.mark.parametrize(
    ("seen", "apart"),
    [
        ([[0], [1], [2]], [0, 1, 2]),
        ([[0, 1, 2], [0, 1, 2], [0, 1, 2]], [0]),
        ([[0], [1, 2], [1, 2]], [0, 1]),
        ([[0, 2], [1], [0, 2]], [0, 1]),
    ],
)
def test_nodes_that_see_one_folder_count_once(seen: Sequence[Sequence[int]], apart: list[int]) -> None:
    assert folders_apart([0, 1, 2], seen) == apart


def told(record: Run, *held: tuple[int, Run | None]) -> dict[str, Any]:
    entries = [[f"step-{step:08d}", run and run.as_json(), [0, 0, step]] for step, run in held]
    return {"record": record.as_json(), "held": entries}


def test_of_the_latest_run_the_newest_comes_first_and_of_equal_ones_the_lowest_rank() -> None:
    everybody = [told(OLD, (30, OLD)), None, told(Run(), (10, NEW), (5, NEW)), told(NEW, (10, NEW), (20, None))]
    assert latest_run(everybody) == NEW
    expected = [(20, 3, None), (10, 2, NEW), (10, 3, NEW), (5, 2, NEW)]
    found = [Held((0, 0, step), rank, run, f"step-{step:08d}") for step, rank, run in expected]
    assert held_of(everybody, NEW) == found


def test_checkpoints_from_before_runs_were_told_apart_are_one_run_and_the_oldest() -> None:
    earlier = storage.run_from({"began": 4e9, "id": "of a version without generations"})
    assert Run() < earlier < OLD < NEW
    assert [storage.run_from({**OLD.as_json(), "generation": told}) for told in (-1, "2", 1 << 60)] == [Run()] * 3
    before = told(Run(), (10, Run()))
    assert latest_run([told(Run()), before]) == Run()
    assert latest_run([told(Run(), (1, OLD)), before]) == OLD
    assert latest_run([told(Run()), None]) is None


def test_names_are_no_paths_of_another_folder(tmp_path: Path) -> None:
    publish(tmp_path, 10, run=Run(1, 1.0, "../../elsewhere"))
    assert storage.set_aside(tmp_path, NEW) == [tmp_path / "of-run-elsewhere"]


def test_the_newest_has_trained_most_and_without_its_state_it_has_its_place_by_its_step() -> None:
    def order(*held: list[tuple[str, list[int] | None]]) -> list[str]:
        told = [{"record": NEW.as_json(), "held": [[name, NEW.as_json(), done] for name, done in one]} for one in held]
        return [one.name for one in held_of(told, NEW)]

    apart = order([("step-00000253", [11, 0, 253])], [("step-00000180", [12, 0, 180])])
    assert apart == ["step-00000180", "step-00000253"]
    without = order([("step-00000030", None), ("step-00000020", [1, 0, 20]), (".replaced-step-00000010", None)])
    assert without == ["step-00000030", "step-00000020", ".replaced-step-00000010"]


def test_work_of_one_rank_is_told_to_all_and_so_is_a_disk_that_does_not_answer(make_job: MakeJob) -> None:
    work: dict[int, Callable[[], Any]] = {0: lambda: "done", 1: Mock(side_effect=ValueError("not one of ours"))}
    told = make_job(3).run(lambda rank: agree.together(work.get(rank), 60.0))
    assert told[0] == told[1] == told[2]
    problems = [("done", None), (None, "ValueError('not one of ours')"), (None, None)]
    assert [(each["value"], each["problem"]) for each in told[0]] == problems
    go = threading.Event()
    hung = [str(each) for each in make_job(3).run(lambda rank: agree.together({1: go.wait}.get(rank), 0.2))]
    go.set()
    assert hung == [hung[0]] * 3
    assert hung[0].startswith("rank 1 (")
    assert "within 0.2 s: its disk does not answer" in hung[0]


def test_rank_0_answers_for_all_with_its_value_or_its_error(make_job: MakeJob) -> None:
    def asked(question: Callable[[], Any]) -> list[Any]:
        return make_job(2).run(lambda _: agree.ask_first_worker(question))

    count: list[int] = []
    answer = {"folder": "läuft", "none": None}
    assert asked(lambda: count.append(1) or answer) == [answer] * 2
    assert count == [1]
    disk = "rank 0 cannot use its disk: [Errno 28] No space left on device; make that writable, with room left, or "
    for error, said in (
        (CheckpointError("tensor 'w' is missing"), "tensor 'w' is missing"),
        (OSError(28, "No space left on device"), disk + "give another folder"),
    ):
        found = asked(Mock(side_effect=error))
        assert [(type(each), str(each)) for each in found] == [(CheckpointError, said)] * 2
        assert found[1].failed_rank == 0
