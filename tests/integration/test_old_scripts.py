"""The guides' four scripts through the real launcher, two nodes with two processes each."""

from __future__ import annotations

from pathlib import Path

from tests.support import commands
from tests.support.launchers import run_launchers
from tests.support.ports import free_ports
from tests.support.processes import ROOT

HOSTS = ("127.0.0.2", "127.0.0.3")


def test_each_script_trains_with_its_strategy_and_equal_parameters(tmp_path: Path) -> None:
    commands.put_script(tmp_path, len(HOSTS), ROOT / "tests" / "support" / "old_scripts.py")
    port = free_ports(3, HOSTS)
    command = commands.FLEET_TRAIN.replace(" --strategy multi_node", "")  # a flag would win over the scripts
    lines = [commands.on_node(command, node, HOSTS, port) for node in range(len(HOSTS))]
    result = run_launchers(lines, folder=tmp_path)
    assert sorted(result.values) == [0, 1, 2, 3], result.report()
    for script in ("performance_tuned", "local_sgd", "hierarchical", "fused_16_megabytes"):
        assert len({rank["digest"] for rank in result.of_all(script)}) == 1, script
    first = result.values[0]
    assert first["performance_tuned"]["communicators"] == 2
    assert first["local_sgd"]["period"] == 2
    assert first["hierarchical"]["group_size"] == 2
    assert first["fused_16_megabytes"]["bucket_MB"] == 16.0
    assert "num_threads" in result.report(), "a mapped setting is said"
