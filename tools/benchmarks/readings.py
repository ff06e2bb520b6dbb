"""What the newest records say, in the order in which pages say it: the values of the list in figures.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from tools.benchmarks import embeddings, labs, step
from tools.benchmarks.contestants import ALONE, NOTHING, TORCH
from tools.benchmarks.embeddings import DENSE_SIDE, ROWS_SIDE
from tools.benchmarks.record import told_network

Content = Any  # a record's JSON
Values = Callable[[Content], Sequence[object]]


def nothing(record: Content) -> Sequence[object]:
    """A page that only links to the record."""
    del record
    return ()


def most_ranks(record: Content) -> Sequence[object]:
    return [max(each.get("ranks", 0) for rounds in record["parts"].values() for each in rounds)]


def _median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def _ends(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _none(count: int) -> object:
    return count or "none"


def _power(value: float) -> str:
    """1e-6, as pages write it."""
    return f"{value:.0e}".replace("e-0", "e-")


def checkpoint(record: Content) -> list[object]:
    """Of a checkpoint's cost in the background: the share of a step on 1 rank and on 2, and its quartiles on 2."""
    one, two = (job["summary"]["background"] for job in record["jobs"])
    size, steps = (record["jobs"][0][key] for key in ("checkpoint_bytes", "steps_per_block"))
    return [size / 1e6, steps, one["share_percent"], two["share_percent"], *two["share_percent_quartiles"]]


def joint_batch(record: Content) -> list[float]:
    """The median over the rounds of a step with ``average_over: samples`` over one with ``ranks``, and the latter in
    ms."""
    took: dict[str, dict[int, float]] = {}
    for turn in record["rounds"]:
        took.setdefault(turn["contestant"], {})[turn["round"]] = turn["step_ms"]
    samples, ranks = took["ours:samples.yaml"], took["ours:ranks.yaml"]
    return [_median([samples[number] / ranks[number] for number in ranks]), _median(list(ranks.values()))]


def codec(record: Content) -> list[float]:
    """numpy's processor time over the compiled codec's, int8 and int4 with blocks of 512, to code and to decode."""

    def seconds(case: str) -> float:
        rounds = record["gigabytes_per_second"][case]
        return sum(1 / _median([each[part] for each in rounds]) for part in ("encode", "decode"))

    return [seconds(f"{kind}, blocks of 512: numpy") / seconds(f"{kind}, blocks of 512: compiled")
            for kind in ("int8", "int4")]  # fmt: skip


def _of_part(record: Content, part: str, name: str) -> float:
    return _median([each[name] for each in record["parts"][part]])


def barrier(part: str) -> Values:
    """The root's processor ms and KB for a barrier, and its ms on the clock."""

    def values(record: Content) -> Sequence[float]:
        found = [_of_part(record, part, name) for name in ("root_ms", "root_bytes", "gate_ms")]
        return found[0], found[1] / 1e3, found[2]

    return values


def latencies(record: Content) -> list[float]:
    """Of two ranks: a barrier's median and longest; joins of 1000 and 10,000; the longest barrier beside strangers."""
    longest = {part: max(each["longest_ms"] for each in rounds)
               for part, rounds in record["parts"].items() if "stranger" in rounds[0]}  # fmt: skip
    alone = longest.pop("two ranks")
    joins = [_of_part(record, f"{nodes} x 8 over relays", "join_seconds") for nodes in (125, 1250)]
    return [_of_part(record, "two ranks", "median_ms"), alone, *joins, max(longest.values())]


def relays(record: Content) -> list[float]:
    return [_of_part(record, f"64 x 8 {where}", "root_ms") for where in ("at the root", "over relays")]


def alarms(record: Content) -> list[object]:
    return [record[key] for key in ("runs_with_alarms", "runs", "runs_that_said_busy")]


def soak(record: Content) -> list[object]:
    """Faults; those while a checkpoint was being written; tensors and losses that differ from a run without faults, and
    all; whether each sample was seen as often; the longest time to the next step, in seconds."""
    found, faults = record["comparison"], record["faults"]
    in_saves = sum(fault["checkpoint_under_way"] is not None for fault in faults)
    differing = [len(found["tensors_that_differ"]), found["tensors"], found["losses_that_differ"], found["losses"]]
    seen = "not every" if record["samples"]["wrong"] or found["batches_that_differ"] else "every"
    return [len(faults), in_saves, *differing, seen, record["recovery_seconds"]["longest"]]


def choices(record: Content) -> Sequence[object]:
    """Interleavings and deadlocks of streams that have a choice."""
    return record["interleavings"], _none(sum(each["deadlocks"] for each in record["replays"] if each["choice"]))


def without_choice(record: Content) -> Sequence[object]:
    found = {each["interleavings"] for each in record["replays"] if not each["choice"]}
    return [" or ".join(map(str, sorted(found)))]


def hangs(record: Content) -> Sequence[object]:
    """Cases, kinds, whether all have the right rank and line, how many of them within 5 s, the median seconds, and how
    many have a line."""
    cases = record["cases"]
    whole = "all" if all(each["is_rank"] and each["is_line"] is not False for each in cases) else "not all"
    quick, seconds = sum(each["is_right"] for each in cases), _median([each["seconds"] for each in cases])
    with_line = sum(bool(each["lines"]) for each in cases)
    return len(cases), len({each["kind"] for each in cases}), whole, quick, seconds, with_line


def clean_runs(record: Content) -> Sequence[object]:
    """Trainings without a fault, alarms, and parameters that differ from those of ranks that were not asked."""
    launches = record["launches"]
    alarms = sum(len(each["alarms"]) for each in launches)
    equal = not sum(each.get("parameters that differ", 0) for each in launches)
    return sum(each["trainings"] for each in launches), alarms or "no", "equal" if equal else "not equal"


def restarts(record: Content) -> Sequence[float]:
    """Seconds to the next new step with 2 ranks, without spares, with 4 ranks, with two launchers; kills of each, and
    the seconds before one; and those of torchrun with 2 and with 4 ranks, and of Ray Train with 2."""
    jobs = [job for jobs in record["rounds"] for job in jobs]

    def times(name: str) -> list[float]:
        return [kill["new step"] for job in jobs if job["name"] == name for kill in job["kills"]]

    ours = ("launch, 2 ranks", "launch --spares 0, 2 ranks", "launch, 4 ranks", "two launches, 1 rank each")
    rivals = ("torchrun, 2 ranks", "torchrun, 4 ranks", "Ray Train, 2 ranks")
    of_ours, of_rivals = ([_median(times(name)) for name in names] for names in (ours, rivals))
    return [*of_ours, len(times(ours[0])), record["pause"], *of_rivals]


def soak_with_spares(record: Content) -> Sequence[object]:
    """Faults, seconds from one to the next step (median, longest), and what was lost, in words."""
    faults, _, tensors, _, losses, _, seen, longest = soak(record)
    lost = "nothing" if not tensors and not losses and seen == "every" else "something"
    return faults, record["recovery_seconds"]["median"], longest, lost


def kills(record: Content) -> Sequence[object]:
    """Kills, and whether all that was compared is the same."""
    found = [job["comparison"] for job in record["jobs"]]
    same = all(not each["steps_that_differ"] and not each["steps_too_many"] and each["same_end"] for each in found)
    return sum(len(job["kills"]) for job in record["jobs"]), "has the bits" if same else "differs from those"


def recorder(record: Content) -> Sequence[float]:
    """Percent of a step and ms of the steps: smallest and largest of the MLP's profiles but two, then those two, then
    of short steps."""

    def cost(job: Content) -> tuple[float, float]:
        found = job["found"]
        step = _median([off for _, off in found["on_off_ms"]])
        return found["events"] * found["event_us"] / step / 10, step

    costs = {(job["network"], job["profile"]): cost(job) for job in record["jobs"]}
    apart = [costs.pop(("mlp", name)) for name in ("two_communicators", "unfused")]
    longer, short = ([cost for (network, _), cost in costs.items() if network == name] for name in ("mlp", "short"))
    ends = [end for group in (longer, short) for each in zip(*group, strict=True) for end in _ends(each)]
    return [*ends[:4], *(share for share, _ in apart), *ends[4:]]


def recorder_compared(record: Content) -> Sequence[float]:
    """Percent by which short steps with it take longer than those without, the median of the profiles, and these."""
    pairs = [job["found"]["on_off_ms"] for job in record["jobs"] if job["network"] == "short"]
    return 100 * _median([_median([on / off for on, off in each]) - 1 for each in pairs]), len(pairs)


def float32_step(key: str) -> Values:
    """Milliseconds of a step before and now, and, where the link says it, of PyTorch's best."""

    def values(record: Content) -> list[float]:
        names = [step.BEFORE, step.CONTESTANTS[0], step.best_of_torch(record)]
        return [found[key] for name in names if key in (found := _of_contestant(record, name))]

    return values


def _of_contestant(record: Content, name: str) -> dict[str, float]:
    rounds = [each[name] for each in record["rounds"]]
    return {key: _median([each[key] for each in rounds]) for key in rounds[0]}


def steps_alone(record: Content) -> list[float]:
    """Milliseconds of a step of PyTorch and of Paddle that send nothing."""
    return [_of_contestant(record, name)["step"] for name in (f"{ALONE}:{TORCH}", NOTHING)]


def idle_link(record: Content) -> list[float]:
    """Milliseconds of a step in which the link is idle: all, the forward pass, until the first large bucket is
    launched, and the rest."""
    ours = _of_contestant(record, step.CONTESTANTS[0])
    forward, launched, idle = (ours[key] for key in ("forward", "launched", "idle"))
    return [idle, forward, launched - forward, idle - launched]


def over_torch(record: Content) -> list[float]:
    """The step over that of PyTorch's best, smallest and largest round; the same of the commit before."""
    found = [step.over_torch(record, name) for name in (step.CONTESTANTS[0], step.BEFORE)]
    return [figure for each in found for figure in (_median(each), *_ends(each))]


def shares(record: Content) -> list[float]:
    """Over what the machines compute alone: measured shares with their range, equal ones, and PyTorch's better bucket
    size with equal ones."""

    def ratios(name: str) -> list[float]:
        return [each[name]["samples_per_second"] / each["alone"]["samples_per_second"] for each in record["rounds"]]

    torch = max(_median(ratios(name)) for name in record["rounds"][0] if name.startswith("PyTorch"))
    auto = ratios("auto")
    return [_median(auto), *_ends(auto), _median(ratios("equal")), torch]


def next_step(record: Content) -> list[float]:
    """The step with updates in the next one, over that without, over PyTorch's best, and over the larger of computing
    alone and the time of the busy link: median, smallest and largest round of each. The same of the step without, over
    the last of these: its median."""
    own, later = step.CONTESTANTS[:2]
    over_own = [each[later]["step"] / each[own]["step"] for each in record["rounds"]]
    found = [over_own, step.over_torch(record, later), step.over_limit(record, later)]
    ratios = [figure for each in found for figure in (_median(each), *_ends(each))]
    return [*ratios, _median(step.over_limit(record, own))]


def sharding(record: Content) -> Sequence[float]:
    """Of ResNet-18: the state's share, MB with and without, and with bf16. Steps over those without: sharded, bf16, in
    pairs, of ResNet-18 and of products. MB of products."""

    def ratio(network: str, side: str) -> float:
        return _median([made[network][side]["ms"] / made[network]["whole"]["ms"] for made in record["rounds"]])

    def memory(network: str, *sides: str) -> list[float]:
        return [_median([made[network][side]["memory"] for made in record["rounds"]]) / 2**20 for side in sides]

    sides = record["rounds"][0]["resnet18"]
    ratios = [ratio(network, side) for side in ("sharded", "sharded, bf16", "sharded in pairs")
              for network in ("resnet18", "products")]  # fmt: skip
    share = sides["sharded"]["state"] / sides["whole"]["state"]
    of_large = memory("resnet18", "sharded", "whole", "sharded, bf16")
    return [share, *of_large, *ratios, *memory("products", "sharded", "whole")]


def rows_sent(record: Content) -> list[object]:
    """Rows of a rank; MB of DeepFM with rows and whole on 2 ranks."""
    mine = [turn for turn in record["turns"] if turn["side"] == ROWS_SIDE]
    sent = [_median([turn["sent_bytes"] for turn in record["turns"]
                       if (turn["model"], turn["ranks"], turn["side"]) == ("deepfm", 2, side)]) / 1e6
            for side in (ROWS_SIDE, DENSE_SIDE)]  # fmt: skip
    return [round(_median([turn["touched_rows"] for turn in mine]), -2), *sent]


def headers(record: Content) -> Sequence[float]:
    """Percent of what an interface has sent beyond the plan's payload, of whole gradients: smallest and largest."""
    rounds = record["rounds"]
    beyond = [[made[network]["whole"]["sent"] / made[network]["whole"]["planned_sent"] for made in rounds]
              for network in rounds[0]]  # fmt: skip
    return _ends([100 * (_median(each) - 1) for each in beyond])


def _settings(turns: Sequence[Content]) -> list[list[Content]]:
    """Turns of each model, number of ranks and optimizer."""

    def key(turn: Content) -> tuple[str, int, str]:
        return turn["model"], turn["ranks"], turn["optimizer"]

    return [list(found) for _, found in groupby(sorted(turns, key=key), key)]


def row_steps(other: str) -> Values:
    """Steps with rows over those of ``other``, smallest and largest: SGD, then Adam; and the number of rounds."""

    def values(record: Content) -> list[object]:
        found: list[object] = []
        for optimizer in ("sgd", "adam"):
            settings = _settings([turn for turn in record["turns"] if turn["optimizer"] == optimizer])
            found += _ends([_median(embeddings.shares_of(turns, ROWS_SIDE, other)) for turns in settings])
        return [*found, len({turn["round"] for turn in record["turns"]})]

    return values


def differences(record: Content) -> list[object]:
    """Of our turns on 4 ranks: all; of those beyond 1e-6 the least and the most, how many, and with whole tables."""
    on_four = [turn for turn in record["turns"] if turn["ranks"] == 4 and turn["side"] in (ROWS_SIDE, DENSE_SIDE)]
    off = [turn for turn in on_four if turn["difference"]["relative"] > 1e-6]
    least, most = (_power(end) for end in _ends([turn["difference"]["relative"] for turn in off]))
    return [len(on_four), least, most, len(off), sum(turn["side"] == DENSE_SIDE for turn in off)]


def trials(rate: str, *profiles: str) -> Values:
    """Medians over the rounds, in ms, of what trials on this network measured."""

    def values(record: Content) -> list[float]:
        found = {row.name: row.step_ms for row in labs.rows_of(rate, record["networks"][rate])}
        return [found[name] for name in profiles]

    return values


def errors(record: Content) -> Sequence[object]:
    """Trials; their median and worst error, and whose it is; how many are off by more than 20 %."""
    trials = [
        (100 * abs(one["predicted_ms"] / one["measured_ms"] - 1), f"`{one['name']}` {told_network(rate)}")
        for rate, rounds in record["networks"].items() for made in rounds for one in labs.tried(made)
    ]  # fmt: skip
    worst, whose = max(trials)
    return [
        len(trials), _median([error for error, _ in trials]), worst, whose, sum(error > 20 for error, _ in trials),
    ]  # fmt: skip


def orders(record: Content) -> list[float]:
    """The rank correlation of predicted and measured steps at 100 Mb/s, at 1 Gb/s and without a limit."""
    found = labs.rank_correlations(record["networks"])
    return [found[rate][0] for rate in ("100mbit", "1gbit", "none")]


def picks(record: Content) -> list[object]:
    """Of the rounds: those in which the best of the default number of trials is within 1 % of the best of all; all;
    that number."""
    rounds = [labs.best_by_default_and_of_all(made) for networks in record["networks"].values() for made in networks]
    above = [100 * (pick["measured_ms"] / best["measured_ms"] - 1) for pick, best in rounds]
    return [sum(each <= 1 for each in above), len(above), labs.BY_DEFAULT]


def batch_norm(record: Content) -> list[object]:
    deep, small = (record["summary"][name]["step_ms"] for name in ("ResNet-50", "convnet"))
    return [deep["ratio"], *deep["ratios"], record["asked"]["rounds"], small["ratio"]]


def mutants(record: Content) -> Sequence[object]:
    noticed = sum(each["end"] != "survived" for each in record)
    return len(record), noticed, 100 * noticed / len(record)
