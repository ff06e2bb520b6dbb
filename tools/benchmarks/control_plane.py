"""What the control plane costs: the root's processor time and bytes per gate, joining, latency, strangers, lost relays.

    python tools/bench.py control-plane --record docs/benchmarks
    python tools/bench.py control-plane --rounds 1 --part "4 x 8 at the root" --part "relay SIGKILL"

Servers and relays are those of a job: the root has a process of its own, all relays of a job one (each its own where
one is lost). Ranks are event-driven stand-ins that speak the real protocol. Everything talks over loopback.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import click

from fleet_train.cluster.cluster import parent_of
from tools.benchmarks.record import Keep, circumstances, recorded, table, told_circumstances
from tools.benchmarks.stand_ins import STRANGERS, apart, ask, be_a_rank, disturb, serve, stand_in, wait_for_lost
from tools.processes import leaving_on_signals

Round = dict[str, Any]
"""What a part has measured in one round."""
# (nodes, ranks of each, over relays)
_SIZES = ((4, 8, False), (16, 8, False), (64, 8, False), (64, 8, True), (512, 1, True), (125, 8, True), (1250, 8, True))
_SILENCE_SECONDS, _LONG_SILENCE_SECONDS = 5.0, 120.0


def _ranks(nodes: int, each: int) -> list[range]:
    return [range(first, first + each) for first in range(0, nodes * each, each)]


def measure_gates(nodes: int, each: int, relays: bool, gates: int) -> Round:
    """One job joins, then passes ``gates`` gates: the root's share of them, and what the ranks' clock says."""
    ranks = _ranks(nodes, each)
    with ExitStack() as started:
        root = started.enter_context(apart(serve, ranks, range(1), {}, _LONG_SILENCE_SECONDS))
        ports, _ = root.recv()
        if relays:
            others = apart(serve, ranks, range(1, nodes), ports, _LONG_SILENCE_SECONDS)
            ports, _ = started.enter_context(others).recv()
        of_ranks = [ports[node if relays else 0] for node in range(nodes) for _ in range(each)]
        before_join, _ = ask(root)
        crowd = started.enter_context(apart(stand_in, of_ranks, gates))
        join_seconds = crowd.recv()
        after_join, _ = ask(root)
        ask(crowd)
        began, sent_before = ask(root)
        gate_seconds = ask(crowd)
        ended, sent = ask(root)
    return {
        "gates": gates,
        "ranks": nodes * each,
        "nodes": nodes,
        "meet": "over relays" if relays else "at the root",
        "speak_to_root": each + sum(parent_of(node) == 0 for node in range(1, nodes)) if relays else nodes * each,
        "root_ms": 1e3 * (ended - began) / gates,
        "root_bytes": (sent - sent_before) / gates,
        "gate_ms": 1e3 * gate_seconds,
        "join_seconds": join_seconds,
        "join_root_seconds": after_join - before_join,
    }


def measure_latency(gates: int, stranger: str = "") -> Round:
    """Two real clients, alone or while a stranger does what it can."""
    with ExitStack() as started:
        server = apart(serve, _ranks(1, 2), range(1), {}, _LONG_SILENCE_SECONDS)
        port = started.enter_context(server).recv()[0][0]
        pair = [started.enter_context(apart(be_a_rank, port, rank, gates)) for rank in range(2)]
        for each in pair:
            each.recv()
        other = started.enter_context(apart(disturb, port, stranger)) if stranger else None
        if other is not None:
            other.recv()
        for each in pair:
            each.send(None)
        seconds, _ = (each.recv() for each in pair)
        done = ask(other) if other is not None else 0
    return {
        "gates": gates,
        "stranger": stranger,
        "done_meanwhile": done,
        "median_ms": 1e3 * statistics.median(seconds),
        "p95_ms": 1e3 * statistics.quantiles(seconds, n=20)[-1],
        "longest_ms": 1e3 * max(seconds),
    }


def measure_lost_relay(how: signal.Signals) -> Round:
    """Three nodes of eight ranks; node 2's relay gets this signal while all others wait for its ranks."""
    ranks, ports, pid = _ranks(3, 8), dict[int, int](), 0
    with ExitStack() as started:
        for node in range(3):
            server = apart(serve, ranks, range(node, node + 1), ports, _SILENCE_SECONDS)
            ports, pid = started.enter_context(server).recv()
        of_ranks = [ports[node] for node in range(3) for _ in range(8)]
        crowd = started.enter_context(apart(wait_for_lost, of_ranks, ranks[2]))
        crowd.recv()
        began = time.monotonic()
        os.kill(pid, how)
        at, told, words = crowd.recv()
    return {"signal": how.name, "bound_seconds": _SILENCE_SECONDS, "seconds": at - began, "told": told, "words": words}


def parts_of(gates: int) -> dict[str, Callable[[], Round]]:
    """Every part by its name, in the order of a round; 10,000 ranks pass a quarter of the ``gates``."""
    parts: dict[str, Callable[[], Round]] = {}
    for nodes, each, relays in _SIZES:
        few = max(5, gates // 4) if nodes > 1000 else gates
        name = f"{nodes} x {each} {'over relays' if relays else 'at the root'}"
        parts[name] = partial(measure_gates, nodes, each, relays, few)
    parts["two ranks"] = partial(measure_latency, 3_000)
    parts |= {f"two ranks beside {kind}": partial(measure_latency, 10_000, kind) for kind in STRANGERS}
    return parts | {f"relay {how.name}": partial(measure_lost_relay, how) for how in (signal.SIGKILL, signal.SIGSTOP)}


def page(record: Mapping[str, Any]) -> list[str]:
    parts: Sequence[Sequence[Round]] = list(record["parts"].values())
    return [
        f"# The control plane, {record['circumstances']['date'][:10]}: gates, joining, relays, strangers",
        "",
        *told_circumstances(record["circumstances"], "loopback"),
        f"- Rounds: {len(parts[0])}{'' if len(parts[-1]) == len(parts[0]) else ', the last one in part'}; the parts in "
        "turn. Medians; but of the longest gates, and of the times until all others were told, the longest of all.",
        "- Servers and relays are the real ones; ranks are event-driven stand-ins that speak the real protocol, each "
        "with one connection (a rank has a second one for its barriers), and compare all answers. Wall-clock times "
        "contain the stand-ins' own processor time and that of all relays; the root's processor time is its own.",
        "",
        *table(
            ("ranks", "nodes", "meet", "speak to the root", "root: ms of processor per gate", "root: bytes sent per "
             "gate", "gate, wall ms", "join, wall s", "join, root's processor s"),
            [_size_row(rounds) for rounds in parts if "ranks" in rounds[0]],
        ),
        "",
        *table(
            ("two ranks, one gate", "how often", "median ms", "95th percentile", "longest"),
            [_latency_row(rounds) for rounds in parts if "stranger" in rounds[0]],
        ),
        "",
        *table(
            ("a relay of three gets", "all others were told after", "the bound", "in these words"),
            [_lost_row(rounds) for rounds in parts if "signal" in rounds[0]],
        ),
    ]  # fmt: skip


def _median(rounds: Sequence[Round], name: str, digits: int) -> str:
    return f"{statistics.median(each[name] for each in rounds):.{digits}f}"


def _size_row(rounds: Sequence[Round]) -> list[object]:
    shown = {"root_ms": 2, "root_bytes": 0, "gate_ms": 1, "join_seconds": 2, "join_root_seconds": 2}
    figures = [_median(rounds, name, digits) for name, digits in shown.items()]
    return [*(rounds[0][name] for name in ("ranks", "nodes", "meet", "speak_to_root")), *figures]


def _latency_row(rounds: Sequence[Round]) -> list[object]:
    stranger, longest = rounds[0]["stranger"], max(each["longest_ms"] for each in rounds)
    words = [f"beside {stranger}", _median(rounds, "done_meanwhile", 0)] if stranger else ["alone", "-"]
    return [*words, _median(rounds, "median_ms", 3), _median(rounds, "p95_ms", 3), f"{longest:.2f}"]


def _lost_row(rounds: Sequence[Round]) -> list[object]:
    seconds, words = max(each["seconds"] for each in rounds), dict.fromkeys(f"`{each['words']}`" for each in rounds)
    return [rounds[0]["signal"], f"{seconds:.2f} s", f"{rounds[0]['bound_seconds']:g} s", "; ".join(words)]


@click.command(context_settings={"show_default": True})
@click.option("--gates", default=60, type=click.IntRange(1), help="Gates of a job in a round; 10,000 ranks pass fewer.")
@click.option(
    "--part", "names", multiple=True, type=click.Choice(list(parts_of(1))), help="Only this; repeat for more."
)
@recorded(3, "each measures every part, in turn")
def main(gates: int, names: Sequence[str], rounds: int, keep: Keep) -> None:
    record = keep.begun({"circumstances": circumstances(), "parts": {}})
    chosen = {name: measure for name, measure in parts_of(gates).items() if not names or name in names}
    with leaving_on_signals():
        for number, name in ((number, name) for number in range(1, rounds + 1) for name in chosen):
            if len(record["parts"].get(name, [])) >= number:
                continue
            began = time.monotonic()
            record["parts"].setdefault(name, []).append(chosen[name]())
            keep(record, page(record))
            click.echo(f"round {number} of {rounds}, {name}: {time.monotonic() - began:.1f} s", err=True)
    click.echo("\n".join(page(record)))
