"""Compare the results of the killed job with those of the undisturbed one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tools.soaking.job import SoakJob, read_metrics

Tensors = Mapping[str, np.ndarray[Any, Any]]
_RESUMED = re.compile(r"resumed from (\S+) \(epoch")


def compare(undisturbed: SoakJob, killed: SoakJob) -> dict[str, Any]:
    """Tensors of the final checkpoints, and the loss curves, bit by bit."""
    one, other = final_tensors(undisturbed), final_tensors(killed)
    different = different_tensors(one, other)
    curves = [loss_curve(job) for job in (undisturbed, killed)]
    return {
        "tensors": len(one),
        "tensors_that_differ": different,
        "losses": len(curves[0]),
        "losses_that_differ": sum(curves[0].get(s) != curves[1].get(s) for s in curves[0].keys() | curves[1].keys()),
        "final_step": max(curves[0], default=0),
        "test_accuracy": summary_of(undisturbed)["test_accuracy"],
    }


def different_tensors(one: Tensors, other: Tensors) -> list[str]:
    """Names of tensors that differ in any bit, or that only one side has."""
    return sorted(name for name in one.keys() | other.keys() if not _same_bits(one.get(name), other.get(name)))


def summary_of(job: SoakJob) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((job.output / "summary.json").read_text())
    return summary


def final_tensors(job: SoakJob) -> dict[str, np.ndarray[Any, Any]]:
    newest = sorted(job.checkpoints.glob("step-*"))[-1]
    tensors: dict[str, np.ndarray[Any, Any]] = load_file(newest / "persistables.safetensors")
    return tensors


def _same_bits(one: np.ndarray[Any, Any] | None, other: np.ndarray[Any, Any] | None) -> bool:
    if one is None or other is None:
        return False
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def loss_curve(job: SoakJob) -> dict[int, float]:
    """Step -> training loss; of a step trained twice, the later one."""
    return {r["step"]: r["train/loss"] for r in read_metrics(job.output) if "train/loss" in r}


def checkpoints_used(job: SoakJob) -> list[str]:
    """The checkpoint that each attempt resumed from, in order, by rank 0's log."""
    logs = sorted(job.log_dir(0).glob("workerlog.0.attempt*"), key=lambda path: int(path.suffix[8:]))
    texts = [path.read_text(errors="replace") for path in [*logs, job.log_dir(0) / "workerlog.0"]]
    return [Path(found[-1]).name for text in texts if (found := _RESUMED.findall(text))]


def half_written(names: Sequence[str]) -> list[str]:
    """Those that are not complete: a checkpoint's folder gets its name by a rename, once it is complete."""
    return [name for name in names if not re.fullmatch(r"step-\d{8}", name)]


def leftovers(checkpoints: Path) -> list[str]:
    """Half-written checkpoints in a folder that were not removed."""
    return sorted(path.name for path in checkpoints.glob(".*step-*"))


def failures_of(record: dict[str, Any]) -> list[str]:
    """What is wrong, one sentence each; empty if the soak passed."""
    found = []
    if any(record["exit_codes"]):
        found.append(f"the launchers ended with {record['exit_codes']}")
    if record["orphans"]:
        found.append(f"left behind: {record['orphans']}")
    same = record["comparison"]
    if same["tensors"] == 0 or same["tensors_that_differ"]:
        found.append(f"tensors that differ: {same['tensors_that_differ'] or 'no tensors found'}")
    if same["losses"] == 0 or same["losses_that_differ"]:
        found.append(f"{same['losses_that_differ']} of {same['losses']} losses differ")
    if used := half_written(record["checkpoints_used"]):
        found.append(f"resumed from {used}, which is not complete")
    if record["half_written_left"]:
        found.append(f"half-written checkpoints were left: {record['half_written_left']}")
    return found


def recovery(kills: Sequence[dict[str, Any]]) -> dict[str, float | int]:
    """Seconds from a kill to the next reported step."""
    killed = [kill for kill in kills if kill["kind"] != "freeze"]
    seconds = [kill["seconds_to_next_step"] for kill in killed if kill.get("seconds_to_next_step") is not None]
    if not seconds:
        return {"measured": 0}
    return {"measured": len(seconds), "median": round(median(seconds), 1), "longest": max(seconds)}
