from __future__ import annotations

import pytest
from click.testing import CliRunner

from fleet_train.cli.plan import command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --script SCRIPT or --model mlp|cnn"),
        (["--model", "mlp", "more"], "unexpected 'more': arguments go with --script"),
        (["--model", "mlp", "--nodes_on_paper", "8,x"], "'8,x' is not a list of node numbers such as 8,64,512"),
        (["--model", "mlp", "--nodes_on_paper", "0"], "'0' is not a list of node numbers"),
        (["--model", "mlp", "--bandwidth_mbps", "0"], "0.0 is not in the range x>0"),
        (["--model", "mlp", "--simulate_steps", "5"], "--simulate_steps needs --simulate: give both"),
        (["--measure", "--latency_us", "5"], "--measure measures what --latency_us would specify"),
    ],
)
def test_usage_errors_say_what_was_given(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_help_has_commands_that_can_be_pasted() -> None:
    text = CliRunner().invoke(command, ["--help"]).output
    assert "python -m fleet_train plan --model mlp --nodes 4 --ranks_per_node 2" in text
    assert "-m fleet_train plan --measure" in text
    assert "--nodes_on_paper" in text
