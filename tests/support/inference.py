"""An exported program in Paddle's inference, in a new process without fleet_train."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.processes import clean_environ, python

_INFER = """
import sys
import numpy as np
from paddle import inference

model, given, gives = sys.argv[1:]
config = inference.Config(f"{model}/model.json", f"{model}/model.pdiparams")
config.disable_glog_info()
predictor = inference.create_predictor(config)
predictor.get_input_handle(predictor.get_input_names()[0]).copy_from_cpu(np.load(given))
predictor.run()
np.save(gives, predictor.get_output_handle(predictor.get_output_names()[0]).copy_to_cpu())
assert not [name for name in sys.modules if name.startswith("fleet_train")]
"""


def infer(model: str | Path, features: np.ndarray[Any, Any], folder: Path) -> np.ndarray[Any, Any]:
    """The first output of the program in ``model`` for its first input; ``folder`` is for files on the way."""
    given, gives = folder / "given.npy", folder / "gives.npy"
    np.save(given, features)
    environ = {name: value for name, value in clean_environ().items() if name != "PYTHONPATH"}
    done = subprocess.run(
        python("-c", _INFER, str(model), str(given), str(gives)),
        env=environ,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: np.ndarray[Any, Any] = np.load(gives)
    return found
