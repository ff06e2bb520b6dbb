"""The catalogue, what is generated from the knob table, and the command that shows both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fleet_train.cli.profile_tables import FIRST
from fleet_train.cli.profiles import command
from fleet_train.errors import ProfileError
from fleet_train.profile import applied_mappings, catalogue, export, load_profile, profile_names
from tests.support.processes import ROOT

FEW_FETCHES = {"fetch_frequency": 2}
LOCAL_SGD = FEW_FETCHES | {"use_local_sgd": True, "local_sgd_is_warm_steps": 100}
ASKED: dict[str, dict[str, Any]] = {
    "single_node": {"nccl_comm_num": 1},
    "multi_node": FEW_FETCHES,
    "two_communicators": FEW_FETCHES | {"nccl_comm_num": 2, "fuse_grad_size_in_MB": 4.0},
    "infiniband": FEW_FETCHES
    | {"nccl_comm_num": 2, "fuse_grad_size_in_MB": 32.0}
    | {"environment": {"NCCL_IB_DISABLE": "0", "NCCL_NET": "IB"}},
    "local_sgd_adaptive": LOCAL_SGD
    | {"local_sgd_steps": 8, "local_sgd_schedule": "adaptive", "local_sgd_max_steps": 32},
    "slowmo": LOCAL_SGD | {"local_sgd_steps": 12, "outer_optimizer": "slowmo", "outer_lr": 1.0, "outer_momentum": 0.6},
    "amp_bf16": FEW_FETCHES | {"amp_level": "O1", "amp_dtype": "bfloat16"},
}
CATALOGUE = sorted(path.stem for path in (ROOT / "strategies").glob("*.yaml"))


def test_the_profiles_of_the_catalogue_ask_for_what_their_names_say() -> None:
    assert profile_names() == CATALOGUE
    for name in CATALOGUE:
        profile = load_profile(name)
        settings = profile.settings()
        assert profile.name == settings.pop("name") == name
        assert settings.pop("description").endswith(".")
        assert settings.pop("measured") == profile.measured != ()
        assert settings == ASKED.get(name, settings)


def test_the_old_name_of_a_profile_is_the_new_one_and_rank_0_says_so() -> None:
    assert not {*catalogue.RENAMED} & {*CATALOGUE}
    for old, new in catalogue.RENAMED.items():
        assert load_profile(old).digest() == load_profile(new).digest()
        assert applied_mappings(load_profile(old))[0] == f"profile '{old}' is called '{new}' now"
        assert load_profile(new).notes == ()


def test_a_wrong_name_gets_the_closest_one_and_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    everyone = rf"There are {', '.join(CATALOGUE)}; give a file by its path, such as \./multinode\.yaml$"
    for name, said in (
        ("multinode", rf"^'multinode' is not a profile of the catalogue; did you mean 'multi_node'\? {everyone}"),
        ("my/single-node.yaml", r"^my/single-node\.yaml: no such file; did you mean 'single_node'\? There are"),
        (f"{tmp_path}/", "is a folder, not a file"),
        ("", r"^'' is no profile|no such file|is a folder"),
    ):
        with pytest.raises(ProfileError, match=said):
            load_profile(name)


def test_an_installed_package_carries_the_catalogue_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "fleet_train"
    shutil.copytree(ROOT / "strategies", package / "strategies")
    monkeypatch.setattr(catalogue, "__file__", str(package / "profile" / "catalogue.py"))
    assert catalogue.catalogue_folder.__wrapped__() == package / "strategies"
    shutil.rmtree(package / "strategies")
    with pytest.raises(ProfileError, match="the installation is incomplete, install fleet_train again"):
        catalogue.catalogue_folder.__wrapped__()


def test_what_is_made_from_the_table_is_up_to_date() -> None:
    assert export.stale_files(ROOT) == []
    assert export.broken_profiles() == []
    assert export.main(["--check"]) == 0


def test_a_stale_export_is_reported_with_the_command_that_makes_it(tmp_path: Path) -> None:
    (tmp_path / "strategies").mkdir()
    (tmp_path / "strategies" / "schema.json").write_text("{}")
    fix = "differs from the knob table; run: python -m fleet_train.profile.export"
    assert export.stale_files(tmp_path) == [f"strategies/schema.json: {fix}", f"docs/knobs.md: {fix}"]


def test_the_command_shows_each_knob_with_value_origin_fate_and_meaning(refused_knob: str) -> None:
    output = CliRunner().invoke(command, ["tcp_only"]).output
    carried, _, rest = output.partition("\nMAPPED (")
    mapped, _, refused = rest.partition("\nREFUSED (")
    assert "strategies/multi_node.yaml:16; default 1]" in carried
    assert "  nccl_comm_num: auto communicators  [default]" in carried
    assert "      NCCL_IB_DISABLE: (set)  [" in carried
    assert "  num_threads: 1 threads  [default]" in mapped
    assert "  FLAGS_fuse_parameter_memory_size -> fuse_grad_size_in_MB" in mapped
    assert "  use_local_sgd: false  [default]" in carried
    assert "  local_sgd_schedule: 'constant'  [default]" in carried
    assert f"  {refused_knob}: false  [default]" in refused
    assert "not available yet; leave it off: a reason." in refused


def test_six_profiles_come_first_and_the_others_where_they_are_asked_for() -> None:
    short = CliRunner().invoke(command, []).output
    assert [line.split()[0] for line in short.splitlines()[2:] if line[:1].islower() and "_" in line][:6] == [*FIRST]
    assert f"{len(CATALOGUE) - len(FIRST)} others: fleet_train profiles --all" in short
    assert "unfused" not in short
    everything = CliRunner().invoke(command, ["--all"]).output
    assert all(f"\n{name} " in everything for name in CATALOGUE)
    for beside in ("multi_node", "--compatibility"):
        refused = CliRunner().invoke(command, ["--all", beside])
        assert (refused.exit_code, "--all lists all profiles" in refused.output) == (2, True)


def test_the_command_shows_a_profile_as_json() -> None:
    shown = json.loads(CliRunner().invoke(command, ["two_communicators", "--json"]).output)
    knob = shown["knobs"]["fuse_grad_size_in_MB"]
    assert [knob[key] for key in ("value", "default", "fate")] == [4.0, "auto", "carried out"]
    assert knob["set_at"].endswith("strategies/two_communicators.yaml:14")
    assert shown["knobs"]["num_threads"]["set_at"] is None
    assert shown["digest"] == load_profile("two_communicators").digest()


def test_a_broken_profile_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "strategies", tmp_path / "strategies")
    (tmp_path / "strategies" / "bad.yaml").write_text("foo: 1\n")
    monkeypatch.setattr("fleet_train.profile.catalogue.catalogue_folder", lambda: tmp_path / "strategies")
    output = CliRunner().invoke(command, ["--all"]).output
    assert "bad.yaml:1: foo: unknown key" in " ".join(output.split())
    assert "single_node" in output
    assert len(export.broken_profiles()) == 1


def test_the_pages_of_knobs_and_the_command_list_a_refused_one_with_its_reason(refused_knob: str) -> None:
    refused = export.knobs_page().partition("## Refused\n")[2]
    assert refused.startswith("\n| knob | default | allowed | meaning | reason, and alternative |\n")
    assert refused.splitlines()[3].startswith(f"| `{refused_knob}` | false | true or false | ")
    assert refused.splitlines()[3].endswith(" | not available yet; leave it off: a reason. |")


def test_the_command_shows_which_strategies_go_together() -> None:
    lines = CliRunner().invoke(command, ["--compatibility"]).output.splitlines()
    assert lines[3] == "  2  several communicators    nccl_comm_num               +  2"
    pairs = json.loads(CliRunner().invoke(command, ["--compatibility", "--json"]).output)
    assert pairs[0] == {
        "strategies": ["fused", "communicators"],
        "allowed": True,
        "words": "the communicators take the buckets in turn",
    }
    assert next(pair["strategies"] for pair in pairs if not pair["allowed"]) == ["hierarchical", "sharding"]
    result = CliRunner().invoke(command, ["multi_node", "--compatibility"])
    assert result.exit_code == 2
    assert "--compatibility is one table for all profiles; leave out 'multi_node'" in result.output
    assert isinstance(CliRunner().invoke(command, ["nope_nope"]).exception, ProfileError)
