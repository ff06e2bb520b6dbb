"""Settings: flags win over the script's, rank 0 says what they overrule; variables are set early and shown nowhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.launch.conftest import Bench
from tests.support.processes import ROOT, clean_environ, python

SCRIPT = """
import json, os, sys
import paddle
import fleet_train.fleet as fleet
from fleet_train import DistributedStrategy, role_maker

paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
main, startup = paddle.static.Program(), paddle.static.Program()
with paddle.static.program_guard(main, startup):
    x = paddle.static.data("x", [8, 64], "float32")
    loss = paddle.mean(paddle.static.nn.fc(paddle.static.nn.fc(x, 64), 1))
    strategy = eval(sys.argv[1]) if len(sys.argv) > 1 else None
    optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.01), strategy=strategy)
    optimizer.minimize(loss)
exe = paddle.static.Executor(fleet.place())
exe.run(startup)
import numpy
for step in range(3):
    exe.run(main, feed={"x": numpy.ones((8, 64), "float32")}, fetch_list=[loss])
plan, profile = fleet.plan(), fleet.profile()
print("ran", json.dumps({
    "sent_as": sorted({str(bucket.compression) for bucket in plan.buckets}),
    "communicators": len({bucket.communicator for bucket in plan.buckets}),
    "variable": os.environ.get("MY_TOKEN"),
    "serial": paddle.get_flags("FLAGS_new_executor_serial_run")["FLAGS_new_executor_serial_run"],
    "interface": os.environ["NCCL_SOCKET_IFNAME"],
    "buckets": len(plan.buckets),
    "bytes": fleet.communication().bytes_sent,
    "profile": profile.shown_settings(),
    "origin": {knob: profile.origin(knob) for knob in ("compression", "nccl_comm_num")},
}), flush=True)
"""
INT8 = "DistributedStrategy(compression='int8', fuse_grad_size_in_MB=1, nccl_comm_num=2)"
TWO_SMALL_BUCKETS = ["--set", "fuse_grad_size_in_MB=0.01", "--set=last_comm_group_size_MB=0.01"]


def ran(bench: Bench, *logs: str) -> list[dict[str, Any]]:
    lines = [line for log in logs for line in bench.log(log).splitlines() if line.startswith("ran ")]
    return [json.loads(line.removeprefix("ran ")) for line in lines]


def both(bench: Bench, *arguments: str, flags: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """What the terminal showed, and what both ranks of one node had, which must be the same."""
    bench.start(SCRIPT, *arguments, flags=["--nproc_per_node=2", *flags])
    [ended] = bench.ended(120.0)
    assert ended.exit_code == 0, ended.output
    first, second = ran(bench, "node0/log/workerlog.0", "node0/log/workerlog.1")
    assert first == second
    return ended.output, first


def settings_of(run: Path) -> dict[str, Any]:
    """What the trainer's record says about its settings."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (settings,) = [record["hparams"] for record in records if record.get("kind") == "hparams"]
    return dict(settings)


def test_set_changes_single_knobs_of_the_scripts_strategy_on_all_nodes(bench: Bench) -> None:
    bench.start_two(SCRIPT, INT8, flags=["--set", "compression=bf16", "--set=num_threads=2", *TWO_SMALL_BUCKETS])
    first, second = bench.ended(120.0)
    assert [first.exit_code, second.exit_code] == [0, 0], bench.job.report()
    sentence = "--set wins over the script: compression is 'bf16', not 'int8'; fuse_grad_size_in_MB is 0.01, not 1"
    assert [sentence in one.output for one in (first, second)] == [True, False]
    had, other = ran(bench, "node0/log/workerlog.0", "node1/log/workerlog.0")
    assert had == other
    assert (had["sent_as"], had["serial"]) == (["bf16"], False)
    assert had["buckets"] > 1
    assert had["communicators"] == had["profile"]["nccl_comm_num"] == 2
    assert had["origin"] == {"compression": "--set", "nccl_comm_num": "DistributedStrategy"}


def test_set_over_strategy_over_a_script_without_one_takes_tuning_knobs_with_a_switch(bench: Bench) -> None:
    flags = ["--strategy=local_sgd", "--set=use_local_sgd=false", "--set=environment.MY_TOKEN=abc"]
    output, had = both(bench, "DistributedStrategy()", flags=flags)
    assert "nothing was set in the script's strategy: profile 'local_sgd' is used" in output
    assert "wins over" not in output
    assert had["profile"]["use_local_sgd"] is False
    assert "local_sgd_steps" not in had["profile"]
    assert had["variable"] == "abc"
    assert had["bytes"] > 0


@pytest.mark.parametrize("variables", [{}, {"FLAGS_new_executor_serial_run": "1"}], ids=["default", "user's"])
def test_what_the_launcher_sets_by_default_gives_way_to_the_script_and_the_users_variables_do_not(
    bench: Bench, variables: dict[str, str]
) -> None:
    profile = bench.folder / "mine.yaml"
    profile.write_text("num_threads: 2\nenvironment:\n  NCCL_SOCKET_IFNAME: eth9\n")
    bench.start(SCRIPT, f"'{profile}'", flags=["--nproc_per_node=2"], environ=variables)
    [ended] = bench.ended(120.0)
    assert ended.exit_code == 0, ended.output
    first, second = ran(bench, "node0/log/workerlog.0", "node0/log/workerlog.1")
    assert first == second
    assert (first["serial"], first["interface"]) == (bool(variables), "eth9")
    assert ("the environment's own FLAGS_new_executor_serial_run overrides profile 'mine'" in ended.output) == bool(
        variables
    )
    assert "sets NCCL_SOCKET_IFNAME after this process started, too late for variables read at start" in ended.output


def test_the_trainers_own_flags_win_over_the_launchers(bench: Bench) -> None:
    trainer = ROOT / "fleet_train" / "__main__.py"
    recipe = (
        "train --model=mlp --data=synthetic --epochs=1 --strategy=unfused --set=fetch_frequency=5 --set=num_threads=2"
    )
    flags = ["--nproc_per_node=2", "--strategy=local_sgd", "--set=fetch_frequency=3", "--set=divergence_check_steps=7"]
    bench.start(trainer, *recipe.split(), f"--output_dir={bench.folder}/out", flags=flags)
    [ended] = bench.ended(120.0)
    assert ended.exit_code == 0, ended.output
    sentence = "the launcher's --strategy local_sgd and --set fetch_frequency is not used: the program has its own"
    assert ended.output.count(sentence) == 1, ended.output
    assert "overrides profile" not in ended.output, ended.output
    used = settings_of(bench.folder / "out")
    assert (used["profile"], used["fetch_frequency"], used["divergence_check_steps"]) == ("unfused", 5, 7)


CANARY = "canary-7f3a9c-must-not-be-seen"


@pytest.mark.long
def test_no_value_of_the_profiles_environment_is_written_anywhere(
    bench: Bench, tmp_path_factory: pytest.TempPathFactory
) -> None:
    profile = tmp_path_factory.mktemp("profiles") / "mine.yaml"
    profile.write_text(f"local_sgd_steps: 2\nuse_local_sgd: true\nenvironment:\n  MY_TOKEN: {CANARY}\n")
    output, script = bench.folder / "out", ROOT / "tools" / "train.py"
    recipe = f"--model=mlp --data=digits --epochs=1 --checkpoint_every=1 --strategy={profile} --output_dir={output}"
    bench.start(script, *recipe.split(), flags=["--nproc_per_node=2", f"--strategy={profile}"])
    others = {
        "dry": f"launch --dry-run --started_port={bench.first_port + 3} --strategy={profile} {script}",
        "profile": f"profiles {profile}",
        "json": f"profiles --json {profile}",
        "plan": f"plan --model=mlp --strategy={profile}",
    }
    for name, command in others.items():
        line = python("-m", "fleet_train", *command.split())
        bench.job.start(name, line, clean_environ(), cwd=bench.folder / name)
    ended = {one.name: one for one in bench.ended(120.0)}
    assert {name: one.exit_code for name, one in ended.items()} == dict.fromkeys(["node0", *others], 0), (
        bench.job.report()
    )
    assert "MY_TOKEN=(set)" in ended["dry"].output
    assert "MY_TOKEN: (set)" in ended["profile"].output
    assert '"MY_TOKEN": "(set)"' in ended["json"].output
    assert "MY_TOKEN: (set)" in (output / "metrics.jsonl").read_text()
    written = {path.name for path in output.rglob("*") if path.is_file()}
    assert {"vdlrecords.train.log", "metrics.jsonl", "complete.json", "summary.json"} <= written
    assert bench.files_with(CANARY) == []
