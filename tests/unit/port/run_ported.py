"""Run ported snippets on today's Paddle: SCRIPT.py -> NUMBERS.json."""

import json
import sys
from pathlib import Path

import paddle

from tests.unit.port import fluid_numbers

paddle.enable_static()
figures = fluid_numbers.run_all(
    Path(sys.argv[1]).read_text(),
    paddle.static,
    paddle.utils.unique_name,
    paddle.base.core.Scope,
    paddle.CPUPlace(),
)
Path(sys.argv[2]).write_text(json.dumps(figures))
