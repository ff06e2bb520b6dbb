"""Who keeps copies and which checkpoint a job goes on from; what one rank's answer, or error, is on all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fleet_train import timeouts
from fleet_train.convert.program_state import SavedState
from fleet_train.convert.saving import Captured
from fleet_train.errors import CheckpointError, NotSaved
from fleet_train.train import agree
from fleet_train.train.checkpoint import claim, copies, manager, storage
from fleet_train.train.checkpoint.copies import Copies
from fleet_train.train.checkpoint.manager import Checkpoints, TrainState
from fleet_train.train.checkpoint.newest import (
    HeldCheckpoint,
    folders_apart,
    held_of,
    latest_run,
    read_record,
    write_record,
)
from fleet_train.train.checkpoint.storage import TrainingRun
from tests.support.agreeing import ThreadRanks
from tests.support.checkpoints import held_by_another_process
from tests.support.checkpoints import publish as published

OLD, NEW = TrainingRun(1, 100.0, "aa"), TrainingRun(2, 50.0, "bb")  # the clocks are not equal


def publish(checkpoints: Path, step: int, content: bytes = b"tensors", run: TrainingRun = OLD) -> Path:
    return published(checkpoints, step, {"step": step}, run=run, content=content, own=b"of each rank")


def files(checkpoints: Path) -> dict[str, bytes]:
    """Those of all checkpoints, drafts included."""
    return {str(path.relative_to(checkpoints)): path.read_bytes() for path in checkpoints.rglob("*step-*/*")}


def names(checkpoints: Path) -> list[str]:
    hidden = (".lock",)
    return (
        sorted(path.name for path in checkpoints.iterdir() if path.name not in hidden) if checkpoints.exists() else []
    )


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
            return do(Copies(self.checkpoints(node), number, keep_best, self.said.append))

        return self.run(work)

    def saving(self, do: Callable[[Checkpoints], Any], number: int = 2, background: bool = True) -> Any:
        """What ``do`` returns or raises on each rank, with the checkpoints of a training."""

        def work(rank: int) -> Any:
            folder = self.checkpoints(rank // (self.size // self.node_num())).parent
            made = Checkpoints(folder, copies=number, background=background, say=self.said.append)
            try:
                return do(made)
            finally:
                made.close()

        return self.run(work)

    def capture_persistables(self, memory: Any = None, ranks: Sequence[int] = (0,)) -> Captured:
        """In place of the facade's: the same state on all ``ranks``."""
        del memory
        held = {"w": np.arange(5.0)} if self.worker_index() in ranks else {}
        return Captured(SavedState(held, {}, []))

    def piece_from(self, holder: int, piece: Any, _: str) -> Any:
        """In place of the job's own connections."""
        if self.worker_index() == holder:
            self._piece = piece
        self.gather(None)
        sent = self._piece.copy()
        self.gather(None)
        return sent

    def held(self) -> list[list[str]]:
        """By node."""
        return [names(self.checkpoints(node)) for node in range(self.node_num())]


@pytest.fixture
def make_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Job]:
    def make(nodes: int, ranks_per_node: int = 1) -> Job:
        job = Job(tmp_path, nodes, ranks_per_node)
        for module in (agree, claim, copies, manager):
            monkeypatch.setattr(module, "fleet", job)
        monkeypatch.setattr(copies, "piece_of", job.piece_from)
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


def damage(folder: Path) -> None:
    (folder / "persistables.safetensors").write_text("{}")


def test_the_newest_checkpoint_comes_once_from_the_node_that_has_it(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(3)
    publish(job.checkpoints(0), 10)
    publish(job.checkpoints(1), 20)
    publish(job.checkpoints(2), 20, b"another one of that step")
    assert job.copied(newest, number=3) == [OLD] * 3
    assert names(job.checkpoints(0)) == ["run.json", "step-00000010", "step-00000020"]
    assert (job.checkpoints(0) / "step-00000020" / "persistables.safetensors").read_bytes().endswith(b"tensors")
    assert b"another" in files(job.checkpoints(2))["step-00000020/persistables.safetensors"], "it had one of that step"
    assert job.said == [
        "--checkpoint_copies 3: checkpoints are kept on "
        + ", ".join(f"rank {rank} (127.0.0.{rank + 2}:6170)" for rank in range(3)),
        "the newest checkpoint, step-00000020, comes from rank 1 (127.0.0.3:6170)",
    ]
    monkeypatch.setattr(copies, "piece_of", None)
    assert job.copied(newest, number=3) == [OLD] * 3, "what a node has is not sent"


def test_a_damaged_checkpoint_gives_way_to_a_whole_one_of_another_node_or_to_an_older_one(make_job: MakeJob) -> None:
    job = make_job(2)
    publish(job.checkpoints(0), 10)
    damage(publish(job.checkpoints(0), 20))
    publish(job.checkpoints(1), 30).joinpath("complete.json").write_text("no JSON")
    assert job.copied(newest) == [OLD] * 2
    assert job.held() == [["damaged", "run.json", "step-00000010"]] * 2
    assert names(job.checkpoints(0) / "damaged") == ["step-00000020"]
    assert any("rank 0 (127.0.0.2:6170): a damaged checkpoint was moved to" in line for line in job.said)
    damage(job.checkpoints(0) / "step-00000010")
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
    real = copies._append
    monkeypatch.setattr(
        copies, "_append", lambda piece, path: "the disk is full" if full in path.parts else real(piece, path)
    )
    job, full = make_job(2), "node0"
    publish(job.checkpoints(0), 5)
    publish(job.checkpoints(1), 10)
    told = "rank 0 (127.0.0.2:6170): step-00000010 did not come from rank 1 (127.0.0.3:6170): the disk is full"
    assert [str(error) for error in job.copied(newest)] == [told] * 2
    full = "node1"
    (job.checkpoints(1) / "step-00000010").rename(job.checkpoints(0) / "step-00000010")
    lacking = job.copied(lambda made: (made.bring_newest(), made.lacking("step-00000010"))[1])
    assert lacking[0] == lacking[1]
    assert "there is no copy on rank 1 (127.0.0.3:6170): the disk is full. Mend that" in lacking[0]
    assert job.said[-1].startswith("no copy on rank 1 (127.0.0.3:6170): the disk is full; training goes on")


def test_what_is_altered_on_its_way_does_not_count(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(2)
    publish(job.checkpoints(1), 10)
    real = copies._append
    monkeypatch.setattr(copies, "_append", lambda piece, path: real(piece ^ ("ranks" in path.name), path))
    (first, _) = job.copied(newest)
    assert "step-00000010 did not come from rank 1" in str(first)
    assert "ranks.safetensors" in str(first)
    assert names(job.checkpoints(0)) == [".copying-step-00000010", "run.json"]


def test_a_run_that_begins_anew_is_later_than_every_other_and_alone(make_job: MakeJob) -> None:
    job, future = make_job(3), TrainingRun(7, 4e9, "a clock that is wrong")
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
    assert job.held() == [["run.json"], ["run.json", "step-00000500"], ["run.json"]], "who writes removes its own"
    assert [read_record(job.checkpoints(node)) for node in range(3)] == [ours] * 3


def test_a_folder_that_another_run_uses_on_another_node_is_refused_on_all(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(made: Copies) -> bool:
        return claim.claim(job.checkpoints(job.worker_index()), made.is_member(), 10.0, must_be_writable=True)

    job = make_job(2)
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
    found = job.copied(lambda made: (made.bring_newest(), made.writers(), made.scalars())[1:], shared=not linked)
    assert found == [([0], {})] * 2
    assert job.said == [
        "--checkpoint_copies 2: all nodes see rank 0's checkpoints in one shared folder, which has each of them once"
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
    assert names(theirs) == ["of-run-aa", "run.json", *saved]
    assert names(theirs / "of-run-aa") == ["step-00000500"]
    assert read_record(theirs) == NEW


def test_a_run_that_rank_0_begins_anew_is_later_although_its_checkpoints_were_removed_before(
    make_job: MakeJob,
) -> None:
    """The other node is away then, and has one whose clock was ahead."""
    ahead = TrainingRun(1, 4e9, "aa")
    job = make_job(1)
    publish(job.checkpoints(0), 500, run=ahead)
    write_record(job.checkpoints(0), ahead)
    storage.remove_others(job.checkpoints(0), TrainingRun())

    (later,) = job.copied(begun)
    assert later.began < ahead.began
    publish(job.checkpoints(0), 20, run=later)
    both = make_job(2)
    publish(both.checkpoints(1), 500, run=ahead)
    assert both.copied(newest) == [later] * 2
    assert both.held() == [["run.json", "step-00000020"], ["of-run-aa", "run.json", "step-00000020"]]


def test_of_two_runs_that_began_apart_only_the_launched_jobs_own_is_continued(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = TrainingRun(3, 100.0, "one"), TrainingRun(3, 200.0, "other")
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


def state(step: int) -> TrainState:
    return TrainState(1, step, 10, 1, {}, {}, {}, {})


def save(*steps: int) -> Callable[[Checkpoints], Any]:
    """Save, and end: the last checkpoint, what is lacking, and the curves."""

    def do(made: Checkpoints) -> Any:
        for step in steps:
            made.save(None, state(step), 0.5)
        written, lacking = made.wait(10.0)
        return written and written.name, lacking, made.scalars()

    return do


@pytest.mark.parametrize("background", [False, True])
def test_the_first_ranks_of_the_next_nodes_write_the_same_bytes(make_job: MakeJob, background: bool) -> None:
    job = make_job(3, ranks_per_node=2)
    found = job.saving(save(10, 20, 30), background=background)
    curves = {"checkpoint/copies": 3.0, "checkpoint/copies_failed": 0.0}
    assert found == [("step-00000030", "", curves)] * 6
    assert names(job.checkpoints(0)) == ["step-00000020", "step-00000030"]
    assert files(job.checkpoints(1)) == files(job.checkpoints(0)) != {}
    assert names(job.checkpoints(2)) == []
    assert job.saving(save(40), number=9, background=background)[0][1:] == ("", {**curves, "checkpoint/copies": 2.0})
    assert job.said[-1].endswith("rank 4 (127.0.0.4:6170), as many as there are")
    assert names(job.checkpoints(2)) == ["step-00000040"]


def test_a_run_that_begins_anew_removes_the_earlier_one_on_every_node_after_its_first_checkpoint(
    make_job: MakeJob,
) -> None:
    job = make_job(3)
    for node in range(3):
        publish(job.checkpoints(node), 500)
    replaced: list[int] = []

    def do(made: Checkpoints) -> Any:
        made.start_new_run(lambda: replaced.append(len(names(job.checkpoints(0)))))
        held = job.held()
        return held, save(10)(made)[:2]

    assert job.saving(do) == [([["step-00000500"]] * 3, ("step-00000010", ""))] * 3
    assert job.held() == [["run.json", "step-00000010"]] * 2 + [["run.json"]]
    assert replaced == [2], "once, on rank 0, while both are there"


def test_a_disk_that_is_full_is_said_at_once_and_its_checkpoint_missed_at_the_end(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, full = storage.begin, {20, 30}

    def begin(checkpoints: Path, step: int) -> Path:
        if "node1" in checkpoints.parts and step in full:
            raise OSError(28, "No space left on device")
        return real(checkpoints, step)

    monkeypatch.setattr(storage, "begin", begin)
    job = make_job(2)
    first, second = job.saving(save(10, 20, 30))
    assert first == second
    assert first[0] == "step-00000030"
    assert first[1].startswith(
        "step-00000030 is whole on rank 0 (127.0.0.2:6170), but --checkpoint_copies 2 asks for more"
    )
    assert "no copy on rank 1 (127.0.0.3:6170): the checkpoint of step 30 could not be written: [Errno 28]" in first[1]
    assert first[2] == {"checkpoint/copies": 1.0, "checkpoint/copies_failed": 2.0}
    assert [line.partition(":")[0] for line in job.said[1:]] == ["no copy on rank 1 (127.0.0.3"] * 2
    full.clear()
    assert job.saving(save(40))[0][1] == "", "only the last checkpoint must be everywhere"
    for error in job.saving(lambda made: (full.add(50), made.save(None, state(50)), made.finish(10.0))):
        assert isinstance(error, NotSaved)


def test_nobody_waits_for_another_nodes_slow_disk_until_the_end(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, go = storage.begin, threading.Event()

    def begin(checkpoints: Path, step: int) -> Path:
        if "node1" in checkpoints.parts and step == 10:
            go.wait(60.0)
        return real(checkpoints, step)

    monkeypatch.setattr(storage, "begin", begin)
    job = make_job(2)

    def do(made: Checkpoints) -> Any:
        for step in (10, 20):
            made.save(None, state(step))
        hung = made.wait(0.3)[1]
        go.set()
        return hung, made.wait(20.0)[1], save(30)(made)[1]

    (hung, skipped, late), same = job.saving(do)
    assert (hung, skipped, late) == same
    assert "the wait for it was over" in hung
    assert "is still taking the checkpoint before" in skipped or "the wait for it was over" in skipped
    assert late == ""
    assert names(job.checkpoints(1)) == ["step-00000010", "step-00000030"]


def test_a_node_that_can_keep_nothing_is_told_unless_others_do(make_job: MakeJob) -> None:
    job = make_job(3)
    job.checkpoints(1).parent.mkdir()
    job.checkpoints(1).touch()
    assert [found[1] for found in job.saving(save(10), number=2)] == [""] * 3
    told, *others = (found[1] for found in job.saving(save(20), number=3))
    assert others == [told] * 2
    assert "no copy on rank 1 (127.0.0.3:6170): " in told
    assert "is not a folder" in told
    two = make_job(2)
    assert two.copied(lambda made: made.writers()) == [[0]] * 2
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


def told(record: TrainingRun, *held: tuple[int, TrainingRun | None]) -> dict[str, Any]:
    entries = [[f"step-{step:08d}", run and run.as_json(), [0, 0, step]] for step, run in held]
    return {"record": record.as_json(), "held": entries}


def test_of_the_latest_run_the_newest_comes_first_and_of_equal_ones_the_lowest_rank() -> None:
    everybody = [told(OLD, (30, OLD)), None, told(TrainingRun(), (10, NEW), (5, NEW)), told(NEW, (10, NEW), (20, None))]
    assert latest_run(everybody) == NEW
    expected = [(20, 3, None), (10, 2, NEW), (10, 3, NEW), (5, 2, NEW)]
    found = [HeldCheckpoint((0, 0, step), rank, run, f"step-{step:08d}") for step, rank, run in expected]
    assert held_of(everybody, NEW) == found


def test_what_does_not_say_its_run_is_of_one_run_and_the_oldest() -> None:
    assert TrainingRun() < OLD < NEW
    untrue = [storage.run_from({**OLD.as_json(), "generation": told}) for told in (-1, "2", 1 << 60)]
    assert untrue == [TrainingRun()] * 3
    assert storage.run_from({"began": 4e9, "id": "without a generation"}) == TrainingRun()
    before = told(TrainingRun(), (10, TrainingRun()))
    assert latest_run([told(TrainingRun()), before]) == TrainingRun()
    assert latest_run([told(TrainingRun(), (1, OLD)), before]) == OLD
    assert latest_run([told(TrainingRun()), None]) is None


def test_names_are_no_paths_of_another_folder(tmp_path: Path) -> None:
    publish(tmp_path, 10, run=TrainingRun(1, 1.0, "../../elsewhere"))
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
