"""Checks the installed Paddle before anything else uses it.

What the code relies on in this version, and how to check another one: docs/paddle.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import metadata, util

from fleet_train.errors import PaddleUnusable

NEEDED = "3.3.1"
_INSTALL = f"python -m pip install paddlepaddle=={NEEDED} (CPU), or see requirements-gpu.txt"


def require_paddle(environ: Mapping[str, str] = os.environ) -> None:
    """Raise PaddleUnusable, with what was found, what is needed and the fix, unless Paddle can be used.

    Host operators inside PIR programs (``paddle.static.register_op``) are public since Paddle 3.3.
    """
    if util.find_spec("paddle") is None:
        raise PaddleUnusable(f"Paddle is not installed; fleet_train needs {NEEDED} or newer: {_INSTALL}")
    switched = environ.get("FLAGS_enable_pir_api", "1").strip().lower()
    if switched in ("0", "false"):
        raise PaddleUnusable(
            f"FLAGS_enable_pir_api={switched} selects Paddle's old IR; fleet_train needs PIR (the default): "
            "unset FLAGS_enable_pir_api"
        )
    import paddle

    if not hasattr(paddle.static, "register_op"):
        raise PaddleUnusable(
            f"Paddle {installed_version()} has no paddle.static.register_op; fleet_train needs {NEEDED} or newer: "
            f"{_INSTALL}"
        )
    if not paddle.framework.use_pir_api():
        raise PaddleUnusable("Paddle runs its old IR; fleet_train needs PIR: unset FLAGS_enable_pir_api")


def installed_version() -> str:
    """The version of the imported Paddle, from its package."""
    import paddle

    version = str(getattr(paddle, "__version__", "") or "")
    if version:
        return version
    for name in ("paddlepaddle", "paddlepaddle-gpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def backend_name(environ: Mapping[str, str] = os.environ) -> str:
    """``nccl`` on a GPU build, ``gloo`` on a CPU build or when PADDLE_DISTRI_BACKEND asks for it."""
    import paddle

    asked = environ.get("PADDLE_DISTRI_BACKEND", "").lower()
    if asked == "gloo" or not paddle.is_compiled_with_cuda():
        return "gloo"
    return "nccl"
