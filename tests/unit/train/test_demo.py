"""What the demo accepts as a result, and what it says otherwise."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.processes import ROOT

GOOD = {"world_size": 2, "num_nodes": 2, "test_accuracy": 0.98}


@pytest.fixture
def demo() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("demo_under_test", ROOT / "tools" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def folders_with(demo: ModuleType, output: Path, summary: dict[str, Any]) -> Any:
    folders = demo.Folders(output)
    folders.prepare()
    folders.summary.write_text(json.dumps(summary))
    return folders


def test_good_result_is_accepted(demo: ModuleType, tmp_path: Path) -> None:
    assert demo.checked_summary(folders_with(demo, tmp_path, GOOD), [0, 0]) == GOOD


@pytest.mark.parametrize(
    ("change", "exit_codes", "message"),
    [
        ({"test_accuracy": 0.95}, [0, 0], "test accuracy 0.9500 is below 0.97"),
        ({"world_size": 1, "num_nodes": 1}, [0, 0], "the job had 1 ranks on 1 nodes, not 2 on 2"),
        ({}, [0, 11], "the nodes ended with exit codes [0, 11]; their output is in"),
    ],
)
def test_bad_result_is_an_error(
    demo: ModuleType, tmp_path: Path, change: dict[str, Any], exit_codes: list[int], message: str
) -> None:
    with pytest.raises(demo.DemoFailed) as raised:
        demo.checked_summary(folders_with(demo, tmp_path, GOOD | change), exit_codes)
    assert message in str(raised.value)


def test_summary_of_an_earlier_demo_is_not_believed(demo: ModuleType, tmp_path: Path) -> None:
    folders = folders_with(demo, tmp_path, GOOD)
    folders.prepare()
    with pytest.raises(demo.DemoFailed, match="cannot be read"):
        demo.checked_summary(folders, [0, 0])


def test_each_node_gets_its_own_address_and_log_folder(demo: ModuleType, tmp_path: Path) -> None:
    one, two = demo.node_commands(demo.Folders(tmp_path), "multi_node", 17000, ("--epochs=1",))
    assert {a for a in one if a not in two} == {"--node_ip=127.0.0.2", f"--log_dir={tmp_path}/log/node0"}
    assert {a for a in two if a not in one} == {"--node_ip=127.0.0.3", f"--log_dir={tmp_path}/log/node1"}
    assert one[-1] == "--epochs=1"
