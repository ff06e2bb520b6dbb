"""Whether this process is a rank, and its state: spawning from a rank is an error, of two kinds."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from fleet_train.cluster.engines import detect
from fleet_train.errors import ClusterError

_loading = ""
"""The function that this rank is about to call; empty once it is loaded."""


class CalledWhileImported(ClusterError):
    """``spawn`` is called at the top level of a module that the ranks import."""


def finding(train: str) -> None:
    """This process is a rank that imports the modules of ``train``; "" when it is done."""
    global _loading
    _loading = train


def refuse_within_a_rank(environ: Mapping[str, str]) -> None:
    """Raise ClusterError if this process is a rank itself, of any launcher."""
    if _loading:
        module, place = _caller()
        raise CalledWhileImported(
            f"fleet_train.spawn is called at the top level of {module} ({place}), which every rank imports to find "
            f'{_loading}; put the call below `if __name__ == "__main__":`, or into a function'
        )
    number = environ.get("PADDLE_TRAINER_ID", "")
    if environ.get("FLEET_TRAIN_STORE") or environ.get("PADDLE_TRAINERS_NUM", "1") not in ("", "1"):
        raise ClusterError(
            f"fleet_train.spawn was called in rank {number or '?'} of a job, and a rank cannot start ranks; "
            "call it from a script or a notebook that no launcher has started, or call the function itself here"
        )
    started = detect(environ)
    if started is not None and started.count > 1:
        raise ClusterError(
            f"fleet_train.spawn was called in process {started.index} of {started.count} that {started.engine} has "
            "started, each of which would start a separate job; call fleet.init in them instead, or set "
            "FLEET_TRAIN_ENGINE=none if that is intended"
        )


def _caller() -> tuple[str, str]:
    """(module, file:line) of the code that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("fleet_train."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "?")), f"{frame.f_code.co_filename}:{frame.f_lineno}"
