"""One rank's observations of a run, and functions that extract plain JSON values from them. Imports no Paddle."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

BYTES = (8192, 128, 1024, 32)
"""Of w0 .. w3."""


@dataclass(frozen=True)
class Event:
    """``what``: all_reduce, all_gather, reduce, broadcast, ``sent`` (a collective has ended), ``launch`` and
    ``launched`` (a bucket's launch operator begins, ends), ``meet`` (in the job's store).
    """

    what: str
    step: int
    thread: int
    nbytes: int = 0
    dtype: str = ""
    group: int = -1
    ranks: tuple[int, ...] = ()
    name: str = ""
    seconds: float = 0.0


@dataclass
class Ran:
    """What one rank saw of one program. ``steps[s]``: all values of the program behind step s; 0 is the start."""

    rank: int
    events: list[Event] = field(default_factory=list)
    steps: list[dict[str, np.ndarray[Any, Any]]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def collectives(self, *kinds: str) -> list[Event]:
        wanted = kinds or ("all_reduce", "all_gather", "reduce", "broadcast")
        return [event for event in self.events if event.what in wanted and event.step > 0]

    def moved(self, name: str) -> list[float]:
        """By how much the first element of a parameter fell in each step."""
        first = [float(values[name].flat[0]) for values in self.steps]
        return [round(before - after, 4) for before, after in pairwise(first)]


def sent(ran: Ran) -> list[list[str]]:
    """Step by step: kind, bytes and dtype of each collective, float32 left out; in the order of a communicator."""
    steps = len(ran.steps)
    return [[_said(event) for event in ran.collectives() if event.step == step] for step in range(1, steps)]


def sent_in_any_order(ran: Ran) -> list[list[str]]:
    """``sent``, sorted within a step: where two groups talk at a time, on two threads."""
    return [sorted(step) for step in sent(ran)]


def _said(event: Event) -> str:
    dtype = "" if event.dtype == "float32" else f" {event.dtype}"
    return f"{event.what} {event.nbytes}{dtype}"


def sent_as(ran: Ran) -> list[str]:
    """As what the buckets of the plan travel."""
    return sorted({bucket["compression"] for bucket in ran.facts["plan"]["buckets"]})


def counted(ran: Ran) -> int:
    """The bytes that `fleet.communication` says were sent: between two ranks, those of the buffers."""
    return int(ran.facts["bytes"])


def sending_steps(ran: Ran) -> list[int]:
    """In which steps anything is sent."""
    return sorted({event.step for event in ran.collectives()})


def threads(ran: Ran) -> str:
    """The thread of each bucket of the first step, when each parameter has a bucket: a is the first one's."""
    return _letters([event.thread for event in _by_bucket(ran)])


def groups(ran: Ran) -> str:
    """The same with process groups."""
    return _letters([event.group for event in _by_bucket(ran)])


def _by_bucket(ran: Ran) -> list[Event]:
    by_size = {event.nbytes: event for event in ran.collectives() if event.step == 1}
    return [by_size[nbytes] for nbytes in BYTES]


def _letters(values: list[int]) -> str:
    order = list(dict.fromkeys(values))
    return "".join("abcdefgh"[order.index(value)] for value in values)


def sends_beside_the_computing(ran: Ran) -> bool:
    """Whether no collective runs on the thread that computes."""
    computing = {event.thread for event in ran.events if event.what == "launch"}
    return not computing & {event.thread for event in ran.collectives()}


def members(ran: Ran) -> list[str]:
    """Of the first step: each collective with the ranks that take part."""
    return [f"{event.what} {','.join(map(str, event.ranks))}" for event in ran.collectives() if event.step == 1]


def launches_wait(ran: Ran) -> list[bool]:
    """Of each bucket: whether its collective had ended when its launch operator did."""
    ends = [index for index, event in enumerate(ran.events) if event.what == "sent" and event.step > 0]
    launched = [index for index, event in enumerate(ran.events) if event.what == "launched"]
    return [end < launch for end, launch in zip(ends, launched, strict=True)]


def executor_threads(ran: Ran) -> str:
    """Whether launch operators run on the thread of the script or on the executor's own."""
    launching = {event.thread for event in ran.events if event.what == "launch"}
    return "the script's" if launching == {ran.facts["script's thread"]} else "others"


def moved(ran: Ran) -> list[float]:
    """How much the first element of w0 falls in each step."""
    return ran.moved("w0")


def first_values(ran: Ran) -> list[float]:
    """The first element of w0 behind each step."""
    return [round(float(values["w0"].flat[0]), 4) for values in ran.steps[1:]]


def velocities(ran: Ran) -> list[float]:
    """The first element of w0's velocity behind each step."""
    return [round(float(values["w0_velocity_0"].flat[0]), 4) for values in ran.steps[1:]]


def finds_the_largest_direction(ran: Ran) -> bool:
    """Of a constant gradient with singular values 3 and 1: whether w2's last step is 3 in the place of the first."""
    return abs(ran.moved("w2")[-1] - 3.0) < 1e-3


def sends_both_directions(ran: Ran) -> bool:
    """The same gradient: whether at least half of what w2's smaller direction adds up to has arrived."""
    arrived = float(ran.steps[0]["w2"].flat[-1] - ran.steps[-1]["w2"].flat[-1])
    return arrived > (len(ran.steps) - 1) / 2


def steps_of_the_smaller_direction(ran: Ran) -> list[float]:
    """The same gradient: by how much w2's smaller direction moves, each size once; it is 1 in every step."""
    last = [float(values["w2"].flat[-1]) for values in ran.steps]
    return sorted({round(before - after, 3) for before, after in pairwise(last)})


def running_mean(ran: Ran) -> float:
    [mean] = [values for name, values in ran.steps[-1].items() if "w_1" in name]
    return round(float(mean.flat[0]), 4)


def compared_at(ran: Ran) -> list[str]:
    """When the ranks compare digests of their parameters."""
    names = [event.name.removeprefix("digest at ") for event in ran.events if event.name.startswith("digest at ")]
    return [name.partition(" of program")[0] for name in names]


def ends_with_an_operator(ran: Ran) -> bool:
    """Whether the program has the operator that looks at the parameters behind the update."""
    return any("fleet_train_finish" in name for name, _ in ran.facts["operators"])


def bounds(ran: Ran) -> list[float]:
    """How long ranks wait for one another inside a step."""
    return sorted({event.seconds for event in ran.events if event.name.startswith("step ")})


def barriers(ran: Ran) -> list[int]:
    """The steps that begin with a barrier, averagings left out."""
    return [event.step for event in ran.events if event.name.startswith("step ")]


def tanhs(ran: Ran) -> int:
    return _operators(ran)["tanh"]


def products(ran: Ran) -> int:
    return _operators(ran)["matmul"]


def _operators(ran: Ran) -> Counter[str]:
    return Counter(name for name, _ in ran.facts["operators"])


def product_dtype(ran: Ran) -> str:
    return str(dict(ran.facts["operators"])["matmul"])


def batch_norm_dtype(ran: Ran) -> str:
    return str(dict(ran.facts["operators"])["batch_norm_"])


def fetched_dtypes(ran: Ran) -> list[str]:
    """Of a product and of the activation behind it; bfloat16 comes as uint16."""
    return list(ran.facts["fetched"])


def scales(ran: Ran) -> list[float]:
    return list(ran.facts["scales"])


def fetches(ran: Ran) -> str:
    """Which of the trainer's runs of the program fetch the loss."""
    return "".join("x" if number else "." for number in ran.facts["fetched"])


def told_other_loops(ran: Ran) -> str:
    """What `fleet.should_fetch` says of the first steps."""
    return "".join("x" if answer else "." for answer in ran.facts["asked"])


def serial_flags(ran: Ran) -> list[bool]:
    flags = ran.facts["flags"]
    return [flags["FLAGS_new_executor_serial_run"], flags["FLAGS_new_executor_sequential_run"]]


def memory_fraction_flag(ran: Ran) -> float:
    return round(float(ran.facts["flags"]["FLAGS_fraction_of_gpu_memory_to_use"]), 4)


def variable(ran: Ran) -> str | None:
    value = ran.facts["environ"].get("NCCL_DEBUG")
    return None if value is None else str(value)


def large_value(ran: Ran) -> str:
    """Of an intermediate value of 4 MB: whether memory has it during a step and between steps."""
    words = {(True, False): "freed", (True, True): "kept", (False, False): "never there"}
    return words[ran.facts["needed"], ran.facts["held"]]


def plan_is_of(ran: Ran) -> str:
    """What the explained plan calls the profile."""
    return str(ran.facts["explained"]).partition(":")[0].removeprefix("profile ")


def called(ran: Ran) -> list[str]:
    """What rank 0's sentences call the profile; the other ranks say nothing."""
    return [name for line in ran.facts["told"] for name in re.findall(r"profile '(\w+)'", line)]


def planned(ran: Ran) -> str:
    """When the plan, which is explained and priced, says that something is exchanged; and whether it is waited for."""
    plan = ran.facts["plan"]
    waits = ", each bucket waited for" if plan["waits_for_each"] else ""
    return f"every {plan['accumulate_steps']} micro-batches{waits}"


def planned_averaging(ran: Ran) -> str:
    """What the plan, which is explained and priced, says of an averaging."""
    found = ran.facts["plan"]["averaging"]
    return (
        f"{found['warm_steps']} warm-up steps, then every {found['period']} ({found['schedule']}, "
        f"{found['overlap_steps']} beside it) in {found['wire_dtype']}, outer {found['outer_optimizer']}"
    )


def said(ran: Ran) -> list[str]:
    """What rank 0 has said of the case's knob: the sentence up to its reason; the other ranks say nothing."""
    return list(ran.facts["said"])


def printed(ran: Ran) -> list[str]:
    """Lines of `fleet_train profiles FILE` with one of the case's words."""
    return [line.strip() for line in str(ran.facts["printed"]).splitlines() if "EFFECT" in line]
