"""Ranks that an engine started get the same environment advice as those of the launcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fleet_train.cluster import at_import
from fleet_train.cluster.started import Started
from tests.unit.cluster.test_engines import HYDRA, INDEXED_JOB, SLURM


def test_a_rank_of_an_engine_gets_its_share_and_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_import, "usable_processors", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(at_import, "is_amd_processor", lambda: True)
    monkeypatch.setattr(at_import, "_computes_on_cpu", lambda: True)
    environ = {**HYDRA, "FLAGS_new_executor_serial_run": "0"}
    at_import.advise_this_process(environ, loaded=())
    set_now = {name: value for name, value in environ.items() if name not in HYDRA}
    assert set_now == {
        "OMP_NUM_THREADS": "4",
        "FLAGS_new_executor_serial_run": "0",
        "FLAGS_new_executor_sequential_run": "1",
        "MKL_DEBUG_CPU_TYPE": "5",
    }


@pytest.mark.parametrize(
    ("environ", "loaded"),
    [
        ({}, ()),
        (HYDRA, ("paddle",)),
        ({**SLURM, "SLURM_NODEID": "9"}, ()),  # a contradiction: fleet.init tells of it
        ({**INDEXED_JOB, "FLEET_TRAIN_STORE": "10.0.0.1:6171"}, ()),  # a rank of the launcher, which has done it
    ],
)
def test_nothing_is_set_elsewhere(environ: dict[str, str], loaded: tuple[str, ...]) -> None:
    before = dict(environ)
    at_import.advise_this_process(environ, loaded)
    assert environ == before


@pytest.mark.parametrize(
    ("environ", "usable", "expected"),
    [
        ({"SLURM_CPUS_PER_TASK": "6"}, 12, 6),
        ({}, 12, 3),  # nobody has bound it: four ranks share the machine
        ({}, 3, 3),  # bound to three already
    ],
)
def test_the_threads_of_a_rank(environ: dict[str, str], usable: int, expected: int) -> None:
    assert at_import.threads_of_rank(environ, Started("an engine", 0, 8, local_count=4), usable, 12) == expected


def test_a_gpu_build_gets_threads_alone() -> None:
    assert at_import.advice_for_rank(0, computes_on_cpu=False, is_amd=True) == {"OMP_NUM_THREADS": "1"}


def test_a_process_that_an_engine_started_alone_is_not_changed() -> None:
    environ = {**HYDRA, "PMI_RANK": "0", "PMI_SIZE": "1"}
    at_import.advise_this_process(environ, loaded=())
    assert "OMP_NUM_THREADS" not in environ


def test_an_engine_that_does_not_say_how_many_share_the_machine_is_taken_for_one() -> None:
    assert at_import.threads_of_rank({}, Started("an engine", 0, 8), 12, 12) == 12


def test_the_processors_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert at_import.usable_processors() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert at_import.usable_processors() == len(allowed)
    monkeypatch.delattr(os, "sched_getaffinity")  # as on other systems than Linux
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert at_import.usable_processors() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert at_import.usable_processors() == 1


def test_a_processor_of_amd_is_known_by_its_name(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    assert not at_import.is_amd_processor(info)
    info.write_text("vendor_id : GenuineIntel\n")
    assert not at_import.is_amd_processor(info)
    info.write_bytes(b"\xff vendor_id : AuthenticAMD\n")
    assert at_import.is_amd_processor(info)


def test_a_rank_that_was_bound_to_some_processors_uses_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_import, "usable_processors", lambda: 3)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    environ = dict(HYDRA)
    at_import.advise_this_process(environ, loaded=())
    assert environ["OMP_NUM_THREADS"] == "3"
