"""Who keeps copies and which checkpoint a job goes on from: ranks are threads here, each with a disk of its own."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fleet_train import timeouts
from fleet_train.errors import CheckpointError
from fleet_train.train import agree
from fleet_train.train.checkpoint import claim, copies, storage
from fleet_train.train.checkpoint.copies import Copies, who_keeps
from fleet_train.train.checkpoint.newest import Held, folders_apart, held_of, latest_run, read_record, write_record
from fleet_train.train.checkpoint.storage import Run
from tests.support.checkpoints import publish as published
from tests.support.processes import clean_environ, python
from tests.unit.train.test_checkpoint import HOLDS
from tests.unit.train.test_copying import files, names, publish

OLD, NEW = Run(1, 100.0, "aa"), Run(2, 50.0, "bb")  # the clocks are not equal


class Job:
    """Stands in for the facade: one thread per rank, ``ranks_per_node`` of them on each address."""

    def __init__(self, folder: Path, nodes: int, ranks_per_node: int = 1) -> None:
        self.folder = folder
        self.size = nodes * ranks_per_node
        self.said: list[str] = []
        self._per_node = ranks_per_node
        self._mine = threading.local()
        self._barrier = threading.Barrier(self.size, timeout=20.0)
        self._values: list[Any] = [None] * self.size

    def checkpoints(self, node: int) -> Path:
        return self.folder / f"node{node}" / "checkpoints"

    def worker_index(self) -> int:
        return int(self._mine.rank)

    def is_first_worker(self) -> bool:
        return self.worker_index() == 0

    def local_rank(self) -> int:
        return self.worker_index() % self._per_node

    def node_num(self) -> int:
        return self.size // self._per_node

    def worker_endpoints(self) -> list[str]:
        return [f"127.0.0.{2 + rank // self._per_node}:{6170 + rank % self._per_node}" for rank in range(self.size)]

    def gather(self, value: Any) -> list[Any]:
        self._values[self.worker_index()] = json.loads(json.dumps(value))
        self._barrier.wait()
        told = list(self._values)
        self._barrier.wait()
        return told

    def run(self, do: Callable[[Copies], Any], number: int = 2, keep_best: bool = False, shared: bool = False) -> Any:
        """What ``do`` returns or raises on each rank, with copies on so many nodes."""
        results: list[Any] = [None] * self.size

        def work(rank: int) -> None:
            self._mine.rank = rank
            made = Copies(
                self.checkpoints(0 if shared else rank // self._per_node), number, keep_best, self.said.append
            )
            try:
                results[rank] = do(made)
            except Exception as error:
                results[rank] = error
                if not isinstance(error, CheckpointError):  # which all ranks have at the same place
                    self._barrier.abort()
            made.close()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return results


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


def damage(folder: Path) -> None:
    (folder / "persistables.safetensors").write_text("{}")


def test_the_newest_checkpoint_comes_from_the_node_that_has_it(make_job: MakeJob) -> None:
    job = make_job(3)
    publish(job.checkpoints(0), 10)
    publish(job.checkpoints(1), 20)
    publish(job.checkpoints(2), 20, b"another one of that step")
    assert job.run(newest) == [OLD] * 3
    assert names(job.checkpoints(0)) == ["run.json", "step-00000010", "step-00000020"]
    assert (job.checkpoints(0) / "step-00000020" / "persistables.safetensors").read_bytes().endswith(b"tensors")
    assert job.said == [
        "--checkpoint_copies 2: checkpoints are kept on rank 0 (127.0.0.2:6170), rank 1 (127.0.0.3:6170)",
        "the newest checkpoint, step-00000020, comes from rank 1 (127.0.0.3:6170)",
    ]


def test_what_rank_0_has_is_not_sent(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(2)
    monkeypatch.setattr(copies, "send", None)
    for node in (0, 1):
        publish(job.checkpoints(node), 20)
    assert job.run(newest) == [OLD] * 2


def test_a_damaged_checkpoint_gives_way_to_a_whole_one_of_another_node(make_job: MakeJob) -> None:
    job = make_job(2)
    for node in (0, 1):
        publish(job.checkpoints(node), 20)
    damage(job.checkpoints(0) / "step-00000020")
    assert job.run(newest) == [OLD] * 2
    assert names(job.checkpoints(0)) == ["damaged", "run.json", "step-00000020"]
    assert storage.read(job.checkpoints(0) / "step-00000020").state == {"step": 20}
    assert names(job.checkpoints(0) / "damaged") == ["step-00000020"]
    assert "rank 0 (127.0.0.2:6170): a damaged checkpoint was moved to" in job.said[1]


def test_an_older_whole_one_is_taken_where_the_newer_ones_are_damaged(make_job: MakeJob) -> None:
    job = make_job(2)
    publish(job.checkpoints(0), 10)
    damage(publish(job.checkpoints(0), 20))
    publish(job.checkpoints(1), 30).joinpath("complete.json").write_text("no JSON")
    assert job.run(newest) == [OLD] * 2
    assert names(job.checkpoints(0)) == ["damaged", "run.json", "step-00000010"]
    assert names(job.checkpoints(1)) == ["damaged", "run.json"]


def test_nothing_is_moved_and_every_rank_is_told_where_none_is_whole(make_job: MakeJob) -> None:
    job = make_job(2)
    damage(publish(job.checkpoints(1), 20))
    for error in job.run(newest):
        assert isinstance(error, CheckpointError)
        assert str(error).startswith("rank 1 (127.0.0.3:6170): ")
        assert "persistables.safetensors is cut off before its first tensor 'w'" in str(error)
    assert names(job.checkpoints(1)) == ["run.json", "step-00000020"]


def test_a_newest_one_that_does_not_arrive_is_no_reason_to_go_back(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> bool:
        raise CheckpointError("the disk is full")

    job = make_job(2)
    publish(job.checkpoints(0), 10)
    publish(job.checkpoints(1), 20)
    monkeypatch.setattr(copies, "send", fails)
    assert [str(error) for error in job.run(newest)] == ["rank 1 (127.0.0.3:6170): the disk is full"] * 2


def test_the_run_that_was_begun_last_counts_and_others_are_moved_aside(make_job: MakeJob) -> None:
    job = make_job(2)
    publish(job.checkpoints(0), 500, run=OLD)
    publish(job.checkpoints(1), 20, run=NEW)
    assert job.run(newest) == [NEW] * 2
    assert names(job.checkpoints(0)) == ["of-run-aa", "run.json", "step-00000020"]
    assert names(job.checkpoints(0) / "of-run-aa") == ["step-00000500"]
    assert read_record(job.checkpoints(0)) == NEW


def test_a_run_without_a_checkpoint_counts_where_a_node_has_heard_of_it(make_job: MakeJob) -> None:
    job = make_job(2)
    publish(job.checkpoints(1), 500, run=OLD)
    write_record(job.checkpoints(0), NEW)
    assert job.run(newest) == [NEW] * 2
    assert (names(job.checkpoints(0)), names(job.checkpoints(1))) == (["run.json"], ["of-run-aa", "run.json"])


def test_a_run_that_begins_anew_is_later_than_every_other_and_alone(make_job: MakeJob) -> None:
    def begin(made: Copies) -> Any:
        made.start_new_run()
        return made.run

    job, future = make_job(3), Run(7, 4e9, "a clock that is wrong")
    publish(job.checkpoints(1), 500, run=future)
    publish(job.checkpoints(2), 400, run=OLD)
    ours, *others = job.run(begin)
    assert others == [ours] * 2
    assert ours > future
    kept = [names(job.checkpoints(node)) for node in range(3)]
    assert kept == [[], ["step-00000500"], ["step-00000400"]], "until the new run has a checkpoint"

    def replace(made: Copies) -> Any:
        made.start_new_run()
        made.remove_earlier()
        return made.run

    ours = job.run(replace)[0]
    assert [names(job.checkpoints(node)) for node in range(3)] == [["run.json"]] * 3
    assert [read_record(job.checkpoints(node)) for node in range(3)] == [ours] * 3


def test_a_folder_that_another_run_uses_on_another_node_is_refused_on_all(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(2)
    monkeypatch.setattr(claim, "fleet", job)
    monkeypatch.setattr(timeouts, "FOLDER_HERE_SECONDS", 0.2)
    job.checkpoints(1).mkdir(parents=True)
    command, pipe = python("-c", HOLDS, str(job.checkpoints(1))), subprocess.PIPE
    with subprocess.Popen(command, env=clean_environ(), stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        other.stdout.readline()
        said = job.run(lambda made: take(job, made))
        other.kill()
    expected = f"rank 1 (127.0.0.3:6170): {job.checkpoints(1)} is in use by process {other.pid} of "
    assert [str(each)[: len(expected)] for each in said] == [expected] * 2
    assert job.run(lambda made: take(job, made)) == [True] * 2
    for node in range(2):
        claim.release(job.checkpoints(node))


def take(job: Job, made: Copies) -> bool:
    return claim.claim(job.checkpoints(job.worker_index()), made.is_member(), 10.0, must_be_writable=True)


def test_a_run_that_replaces_none_is_known_to_all_nodes_at_once(make_job: MakeJob) -> None:
    def begin(made: Copies) -> Any:
        made.start_new_run()
        return made.run

    job = make_job(2)
    assert job.run(begin) == [read_record(job.checkpoints(node)) for node in range(2)]


def test_a_run_that_rank_0_begins_anew_is_later_although_its_checkpoints_were_removed_before(
    make_job: MakeJob,
) -> None:
    """The other node is away then, and has one whose clock was ahead."""
    ahead = Run(1, 4e9, "aa")
    job = make_job(1)
    publish(job.checkpoints(0), 500, run=ahead)
    write_record(job.checkpoints(0), ahead)
    storage.remove_others(job.checkpoints(0), Run())

    def begin(made: Copies) -> Any:
        made.start_new_run()
        return made.run

    (later,) = job.run(begin)
    assert later.began < ahead.began
    publish(job.checkpoints(0), 20, run=later)
    both = make_job(2)
    publish(both.checkpoints(1), 500, run=ahead)
    assert both.run(newest) == [later] * 2
    assert names(both.checkpoints(0)) == ["run.json", "step-00000020"]
    assert names(both.checkpoints(1)) == ["of-run-aa", "run.json"]


def test_of_two_runs_that_began_apart_only_the_launched_jobs_own_is_continued(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Run(3, 100.0, "one"), Run(3, 200.0, "other")
    job = make_job(2)
    publish(job.checkpoints(0), 10, run=one)
    publish(job.checkpoints(1), 20, run=other)
    for error in job.run(newest):
        assert isinstance(error, CheckpointError)
        assert "checkpoints of two runs, 'one' on rank 0 and 'other' on rank 1, each of which began" in str(error)
    assert (names(job.checkpoints(0)), names(job.checkpoints(1))) == (["step-00000010"], ["step-00000020"])
    monkeypatch.setattr(storage, "launched_job", lambda _: "one")
    assert job.run(newest) == [one] * 2


def test_the_best_comes_with_the_newest_where_it_is_kept(make_job: MakeJob) -> None:
    job = make_job(2)
    for step, score in ((10, 0.9), (20, 0.5)):
        published(job.checkpoints(1), step, {"step": step}, score, NEW)
    job.run(newest, keep_best=True)
    assert names(job.checkpoints(0)) == ["run.json", "step-00000010", "step-00000020"]


def test_what_is_saved_is_kept_on_the_first_rank_of_the_next_node_with_a_folder(make_job: MakeJob) -> None:
    def save(made: Copies) -> dict[str, float]:
        made.begin_saving()
        if job.is_first_worker():
            made.offer()
        made.finish(10.0)
        return made.scalars()

    job = make_job(3, ranks_per_node=2)
    publish(job.checkpoints(0), 10)
    assert job.run(save)[0] == {"checkpoint/copies": 1.0, "checkpoint/copies_failed": 0.0}
    assert files(job.checkpoints(1)) == files(job.checkpoints(0))
    assert names(job.checkpoints(2)) == []
    assert job.run(save, number=9)[0]["checkpoint/copies"] == 1.0  # the second node has it
    assert files(job.checkpoints(2)) == files(job.checkpoints(0))
    assert job.said[-1].endswith("rank 4 (127.0.0.4:6170), as many as there are")


def test_a_shared_folder_is_seen_and_nothing_is_sent(make_job: MakeJob) -> None:
    def save(made: Copies) -> dict[str, float]:
        made.bring_newest()
        made.begin_saving()
        made.offer()
        made.finish(10.0)
        return made.scalars()

    job = make_job(2)
    publish(job.checkpoints(0), 10)
    assert job.run(save, shared=True) == [{}, {}]
    assert job.said == [
        "--checkpoint_copies 2: all nodes see rank 0's checkpoints in one shared folder; nothing is sent"
    ]
    assert sorted(path.name for path in job.checkpoints(0).iterdir()) == ["run.json", "step-00000010"]


def test_a_link_to_a_shared_folder_is_seen_too(make_job: MakeJob) -> None:
    job = make_job(2)
    publish(job.checkpoints(0), 10)
    job.checkpoints(1).parent.mkdir()
    job.checkpoints(1).symlink_to(job.checkpoints(0))
    job.run(newest)
    assert job.said[0].endswith("in one shared folder; nothing is sent")


def test_a_node_without_a_usable_disk_keeps_no_copies(make_job: MakeJob) -> None:
    job = make_job(2)
    (job.folder / "node1").write_text("no folder")
    assert job.run(lambda made: made.begin_saving()) == [None, None]
    assert job.said[0].startswith("no copies of checkpoints on rank 1 (127.0.0.3:6170): ")
    assert job.said[1].endswith(
        "there is no second node to keep them; checkpoints are kept on rank 0 (127.0.0.2:6170) alone"
    )


def test_a_copy_that_hangs_is_not_waited_for_longer_than_was_said(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def hangs(*_: Any) -> bool:
        return go.wait(60.0)

    def save(made: Copies) -> str:
        made.begin_saving()
        if job.is_first_worker():
            publish(job.checkpoints(0), 10)
            made.offer()
        return made.finish(0.3)

    job = make_job(2)
    monkeypatch.setattr("fleet_train.train.checkpoint.copies.send", hangs)
    told, same = job.run(save)
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
        if folder.name == "step-00000020" and len(tries) in fails_at:
            raise CheckpointError("the disk is full")
        return True

    def end(made: Copies) -> str:
        made.begin_saving()
        if job.is_first_worker():
            made.offer()
            while len(tries) < 1:
                time.sleep(0.01)
        return made.finish(10.0)

    monkeypatch.setattr("fleet_train.train.checkpoint.copies.send", fails)
    job = make_job(2)
    publish(job.checkpoints(0), 10)
    publish(job.checkpoints(0), 20)
    fails_at = {1, 2}
    told, same = job.run(end)
    assert told == same
    assert "step-00000020 is whole on rank 0" in told
    assert "no copy on rank 1 (127.0.0.3:6170): the disk is full. Mend that" in told
    assert tries == ["step-00000020"] * 2
    tries.clear()
    fails_at = {1}
    assert job.run(end) == ["", ""]
    assert tries == ["step-00000020", "step-00000020", "step-00000010"]


def test_only_the_last_checkpoint_must_be_everywhere(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_to: Any, _source: str, folder: Path, *_: Any) -> bool:
        if folder.name == "step-00000010":
            raise CheckpointError("the disk is full")
        return True

    monkeypatch.setattr("fleet_train.train.checkpoint.copies.send", fails)
    job = make_job(2)
    assert job.run(lambda made: made.finish(10.0)) == ["", ""]  # nothing was looked for, or saved
    publish(job.checkpoints(0), 10)
    publish(job.checkpoints(0), 20)
    assert job.run(lambda made: (made.holders(), made.finish(10.0))[1]) == ["", ""]


def test_a_node_that_can_keep_nothing_is_told_unless_others_do(make_job: MakeJob) -> None:
    job = make_job(3)
    publish(job.checkpoints(0), 10)
    job.checkpoints(1).parent.mkdir()
    job.checkpoints(1).touch()
    assert job.run(lambda made: (made.holders(), made.finish(10.0))[1], number=2) == [""] * 3
    told, *others = job.run(lambda made: (made.holders(), made.finish(10.0))[1], number=3)
    assert others == [told] * 2
    assert "no copy on rank 1 (127.0.0.3:6170): " in told
    assert "is not a folder" in told


def test_work_of_one_rank_is_told_to_all(make_job: MakeJob) -> None:
    def fails() -> None:
        raise ValueError("not one of ours")

    def work(_: Copies) -> list[Any]:
        return agree.together({0: lambda: "done", 1: fails}.get(job.worker_index()), 60.0)

    job = make_job(3)
    told = job.run(work)
    assert told[0] == told[1] == told[2]
    assert [(each["value"], each["problem"]) for each in told[0]] == [
        ("done", None),
        (None, "ValueError('not one of ours')"),
        (None, None),
    ]


def test_a_node_whose_disk_does_not_answer_is_named_on_every_rank(make_job: MakeJob) -> None:
    go = threading.Event()

    def work(_: Copies) -> list[Any]:
        return agree.together({1: go.wait}.get(job.worker_index()), 0.2)

    job = make_job(3)
    told = [str(each) for each in job.run(work)]
    go.set()
    assert told == [told[0]] * 3
    assert told[0].startswith("rank 1 (")
    assert "within 0.2 s: its disk does not answer" in told[0]


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
    assert held_of(everybody, NEW) == [
        Held((0, 0, 20), 3, None, "step-00000020"),
        Held((0, 0, 10), 2, NEW, "step-00000010"),
        Held((0, 0, 10), 3, NEW, "step-00000010"),
        Held((0, 0, 5), 2, NEW, "step-00000005"),
    ]


def test_what_has_trained_most_is_the_newest_also_where_more_ranks_count_fewer_steps() -> None:
    on_two, on_three = ["step-00000253", NEW.as_json(), [11, 0, 253]], ["step-00000180", NEW.as_json(), [12, 0, 180]]
    everybody = [{"record": NEW.as_json(), "held": [on_two]}, {"record": NEW.as_json(), "held": [on_three]}]
    assert [one.name for one in held_of(everybody, NEW)] == ["step-00000180", "step-00000253"]


def test_a_checkpoint_that_is_out_of_the_way_or_cannot_be_read_has_its_place_by_its_step() -> None:
    replaced, damaged = [".replaced-step-00000010", NEW.as_json(), None], ["step-00000030", None, None]
    everybody = [{"record": NEW.as_json(), "held": [damaged, ["step-00000020", NEW.as_json(), [1, 0, 20]], replaced]}]
    assert [one.name for one in held_of(everybody, NEW)] == [damaged[0], "step-00000020", replaced[0]]


def test_checkpoints_from_before_runs_were_told_apart_are_one_run_and_the_oldest() -> None:
    earlier = storage.run_from({"began": 4e9, "id": "of a version without generations"})
    assert Run() < earlier < OLD < NEW
    assert [storage.run_from({**OLD.as_json(), "generation": told}) for told in (-1, "2", 1 << 60)] == [Run()] * 3
    before = told(Run(), (10, Run()))
    assert latest_run([told(Run()), before]) == Run()
    assert latest_run([told(Run(), (1, OLD)), before]) == OLD
    assert latest_run([told(Run()), None]) is None


def test_who_keeps_them_is_said_in_one_line() -> None:
    assert who_keeps(2, 3, ["a", "b", "c"]) == "checkpoints are kept on a, b"
    assert who_keeps(3, 2, ["a", "b"]) == "checkpoints are kept on a, b, as many as there are"
    assert who_keeps(2, 2, ["a"]) == "all nodes see rank 0's checkpoints in one shared folder; nothing is sent"
    assert who_keeps(2, 1, ["a"]).startswith("there is no second node to keep them")


def test_names_are_no_paths_of_another_folder(tmp_path: Path) -> None:
    publish(tmp_path / "checkpoints", 10, run=Run(1, 1.0, "../../elsewhere"))
    (aside,) = storage.set_aside(tmp_path / "checkpoints", NEW)
    assert aside == tmp_path / "checkpoints" / "of-run-elsewhere"
