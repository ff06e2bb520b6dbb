"""The page of a soak's record."""

from __future__ import annotations

from typing import Any

from tools.benchmarks.record import told_circumstances
from tools.soaking.kills import KINDS
from tools.soaking.verdict import half_written


def page(record: dict[str, Any]) -> str:
    at, same, recovery = record["circumstances"], record["comparison"], record["recovery_seconds"]
    network = f"network namespaces, {record['network']['rate']}" if record["network"]["rate"] else "loopback addresses"
    kinds = {kind: sum(kill["kind"] == kind for kill in record["kills"]) for kind in KINDS}
    frozen = kinds["freeze"]
    kills = len(record["kills"]) - frozen
    killed = f"{kills}: {kinds['step']} in a step, {kinds['save']} in a save, {kinds['start']} at start"
    seconds = f"{recovery['median']}, {recovery['longest']}" if recovery["measured"] else "not measured"
    different = len(same["tensors_that_differ"])
    used = half_written(record["checkpoints_used"])
    rows = [
        ("ranks killed (`SIGKILL`)", killed),
        ("ranks frozen (`SIGSTOP` for up to 5 s)", frozen),
        ("which ranks", ", ".join(map(str, sorted({kill["rank"] for kill in record["kills"]})))),
        ("kills during a save", record["kills_while_a_checkpoint_was_written"]),
        (
            "attempts; resumed from a checkpoint",
            f"{1 + kills}, {len(record['checkpoints_used'])}",
        ),
        ("final tensors that differ from the undisturbed ones", f"{different} of {same['tensors']}"),
        ("losses of the curve that differ", f"{same['losses_that_differ']} of {same['losses']}"),
        ("half-written checkpoints: used, left", f"{len(used)}, {len(record['half_written_left'])}"),
        ("processes left behind", len(record["orphans"])),
        (f"seconds from a kill to the next step ({recovery['measured']} measured): median, longest", seconds),
        ("seconds in all", record["seconds"]),
    ]
    lines = [
        f"# Soak, {at['date'][:10]}: {record['nodes']} nodes x {record['ranks_per_node']} ranks, {network}",
        "",
        f"- Job: `fleet_train train {' '.join(record['train_flags'])}`, {same['final_step']} steps, a checkpoint after "
        f"each epoch; test accuracy {same['test_accuracy']:.4f}.",
        *told_circumstances(at),
        f"- Result: {'**failed**: ' + '; '.join(record['failures']) if record['failures'] else 'nothing was lost'}.",
        "",
        "| what | value |",
        "| --- | --- |",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
    ]
    return "\n".join(lines)
