"""A recommendation from the command to its result: as text, as JSON, and as a profile."""

from __future__ import annotations

import datetime
import os
import shlex
import textwrap
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from fleet_train.cluster.cluster import Cluster
from fleet_train.cluster.environment import asked_settings
from fleet_train.errors import ClusterError, ConversionError, FleetTrainError
from fleet_train.files import publish_where_linked
from fleet_train.launch.on_ranks import Peers, RankCommand, Where, start_on_ranks
from fleet_train.plan.build import build_chosen
from fleet_train.plan.price import Link
from fleet_train.plan.shards import memory_of
from fleet_train.profile import load_profile
from fleet_train.profile.catalogue import check_assignments
from fleet_train.profile.profile import BUCKET_KNOBS
from fleet_train.recommend.candidates import Candidate
from fleet_train.recommend.options import RISKS, RecommendOptions
from fleet_train.recommend.supervisor import RecommendSupervisor, Results, Tried

MEGABYTE = 2**20
_WIDTH = 118
_FAR = 1.5
"""A trial this many times longer or shorter than predicted contradicts its prediction."""
_CLOSE = 1.04
"""Relative to the shortest measured step: what counts as equal. Single trials differ by as much."""


def pick(results: Results, options: RecommendOptions) -> Candidate | None:
    """Of the allowed profiles with about the shortest measured step, the one with the least risk; None if no trial
    completed.
    """
    trials = {name: trial for name, trial in results.tried.items() if not trial.failure}
    measured = [candidate for candidate in _allowed(results, options) if candidate.name in trials]
    steps = {candidate.name: trials[candidate.name].step_ms for candidate in measured}
    close = [candidate for candidate in measured if steps[candidate.name] <= _CLOSE * min(steps.values())]

    def preference(candidate: Candidate) -> tuple[int, float]:
        """The least risk, then the shortest step."""
        return RISKS.index(candidate.risk), steps[candidate.name]

    return min(close, key=preference, default=None)


def describe(results: Results, options: RecommendOptions, cluster: Cluster) -> str:
    """The table, excluded profiles, and where predictions and trials contradict one another."""
    best = pick(results, options)
    lines = [*_conditions(results, cluster), "", *_table(results, options, best), "", "ruled out:"]
    lines += [f"  {name}: {trial.failure}" for name, trial in results.tried.items() if trial.failure]
    lines += [f"  {profile.name}: {profile.reason}" for profile in results.ruled_out]
    lines += _contradictions(results, options)
    if best is None:
        lines += ["", "no profile is recommended: no trial completed; the reasons are listed above"]
        return "\n".join(lines)
    lines += ["", f"recommended: {best.name}, {results.tried[best.name].step_ms:.1f} ms per step"]
    lines += [*_hint(results, options, best), *_memory_hint(results, best, cluster)]
    return "\n".join(lines)


def to_json(results: Results, options: RecommendOptions, cluster: Cluster) -> dict[str, Any]:
    """The complete result as plain data; seconds unless a name says otherwise."""
    best = pick(results, options)
    return {
        "exit_code": 0 if best else 1,
        "recommended": best.name if best else None,
        "seconds": results.seconds,
        "ranks": cluster.world_size,
        "nodes": cluster.node_num,
        "compute": results.measured.compute_seconds,
        "spread": results.spread,
        "network": asdict(results.measured.network),
        "error_of_the_fit": results.link_error,
        "profiles": [_row(candidate, results, options) for candidate in results.candidates],
        "ruled_out": {profile.name: profile.reason for profile in results.ruled_out},
        "contradictions": [each.name for each, _ in contradicted(results)],
    }


def profile_text(results: Results, options: RecommendOptions, cluster: Cluster, command: str) -> str:
    """The recommended profile as a file: what it extends, the chosen numbers, preceded by the reason."""
    best = pick(results, options)
    assert best is not None
    tried = results.tried[best.name]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    link = results.measured.network.between if cluster.node_num > 1 else results.measured.network.inside
    sizes = [len(cluster.ranks_on_node(node)) for node in range(cluster.node_num)]
    where = f"{len(sizes)} x {sizes[0]}" if len(set(sizes)) == 1 else " + ".join(map(str, sizes))
    reasons = [
        f"Recommended on {today} for {_script(options)} on {where} ranks: {best.name}, "
        f"{tried.step_ms:.1f} ms per step measured, {1e3 * best.step:.1f} predicted, of which "
        f"{1e3 * results.measured.compute_seconds:.1f} are computing; the link has {_rate(link)}, "
        f"{1e3 * link.latency_seconds:.2f} ms. Risk to accuracy: {best.risk.replace('_', ' ')}."
    ]
    others = [
        f"{name} {trial.step_ms:.1f} ms"
        for name, trial in results.tried.items()
        if name != best.name and not trial.failure
    ]
    reasons += [f"Also tried: {', '.join(others)}."] if others else []
    reasons.append(f"Made by: {command}")
    header = [line for reason in reasons for line in textwrap.wrap(reason, _WIDTH - 2)]
    shipped, chosen = load_profile(best.name), best.profile
    numbers = {knob: getattr(chosen, knob) for knob in BUCKET_KNOBS if getattr(shipped, knob) != getattr(chosen, knob)}
    content = {
        "description": f"{best.name} with numbers measured for {_script(options)}.",
        "extends": best.name,
        **check_assignments(options.settings),
        **numbers,
    }
    return "".join(f"# {line}\n" for line in header) + "\n" + yaml.safe_dump(content, sort_keys=False, width=_WIDTH)


def _script(options: RecommendOptions) -> str:
    return options.script.rpartition("/")[2]


def _allowed(results: Results, options: RecommendOptions) -> list[Candidate]:
    return [candidate for candidate in results.candidates if options.allows(candidate.risk)]


def _conditions(results: Results, cluster: Cluster) -> list[str]:
    measured = results.measured
    links = {"between nodes": measured.network.between} if cluster.node_num > 1 else {}
    if cluster.world_size > cluster.node_num:
        links["inside a node"] = measured.network.inside
    lines = [
        f"{where}: {_rate(link)}, {1e3 * link.latency_seconds:.2f} ms per message" for where, link in links.items()
    ]
    lines.append(
        f"computing: {1e3 * measured.compute_seconds:.1f} ms of the slowest rank's step, {results.spread:.2f} times "
        f"the fastest's; median error of the link's fit {results.link_error:.0%}; {results.seconds:.0f} s in total"
    )
    return lines


def _table(results: Results, options: RecommendOptions, best: Candidate | None) -> list[str]:
    width = max(len(candidate.name) for candidate in results.candidates)
    lines = [
        f"  {'profile':<{width}} {'risk':<12} {'predicted ms':>12} {'measured ms':>11} {'codec ms':>8} {'wire ms':>8} "
        f"{'exposed ms':>10} {'MB sent':>9} {'memory MB':>9}"
    ]
    for candidate in results.candidates:
        row = _row(candidate, results, options)
        mark = "*" if candidate is best else " "
        measured = f"{row['measured_ms']:.1f}" if row["measured_ms"] else "failed" if row["failure"] else "-"
        memory = f"{row['memory_bytes'] / MEGABYTE:.0f}" if row["memory_bytes"] else "-"
        lines.append(
            f"{mark} {candidate.name:<{width}} {candidate.risk.replace('_', ' '):<12} "
            f"{row['predicted_ms']:>12.1f} {measured:>11} "
            f"{row['codec_ms']:>8.1f} {row['wire_ms']:>8.1f} {row['exposed_ms']:>10.1f} {row['sent_megabytes']:>9.3f} "
            f"{memory:>9}"
        )
    lines.append("  * = recommended; MB that a node sends per step; codec, wire and exposed are predicted")
    return lines


def _row(candidate: Candidate, results: Results, options: RecommendOptions) -> dict[str, Any]:
    tried = results.tried.get(candidate.name)
    return {
        "name": candidate.name,
        "risk": candidate.risk,
        "allowed": options.allows(candidate.risk),
        "predicted_ms": 1e3 * candidate.step,
        "measured_ms": tried.step_ms if tried and not tried.failure else None,
        "failure": tried.failure if tried else "",
        "compute_ms": 1e3 * candidate.prediction.compute,
        "codec_ms": 1e3 * candidate.codec_seconds,
        "wire_ms": 1e3 * candidate.prediction.communication,
        "exposed_ms": 1e3 * candidate.prediction.exposed,
        "sent_megabytes": candidate.leaving_bytes / MEGABYTE,
        "memory_bytes": tried.memory_bytes if tried else 0,
        "chosen": candidate.plan.chosen,
    }


def contradicted(results: Results) -> list[tuple[Candidate, Tried]]:
    """The trials whose measured step is far from the predicted one."""
    trials = [(each, results.tried[each.name]) for each in results.candidates if each.name in results.tried]
    return [
        (each, tried)
        for each, tried in trials
        if not tried.failure and not 1 / _FAR <= 1e-3 * tried.step_ms / each.step <= _FAR
    ]


def _contradictions(results: Results, options: RecommendOptions) -> list[str]:
    found = contradicted(results)
    if not found:
        return []
    words = ", ".join(f"{each.name} {tried.step_ms:.1f} ms for {1e3 * each.step:.1f}" for each, tried in found)
    allowed = _allowed(results, options)
    untried = sum(each.name not in results.tried for each in allowed)
    more = f"; one of the {untried} that were not tried may be better: --trials {len(allowed)}" if untried else ""
    return ["", f"measured and predicted steps contradict one another: {words}{more}"]


def _hint(results: Results, options: RecommendOptions, best: Candidate) -> list[str]:
    """The predicted gain of a greater risk."""
    others = [candidate for candidate in results.candidates if not options.allows(candidate.risk)]
    quicker = [candidate for candidate in others if candidate.step < 0.9 * best.step]
    if not quicker:
        return []
    first = quicker[0]
    return [f"with --allow {first.risk}: {first.name}, {1e3 * first.step:.1f} ms predicted; compare its accuracy"]


_SHORT = 0.7
"""The share of a machine's memory above which its ranks are offered a sharded optimizer."""


def _memory_hint(results: Results, best: Candidate, cluster: Cluster) -> list[str]:
    """What a sharded optimizer would save, where the machine's memory is short. Not on GPUs: only the host's memory was
    measured."""
    measured, ranks = results.measured, len(cluster.ranks_on_node(0))
    taken, total = ranks * results.tried[best.name].memory_bytes, machine_bytes()
    if not measured.is_gloo or taken < _SHORT * total or best.plan.owners:
        return []
    who = "a rank" if ranks == 1 else f"{ranks} ranks"
    words = f"memory is short: {who} took {taken / MEGABYTE:.0f} of {total / MEGABYTE:.0f} MB"
    try:
        sharded = best.profile.with_settings("the recommendation", sharding=True)
        plan = build_chosen(
            measured.gradients, cluster, sharded, measured.averaged, measured.statistics, measured.state_values
        )
    except FleetTrainError as error:
        return [f"{words}; a sharded optimizer is no way out: {error}"]
    saved = sum(memory_of(best.plan).values()) - sum(memory_of(plan).values())
    return [f"{words}; a sharded optimizer takes about {saved / MEGABYTE:.0f} MB less of each: --set sharding=true"]


def machine_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _rate(link: Link) -> str:
    return f"{link.bytes_per_second * 8 / 1e9:.3g} Gb/s"


def start(
    options: RecommendOptions, where: Where, folder: Path, output: Path, as_json: bool, outcome: Path | None
) -> int:
    """Run the recommendation; returns the exit code. ``outcome``: given to ranks that were started from here."""
    if not Path(options.script).is_file():
        raise ConversionError(f"--script {options.script}: there is no such file")
    check_assignments(options.settings)
    command = RankCommand(
        "recommend", arguments_of(options, folder, output), folder, options.join_timeout_seconds, as_json, outcome
    )
    return start_on_ranks(command, where, lambda peers: _supervise(peers, options, folder, output))


def arguments_of(options: RecommendOptions, folder: Path, output: Path) -> list[str]:
    """A rank's arguments, which a user would repeat, too."""
    words = ["--record", str(folder.absolute()), "--output", str(output.absolute())]
    words += ["--seconds", f"{options.seconds:g}", "--trials", str(options.trials)]
    words += [f"--set={text}" for text in options.settings]
    words += [word for risk in options.allow for word in ("--allow", risk)]
    return [*words, "--script", str(Path(options.script).absolute()), *options.arguments]


def _supervise(peers: Peers, options: RecommendOptions, folder: Path, output: Path) -> dict[str, Any]:
    """As one rank: the whole recommendation; rank 0 prints, and writes the profile."""
    cluster = peers.cluster
    if cluster.world_size == 1:
        raise ClusterError(
            "recommend found one rank, which communicates nothing: give --nproc, or --ips of all machines"
        )
    options = replace(options, settings=(*asked_settings(os.environ), *options.settings))
    results = RecommendSupervisor(peers, options).run()
    peers.show(f"\n{describe(results, options, cluster)}")
    if cluster.rank == 0 and pick(results, options) is not None:
        command = shlex.join(["fleet_train", "recommend", *arguments_of(options, folder, output)])
        publish_where_linked(output, profile_text(results, options, cluster, command).encode())
        peers.show(f"written: {output}; train with: fleet_train launch --strategy {output} ...")
    return to_json(results, options, cluster)
