"""Two machines that know each other by a wire only: routes, interfaces, and finding out which node this is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launchers import run_launchers
from tests.support.namespaces import two_machines
from tests.support.processes import python, write_script

_SAY = """
import os
print(os.environ["PADDLE_TRAINER_ID"], os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"])
"""


@pytest.mark.root
def test_each_machine_finds_its_place_and_the_interface_to_the_other(tmp_path: Path) -> None:
    script = write_script(_SAY, tmp_path)
    with two_machines() as machines:
        flags = [f"--cluster_node_ips={','.join(machine.address for machine in machines)}", "--started_port=6170"]
        command = python("-m", "fleet_train", "launch", *flags, str(script))
        result = run_launchers([command] * 2, folder=tmp_path, prefixes=[machine.prefix for machine in machines])
    logs = [(folder / "log" / "workerlog.0").read_text() for folder in result.folders]
    assert logs == ["0 eth0 eth0\n", "1 eth0 eth0\n"], result.report()
    assert "this is node 1 (10.77.0.2)" in result.nodes[1].output
