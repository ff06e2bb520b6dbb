"""The page about Fleet 1.8's settings: each setting of Paddle 1.8.5 has a row, and each row has the fate that is told.

``fleet_1_8.json`` has names and defaults as Paddle 1.8.5 itself gave them.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from fleet_train.convert.strategy import DistributedStrategy
from fleet_train.errors import ProfileError
from fleet_train.profile.fleet_fields import outcome_of
from fleet_train.profile.knobs import FATES
from fleet_train.profile.schema import FLAG_KNOBS, KNOBS
from tools.docs_site import fleet_1_8

GROUPS = {group["kind"]: group["rows"] for group in fleet_1_8.data()["groups"]}
ROWS = {row["name"]: (kind, row) for kind, rows in GROUPS.items() for row in rows}
FIELDS = {name: kind for name, (kind, _) in ROWS.items() if kind.endswith("strategy")}
RECORD = json.loads(Path(__file__).with_name("fleet_1_8.json").read_text())
# What the articles name beside them.
RECIPE = """
    local_sgd_is_warm_steps local_sgd_steps fetch_frequency FLAGS_sync_nccl_allreduce
    FLAGS_fraction_of_gpu_memory_to_use FLAGS_selected_gpus NCCL_IB_DISABLE NCCL_DEBUG
""".split()
# Values other than the default that 1.8 took.
OTHERS: dict[str, Any] = {
    "mode": "collective",
    "collective_mode": "local_sgd",
    "dist_fc_config": {},
    "recompute_checkpoints": ["fc_0.w_0"],
    "fetch_frequency": 2,
    "reduce_strategy": 1,
    "gradient_scale_strategy": 1,
    "debug_graphviz_path": "graph.dot",
    "trainers_endpoints": ["127.0.0.1:6170"],
    "memory_optimize": True,
    "mkldnn_enabled_op_types": {"conv2d"},
}


def other_value(name: str) -> Any:
    if name in OTHERS:
        return OTHERS[name]
    default = json.loads(ROWS[name][1]["default"].lower())
    return not default if isinstance(default, bool) else default + 2


@pytest.mark.parametrize("group", [name for name in RECORD if name != "note"])
def test_every_setting_of_paddle_1_8_has_a_row_with_its_default(group: str) -> None:
    for name, default in RECORD[group].items():
        _, row = ROWS[f"--{name}" if group == "launch" else name]
        assert row["default"] in (str(default), repr(default)), name


def test_every_setting_of_the_recipe_and_every_old_flag_has_a_row_and_no_setting_has_two() -> None:
    assert {*RECIPE, *FLAG_KNOBS} <= ROWS.keys()
    assert len(ROWS) == sum(map(len, GROUPS.values()))


@pytest.mark.parametrize("name", FIELDS)
def test_the_fate_of_a_field_is_what_happens_to_it(name: str) -> None:
    kind, row = ROWS[name]
    fate, path = fleet_1_8.fate_of(kind, row), fleet_1_8.path_of(kind, name)
    owner: Any = DistributedStrategy()
    owner = owner if kind == "strategy" else getattr(owner, kind)
    if fate == "refused":
        with pytest.raises(ProfileError, match=name):
            setattr(owner, name, other_value(name))
        return
    setattr(owner, name, other_value(name))
    outcome = outcome_of(path, other_value(name))
    if fate == "mapped":
        assert outcome.sentence or KNOBS[name].fate == "mapped"
    else:
        assert (fate, outcome.sentence, len(outcome.settings)) == ("carried out", "", 1)


def test_fates_of_variables_and_flags() -> None:
    told = {
        name: fleet_1_8.fate_of(kind, row) for name, (kind, row) in ROWS.items() if kind in ("environment", "launch")
    }
    assert {name for name, fate in told.items() if fate == "refused"} == {
        "FLAGS_selected_gpus", "PADDLE_TRAINER_ID", "--print_config", "--log_level"
    }  # fmt: skip
    assert {name for name, fate in told.items() if fate == "mapped"} == {
        *FLAG_KNOBS,
        "FLAGS_fraction_of_gpu_memory_to_use",
    }
    assert set(told.values()) == set(FATES)
    with pytest.raises(KeyError):
        fleet_1_8.fate_of("launch", {"name": "--no_such_flag"})
    with pytest.raises(KeyError):
        fleet_1_8.fate_of("strategy", {"name": "no_such_field"})


def test_the_pages_are_those_of_the_tables_and_every_row_has_both_languages() -> None:
    assert fleet_1_8.problems() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda row: row["today"].pop("zh"), "nccl_comm_num: today has no text in zh"),
        (lambda row: row.pop("use"), "nccl_comm_num: use has no text in en"),
        (lambda row: row["then"].update(zh="communicators"), "nccl_comm_num: then is not Chinese"),
        (lambda row: row["then"].update(en="communicators"), "docs/fleet-1.8.md: differs from the tables; run"),
    ],
)
def test_a_row_without_a_language_and_a_page_of_other_rows_are_found(
    change: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = copy.deepcopy(fleet_1_8.data())
    change(changed["groups"][0]["rows"][0])
    monkeypatch.setattr(fleet_1_8, "data", lambda: changed)
    found = fleet_1_8.problems()
    assert any(said in line for line in found)
    assert len(found) <= 2
