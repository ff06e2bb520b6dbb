"""Let rank 0 look at its disk and tell everybody, so that all ranks go on, or stop, for the same reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleet_train import errors, fleet


def ask_first_worker(question: Callable[[], Any]) -> Any:
    """Rank 0's answer (a JSON value) on every rank; if the question raises there, it raises on every rank.

    Without this, an error on rank 0 alone would leave the others waiting in the next collective.
    """
    answer: dict[str, Any] = {}
    if fleet.is_first_worker():
        try:
            answer = {"value": question()}
        except errors.FleetTrainError as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        except OSError as error:
            answer = {"error": "CheckpointError", "message": f"rank 0 cannot use its disk: {error}"}
    answer = share(answer)
    if "error" in answer:
        raise getattr(errors, answer["error"])(answer["message"])
    return answer["value"]


def share(value: Any) -> Any:
    """Rank 0's JSON value on every rank."""
    return fleet.gather(value)[0]
