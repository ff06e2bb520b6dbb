"""Ranks that an engine has started compute with the settings that the launcher gives its own."""

from __future__ import annotations

import pytest

from fleet_train.cluster import advice
from fleet_train.cluster.engines import Started
from tests.unit.cluster.test_engines import HYDRA, INDEXED_JOB, SLURM


def test_a_rank_of_an_engine_gets_its_share_and_keeps_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "usable_processors", lambda: 8)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(advice, "is_amd_processor", lambda: True)
    monkeypatch.setattr(advice, "_computes_on_cpu", lambda: True)
    environ = {**HYDRA, "FLAGS_new_executor_serial_run": "0"}
    advice.advise_this_process(environ, loaded=())
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
    advice.advise_this_process(environ, loaded)
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
    assert advice.threads_of_rank(environ, Started("an engine", 0, 8, local_count=4), usable, 12) == expected


def test_a_gpu_build_gets_threads_alone() -> None:
    assert advice.advice_for_rank(0, computes_on_cpu=False, is_amd=True) == {"OMP_NUM_THREADS": "1"}
