"""tools/compare_checkouts.py: it sees one bit, and its record names no path of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_train.profile.catalogue import profile_names
from tests.support.processes import ROOT
from tools import compare_checkouts
from tools.compare_checkouts import FIGURES, SHORTENED, TIMED, compare, differences, measure, write_record

RANKS = 2


def save(folder: Path, values: np.ndarray[Any, Any], parts: tuple[str, ...] = ("trained", "saved", "resumed")) -> None:
    folder.mkdir(exist_ok=True)
    for case in (0, 1):
        for part in parts:
            for rank in range(RANKS):
                np.savez(folder / f"dgc-{case}-{part}-{rank}.npz", weight=values)


def one_bit_off(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    changed: np.ndarray[Any, Any] = values.copy()
    changed.view(np.uint32)[1] ^= 1
    return changed


def test_equal_values_have_no_difference_and_one_bit_is_named(tmp_path: Path) -> None:
    values = np.array([1.0, 2.0, np.nan], np.float32)
    save(tmp_path / "one", values)
    save(tmp_path / "other", values)
    assert list(differences(tmp_path / "one", tmp_path / "other", "dgc", RANKS)) == []
    save(tmp_path / "other", one_bit_off(values), ("resumed",))
    first, *more = differences(tmp_path / "one", tmp_path / "other", "dgc", RANKS)
    assert first.startswith("weight (Momentum, resumed, rank 0): differs by up to 2.38e-07")
    assert len(more) == 3


def test_what_was_taken_over_is_compared_with_what_the_first_checkout_resumed(tmp_path: Path) -> None:
    values = np.array([1.0, 2.0], np.float32)
    save(tmp_path / "one", values)
    save(tmp_path / "other", values)
    save(tmp_path / "other", one_bit_off(values), ("taken_over",))
    first = next(differences(tmp_path / "one", tmp_path / "other", "dgc", RANKS))
    assert first.startswith("weight (Momentum, taken_over, rank 0)")


@pytest.mark.parametrize(
    ("runs", "result"),
    [("aaa", "equal"), ("aab", "different"), ("aba", "not repeatable"), ("a-a", "failed")],
)
def test_a_row_tells_a_difference_from_noise_and_from_a_failure(
    runs: str, result: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.array([1.0, 2.0], np.float32)
    which = {"before": 0, "again": 1, "after": 2}

    def run_all(*given: Any) -> dict[str, str]:
        folder, other = given[3:]
        assert (other is None) == (folder.name != "after")
        kind = runs[which[folder.name]]
        if kind != "-":
            save(folder, values if kind == "a" else one_bit_off(values))
        return {} if kind != "-" else {"dgc": "exit code 1: rank 1 said why"}

    monkeypatch.setattr(compare_checkouts, "run_all", run_all)
    (row,) = compare({"before": Path(), "after": Path()}, [RANKS], ["dgc"])
    assert row["result"] == result
    assert bool(row["first"]) == (result != "equal")


def test_the_shortened_and_the_timed_profiles_are_shipped() -> None:
    assert {*SHORTENED, *TIMED} <= set(profile_names())


def test_a_record_names_commits_and_no_path(tmp_path: Path) -> None:
    rows = [{"profile": "dgc", "ranks": 2, "result": "different", "first": "weight differs"}]
    write_record(tmp_path / "r", {"before": "1234567890", "after": "abcdefabcd with changes"}, rows, times=False)
    page, record = (tmp_path / "r.md").read_text(), (tmp_path / "r.json").read_text()
    assert "| dgc | 2 | different | weight differs |" in page
    command = "tools/compare_checkouts.py --before 1234567890 --after abcdefabcd --profiles dgc --ranks 2`"
    assert command in page
    assert str(tmp_path) not in page + record
    assert str(ROOT) not in page + record


def test_a_record_of_times_has_medians_and_all_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first two do not count. The order alternates: before and after, after and before, before and after.
    seconds = iter([9.0, 9.0, *(2.0, 1.0), *(2.0, 4.0), *(1.0, 2.0)])

    def timed(*_: Any) -> dict[str, float]:
        return dict.fromkeys(FIGURES, next(seconds))

    monkeypatch.setattr(compare_checkouts, "_timed", timed)
    (row,) = measure({"before": Path(), "after": Path()}, [2], ["dgc"], rounds=3)
    assert row["step_seconds"] == {"before": 2.0, "after": 2.0, "ratio": 0.5}
    assert len(row["rounds"]) == 3
    write_record(tmp_path / "r", {"before": "1234567890", "after": "abcdefabcd"}, [row], times=True)
    page = (tmp_path / "r.md").read_text()
    assert "| dgc | 2 | step seconds | 2.0 | 2.0 | 0.5 |" in page
    assert "--ranks 2 --times --rounds 3`" in page
