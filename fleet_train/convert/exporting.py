"""Exporting a trained network for Paddle's inference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import paddle


def export_inference_model(exe: Any, dirname: Path, feeds: list[Any], targets: list[Any], program: Any) -> None:
    """Write the pruned forward program and its parameters as ``model.json`` and ``model.pdiparams`` in ``dirname``."""
    dirname.mkdir(parents=True, exist_ok=True)
    paddle.static.save_inference_model(str(dirname / "model"), feeds, targets, exe, program=program)
