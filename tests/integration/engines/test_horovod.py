"""The same script as processes of horovodrun: itself where it is installed, else what it gives them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.engines.conftest import (
    KILLED_AFTER,
    SAVED_BEFORE,
    SCRIPT,
    assert_equal_bits,
    places,
    train_undisturbed,
)
from tests.support.horovod import horovodruns_server, place_of
from tests.support.processes import Job, clean_environ, python

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), ranks=2, launched=False)


def test_its_processes_are_ranks_and_resume_to_the_same_bits(undisturbed: Path, tmp_path: Path) -> None:
    outputs = []
    for _ in range(2):
        with horovodruns_server() as where, Job(tmp_path / f"run{len(outputs)}") as run:
            for rank in range(2):
                environ = clean_environ({**where, **place_of(rank, 2), "FLEET_TEST_KILL": str(KILLED_AFTER)})
                run.start(f"rank{rank}", python(str(SCRIPT)), environ, tmp_path)
            run.wait(180.0)
            outputs.append(run.report())
    assert outputs[0].count("fleet_train: started by horovodrun: 2 ranks on 1 nodes") == 1, outputs[0]
    assert places(outputs[0]) == [(rank, 2, 1, 0) for rank in range(2)]
    assert places(outputs[1]) == [(rank, 2, 1, SAVED_BEFORE) for rank in range(2)], outputs[1]
    assert_equal_bits(undisturbed, tmp_path)


def test_a_launcher_below_it_starts_this_nodes_ranks(job: Job, tmp_path: Path) -> None:
    launch = ["-m", "fleet_train", "launch", "--nproc_per_node=2", str(SCRIPT)]
    with horovodruns_server() as where:
        job.start("launcher", python(*launch), clean_environ({**where, **place_of(0, 1)}), tmp_path)
        (ended,) = job.wait(180.0)
    assert ended.exit_code == 0, ended.output
    assert "started by horovodrun: process 0 of 1" in ended.output
    assert places(ended.output) == [(0, 2, 1, 0)]


@pytest.mark.skipif(
    shutil.which("horovodrun") is None, reason="horovodrun is not installed (docs/benchmarks/README.md)"
)
def test_horovodrun_itself(job: Job, undisturbed: Path, tmp_path: Path) -> None:
    command = ["horovodrun", "-np", "2", "-H", "localhost:2", *python(str(SCRIPT))]
    job.start("horovodrun", command, clean_environ(), tmp_path)
    (ended,) = job.wait(180.0)
    assert ended.exit_code == 0, ended.output
    assert places(ended.output) == [(0, 2, 1, 0), (1, 2, 1, 0)]
    assert_equal_bits(undisturbed, tmp_path)
