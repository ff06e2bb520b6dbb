"""A compression declines itself if its coding costs more than its bytes; bfloat16 stands in for those judged."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fleet_train.cluster import Cluster
from fleet_train.plan import TensorSpec
from fleet_train.plan.choose import Choice, Conditions, decline
from fleet_train.plan.price import Compute, Costs, Link, Network
from fleet_train.profile import Profile

PAIR = Cluster.imagined(2, 1)
GRADIENTS = [TensorSpec(f"w{i}", (640, 640), "float32") for i in range(8)]
# Coding at 1 GB/s: worth it where the link carries far less.
SLOW_CODEC = Costs(codec_seconds_per_byte={"bf16": 1e-9})


def over(gigabits: float, costs: Costs = SLOW_CODEC) -> Conditions:
    return Conditions(Network(Link(1e-4, gigabits * 1e9 / 8), Link(3e-5, 1e10)), costs, source="measured")


def asked(compression: str, **more: Any) -> Profile:
    """One that may be declined; the knob is for int8 and int4, here others are judged, too."""
    return Profile(compression=compression, **more).with_choices("", compression_declines=True)


def judged(gigabits: float, compression: str = "bf16", costs: Costs = SLOW_CODEC) -> Choice:
    return decline(asked(compression), GRADIENTS, PAIR, over(gigabits, costs), judged={"bf16"})


@pytest.mark.parametrize("gigabits", [0.1, 1.0])
def test_what_pays_on_a_slow_link_is_carried_out(gigabits: float) -> None:
    assert judged(gigabits) == Choice(asked("bf16"))


def test_a_compression_that_does_not_pay_is_declined_with_a_message() -> None:
    choice = judged(100.0)
    assert choice.profile.compression == "none"
    assert choice.profile.origin("compression").startswith("declined for 100 Gb/s")
    (sentence,) = choice.sentences
    assert sentence.startswith("compression: bf16 is declined: over 100 Gb/s, 0.1 ms (measured) encoding costs more")
    assert "float32 is sent instead" in sentence
    (share,) = re.findall(r"for (\d+)% of the predicted steps", sentence)
    # 100 Gb/s carry 13 MB in a millisecond, coding takes 13 ms, computing is assumed to take some times the link's: the
    # share of the whole step is far from both ends.
    assert 10 <= int(share) <= 90


def test_what_is_judged_under_local_sgd_are_its_warm_up_steps() -> None:
    """The others send no gradients, so that their price is the same for every compression."""
    profile = asked("bf16", use_local_sgd=True, local_sgd_is_warm_steps=100)
    assert decline(profile, GRADIENTS, PAIR, over(100.0), judged={"bf16"}).profile.compression == "none"


def test_a_better_codec_is_declined_on_faster_links_only() -> None:
    quick = Costs(codec_seconds_per_byte={"bf16": 1e-11})
    assert judged(30.0).sentences
    assert not judged(30.0, costs=quick).sentences


def test_bfloat16_stands_in_where_it_is_the_faster_of_the_two() -> None:
    costs = Costs(codec_seconds_per_byte={"fp16": 1e-8, "bf16": 1e-10})
    choice = decline(asked("fp16"), GRADIENTS, PAIR, over(1.0, costs), judged={"fp16"})
    assert choice.profile.compression == "bf16"
    assert "bfloat16 is sent instead" in choice.sentences[0]


def test_what_is_not_judged_is_carried_out_whatever_it_costs() -> None:
    profile = asked("bf16")
    assert decline(profile, GRADIENTS, PAIR, over(1000.0)) == Choice(profile)


def test_one_rank_has_nothing_to_decline() -> None:
    profile = asked("bf16")
    assert decline(profile, GRADIENTS, Cluster.imagined(1, 1), over(1000.0), judged={"bf16"}) == Choice(profile)


def test_long_computing_that_hides_everything_is_no_reason_to_decline() -> None:
    conditions = replace(over(1.0), compute=Compute.of(10.0))
    profile = asked("bf16")
    assert decline(profile, GRADIENTS, PAIR, conditions, judged={"bf16"}) == Choice(profile)


def test_a_profile_that_does_not_ask_for_it_gets_advice_only() -> None:
    profile = Profile(compression="bf16")
    choice = decline(profile, GRADIENTS, PAIR, over(100.0), judged={"bf16"})
    assert choice.profile is profile
    (sentence,) = choice.sentences
    assert sentence.startswith("compression: bf16 probably does not pay: over 100 Gb/s, 0.1 ms (measured) encoding")
    assert "It is sent as asked; python -m fleet_train recommend tries which profile is best" in sentence
    assert decline(profile, GRADIENTS, PAIR, over(0.1), judged={"bf16"}) == Choice(profile)
    assert not Profile(compression="int8").compression_declines
