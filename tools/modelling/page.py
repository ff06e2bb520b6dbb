"""The page of a record of the model of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_RULES = (
    (
        "a collective starts behind what the calculation stream held at its call",
        "`process_group_nccl.cc`, Paddle 3.3.1",
    ),
    ("`task.wait()` holds the calculation stream, not the host; `sync_op=True` is a call and a wait", "the same"),
    ("a stream is first in, first out; an event waits for what was enqueued before it", "CUDA's programming guide"),
    ("a collective ends when the group's same one has started on all its ranks", "NCCL's guide on collectives"),
    (
        "a device has one collective resident at a time",
        "NCCL's guide on concurrent communicators promises no more; NVIDIA/nccl issue 195",
    ),
    (
        "reading a value, and `paddle.to_tensor` of an array, wait for all of the device's streams",
        "blocking streams, `GpuMemcpySync`; Paddle",
    ),
    ("barriers wait for all ranks, futures for their thread", "`store/barriers.py`, `worker_thread.py`"),
)


def page(record: Mapping[str, Any]) -> str:
    at, rates = record["circumstances"], record["rates"]
    lines = [
        f"# Model of streams, {at['date'][:10]}",
        "",
        "- Nothing ran on a GPU. Each rank's trace is what the real conversion, `GradientExchange` and engine did as "
        f"Paddle's executor ran {record['steps']} steps on a CPU, with groups and a store that record; the traces "
        "of all ranks were then replayed together. The network has 13 gradients in 5 buckets, warm-ups are 2 steps "
        "long.",
        f"- {record['interleavings']:,} random interleavings per profile of the catalogue, and a fifth of that for "
        f"other cases (names with a comma), seed {record['seed']}, divided among clusters. One in ten has "
        "kernels of all communicators side by side, the others one resident at a time; one in twenty begins with the "
        "creation of groups, the others with the first step.",
        "- Where one thread calls and a rank has one communicator, there is no choice, and one interleaving "
        "stands for all. Choices are which thread calls and which kernel is resident.",
        f"- Machine: {at['processor']}, {at['processors']} processors, Linux {at['kernel']}, load average "
        f"{at['load_average_before'][0]} before the start.",
        f"- Versions: {', '.join(f'{key} {value}' for key, value in at['versions'].items() if value)}; "
        f"commit {at['commit'][:10]}{' with uncommitted changes' if at['uncommitted_changes'] else ''}.",
        f"- Command: `{at['command']}`",
        f"- Result: {_result(record)}.",
        "",
        "| rule of the model | follows from |",
        "| --- | --- |",
        *(f"| {rule} | {source} |" for rule, source in _RULES),
        "",
        "## The new engine",
        "",
        "Exposed: what communication adds to a step, in ms, on the smallest cluster of the profile. An operator of the "
        f"program takes {rates['kernel'] * 1e6:.0f} us, the link has {rates['latency'] * 1e6:.0f} us of latency and "
        f"{rates['bytes_per_second'] / 1e6:.0f} MB/s, a barrier takes {rates['barrier'] * 1e6:.0f} us: assumed, so "
        "that a dense step communicates for about as long as its backward pass computes. *Ideal*: a bucket travels "
        "once its gradients are there, on one link in order, and nothing waits before it uses a result. *Old*: the old "
        "code with one communicator; with two it stands still.",
        "",
        *_table(
            (
                "profile",
                "clusters",
                "interleavings",
                "deadlocks",
                "order mismatches",
                "communication",
                "ideal",
                "ours",
                "old",
            ),
            [_row(record, figures) for figures in record["exposed"]],
        ),
        "",
        "Every second step fetches the loss. A fetch waits for all streams of the device, so an averaging that is to "
        "travel beside the next steps (`local_sgd_overlap_steps`) is waited for where it starts in a fetched step, as "
        "here: its line is not below that of `local_sgd`.",
        "",
        "## Negative controls",
        "",
        *_table(
            ("control", "profile", "ranks", "one resident", "deadlocks", "found", "expected"),
            [_control(row) for row in record["controls"]],
        ),
        "",
        *_examples(record["controls"]),
    ]
    return "\n".join(lines)


def _result(record: Mapping[str, Any]) -> str:
    if record["failures"]:
        return f"**failed**: {'; '.join(record['failures'])}"
    total = sum(row["interleavings"] for row in record["replays"])
    return f"no deadlock and no order mismatch of the new engine in {total:,} replays; every control as expected"


def _table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [f"| {' | '.join(headings)} |", "|" + " --- |" * len(headings)]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def _row(record: Mapping[str, Any], figures: Mapping[str, Any]) -> list[Any]:
    rows = [row for row in record["replays"] if row["profile"] == figures["profile"]]
    return [
        figures["profile"],
        _clusters(rows),
        f"{sum(row['interleavings'] for row in rows):,}",
        sum(row["deadlocks"] for row in rows),
        sum(len(row["mismatches"]) for row in rows),
        *(f"{figures[name]:.3f}" for name in ("communication_ms", "ideal_ms", "ours_ms", "old_ms")),
    ]


def _clusters(rows: Sequence[Mapping[str, Any]]) -> str:
    if all(row["ranks_per_node"] == 1 for row in rows):
        return f"{rows[0]['nodes']} to {rows[-1]['nodes']} x 1"
    if all(row["nodes"] == 1 for row in rows):
        return f"1 x {rows[0]['ranks']} to {rows[-1]['ranks']}"
    return ", ".join(f"{row['nodes']} x {row['ranks_per_node']}" for row in rows)


def _control(row: Mapping[str, Any]) -> list[Any]:
    deadlocks = f"{row['deadlocks']} of {row['interleavings']}" if row["interleavings"] else ""
    resident = "yes" if row["one_resident"] else "no"
    return [row["name"], row["profile"], row["ranks"], resident, deadlocks, row["found"], row["expected"]]


def _examples(controls: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for row in controls:
        if row["example"]:
            lines += [f"**{row['name']}**: {'; '.join(row['example'])}.", ""]
    return lines
