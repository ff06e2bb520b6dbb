"""A compression is complete or absent: bytes, real method, simulated method, compatibility, effect."""

from __future__ import annotations

from typing import Any

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives.methods import registry
from fleet_train.convert.profile_settings import refuse_on_this_device
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.plan import Bucket, TensorSpec, build_plan, simulate_methods
from fleet_train.plan.compressions import COMPRESSIONS
from fleet_train.profile import KNOBS, Profile
from fleet_train.profile.compatibility import STRATEGIES

CHOICES = set(KNOBS["compression"].choices)
BUCKET = Bucket(0, (TensorSpec("w", (8, 8), "float32"),), 0, compression="new")


def profile_of_a_value_that_only_the_schema_knows() -> Profile:
    return Profile().model_copy(update={"compression": "new"})


@pytest.mark.parametrize(
    "table", [COMPRESSIONS, registry.METHODS, simulate_methods.METHODS], ids=["bytes", "method", "simulated method"]
)
def test_every_value_of_the_schema_is_there_and_no_other(table: dict[str, Any]) -> None:
    assert set(table) == CHOICES


def test_every_compression_is_a_strategy_that_goes_or_does_not_go_with_others() -> None:
    judges = [one.is_on for one in STRATEGIES if one.knob == "compression"]
    assert {value: sum(is_on(value) for is_on in judges) for value in CHOICES} == {
        value: int(value != "none") for value in CHOICES
    }


def test_no_plan_is_made_of_a_compression_without_bytes() -> None:
    with pytest.raises(ConversionError, match="compression: new has no bytes in the plan and cannot be"):
        build_plan(BUCKET.gradients, Cluster.imagined(2, 1), profile_of_a_value_that_only_the_schema_knows())


def test_no_program_is_made_of_a_compression_without_a_method() -> None:
    with pytest.raises(ConversionError, match="compression: new has no method on real ranks"):
        registry.make_method(BUCKET, None, None, Profile(), None, None, None)  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match="compression: new has no bytes in the plan"):
        registry.dtype_between_groups("new")


def test_nothing_is_simulated_of_a_compression_without_a_reference() -> None:
    with pytest.raises(ConversionError, match="compression: new has no method in the simulation"):
        simulate_methods.make_method(BUCKET, None, Profile(), None, 0.0, False)  # type: ignore[arg-type]


def test_dgc_without_its_settings_is_no_dense_exchange() -> None:
    bucket = Bucket(0, BUCKET.gradients, 0, compression="dgc")
    with pytest.raises(ConversionError, match="momentum it has not taken over"):
        registry.make_method(bucket, None, None, Profile(), None, None, None)  # type: ignore[arg-type]


def test_float16_is_refused_where_gloo_would_sum_it_with_the_way_out() -> None:
    with pytest.raises(ProfileError, match=r"compression: fp16 is refused on Gloo: .*; use compression: bf16"):
        refuse_on_this_device(Profile(compression="fp16"), paddle.CPUPlace())
    for other in CHOICES - {"fp16"}:
        refuse_on_this_device(Profile(compression=other), paddle.CPUPlace())


def test_what_compressions_keep_of_a_gradient_keeps_its_nan() -> None:
    """Of those with a memory of values in float32; few bits travel with a block's scale, which says that it is NaN."""
    assert {name for name, known in COMPRESSIONS.items() if known.keeps_nan} == {"powersgd", "dgc"}
