"""What the benchmark's flags choose, and what a job's commands and environments are."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click
import pytest

from fleet_train.profile import load_profile
from tests.support.processes import ROOT
from tools.bench_strategies import chosen_contestants, main
from tools.benchmarks.contestants import parse
from tools.benchmarks.jobs import Place, commands_of, shared_environment
from tools.benchmarks.scenarios import SCENARIOS, rivals_of
from tools.lab import Lab

PLACE = Place(Lab(2, name="x"), ranks_per_node=2, port=6200)  # not up: nothing is made


def names(ours: list[str], rivals: str, explicit: list[str] | None = None) -> list[str]:
    return [each.name for each in chosen_contestants(ours, rivals, explicit or [])]


def test_profiles_and_rivals_are_chosen_apart() -> None:
    assert names(["unfused"], "torch:ddp") == ["alone:ours", "alone:torch", "ours:unfused", "torch:ddp"]
    assert names(["unfused"], "none") == ["alone:ours", "ours:unfused"]
    assert names([], "none", ["paddle:data_parallel"]) == ["alone:paddle", "paddle:data_parallel"]


def test_default_rivals_have_the_ranks_periods_and_starts_of_the_profiles() -> None:
    thin = str(ROOT / "tools/benchmarks/profiles/powersgd_1.yaml")
    profiles = [load_profile(name) for name in ("multi_node", "powersgd", thin, "local_sgd", "diloco")]
    rank, period = profiles[1].powersgd_rank, profiles[3].local_sgd_steps
    assert rivals_of(profiles) == [
        "torch:ddp",
        "torch:ddp_4mb",
        "torch:bf16",
        "torch:bf16_4mb",
        f"torch:powersgd_{rank}_from_{profiles[1].powersgd_start_step}",
        f"torch:powersgd_{profiles[2].powersgd_rank}_from_{profiles[2].powersgd_start_step}",
        f"torch:post_local_sgd_{period}_from_{profiles[3].local_sgd_is_warm_steps}",
    ]
    assert names(["local_sgd"], "default")[3:] == rivals_of([profiles[3]])


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_is_made_of_flags_and_contestants_that_exist(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario.keys() <= {option.name for option in main.params}
    ours = [str(ROOT / word) if word.endswith(".yaml") else word for word in scenario["ours"]]
    chosen = names(ours, scenario.get("rivals", "default"))
    assert chosen[0] == "alone:ours"
    assert len(chosen) > len(ours)


def test_flags_win_over_a_scenario(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {}
    monkeypatch.setattr(main, "callback", lambda **options: given.update(options))
    main(["--scenario", "scaling", "--steps", "40"], standalone_mode=False)
    assert (given["steps"], given["evaluate_every"]) == (40, SCENARIOS["scaling"]["evaluate_every"])
    assert given["rivals"] == "default"
    assert given["ours"] == tuple(SCENARIOS["scaling"]["ours"])


def test_unknown_profile_is_refused_before_anything_runs() -> None:
    with pytest.raises(click.UsageError, match="no_such_profile"):
        chosen_contestants(["no_such_profile"], "none", [])


def test_another_checkout_runs_its_own_package_and_workers() -> None:
    place = dataclasses.replace(PLACE, before=Path("/old"))
    command, added = commands_of(parse("before:unfused"), Path("/f"), place)[0]
    assert "/old/tools/benchmarks/worker_ours.py" in command
    assert added == {"PYTHONPATH": "/old"}
    ours, added = commands_of(parse("ours:unfused"), Path("/f"), place)[0]
    assert str(ROOT / "tools/benchmarks/worker_ours.py") in ours
    assert added == {}


def test_ours_starts_one_launcher_per_node() -> None:
    commands = commands_of(parse("ours:unfused"), Path("/f"), PLACE)
    assert len(commands) == 2
    command, added = commands[1]
    assert command[:4] == ["ip", "netns", "exec", "ftlab-x-1"]
    assert command[5:8] == ["-m", "fleet_train", "launch"]
    assert "--cluster_node_ips=10.78.0.1,10.78.0.2" in command
    assert {"--node_ip=10.78.0.2", "--nproc_per_node=2", "--strategy=unfused"} <= set(command)
    assert added == {}


def test_torch_starts_every_rank_with_its_place() -> None:
    commands = commands_of(parse("torch:ddp"), Path("/f"), PLACE)
    assert [(command[3], command[-1]) for command, _ in commands] == [
        ("ftlab-x-0", "0"),
        ("ftlab-x-0", "1"),
        ("ftlab-x-1", "2"),
        ("ftlab-x-1", "3"),
    ]
    assert commands[3][1] == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "MASTER_ADDR": "10.78.0.1",
        "MASTER_PORT": "6200",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
    }


def test_every_contestant_gets_one_thread_and_nothing_of_the_outer_shell() -> None:
    environ = {"PATH": "/bin", "FLAGS_x": "1", "OMP_NUM_THREADS": "8", "https_proxy": "p", "RANK": "7"}
    amd, other = shared_environment(environ, is_amd=True), shared_environment(environ, is_amd=False)
    assert (amd["PATH"], amd["OMP_NUM_THREADS"], amd["MKL_DEBUG_CPU_TYPE"]) == ("/bin", "1", "5")
    assert not {"FLAGS_x", "https_proxy", "MKL_DEBUG_CPU_TYPE"} & other.keys()
