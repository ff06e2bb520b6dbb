"""Only static programs are accepted, with an error that says so."""

from __future__ import annotations

from pathlib import Path

from fleet_train.errors import ConversionError
from tests.support.ranks import run_ranks

SCRIPT = """
import paddle
from fleet_train import fleet
fleet.init()
layer = paddle.nn.Linear(2, 1)
optimizer = fleet.distributed_optimizer(paddle.optimizer.SGD(0.1, parameters=layer.parameters()))
loss = layer(paddle.ones([1, 2])).mean()
optimizer.minimize(loss)
"""


def test_dynamic_mode_is_refused_with_the_call_that_is_missing(tmp_path: Path) -> None:
    result = run_ranks(SCRIPT, 1, nodes=0, folder=tmp_path, check=False)
    assert result.exit_codes == [ConversionError.exit_code]
    assert "call paddle.enable_static() before building the network" in result.ranks[0].output
