"""A compression is complete or absent: everything walks one list of descriptions."""

from __future__ import annotations

import pkgutil
from importlib import import_module

import paddle
import pytest

from fleet_train.cluster import Cluster
from fleet_train.collectives.methods.registry import Parts
from fleet_train.convert.planning import refuse_on_this_device
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.plan import Bucket, TensorSpec, build_plan
from fleet_train.plan.price import TYPICAL
from fleet_train.profile import KNOBS, Profile, methods
from fleet_train.profile.compatibility import STRATEGIES
from fleet_train.profile.methods import COMPRESSIONS, base
from fleet_train.profile.methods.base import Compression

CHOICES = KNOBS["compression"].choices
BUCKET = Bucket(0, (TensorSpec("w", (8, 8), "float32"),), 0, compression="new")


def profile_of_a_value_that_only_the_schema_knows() -> Profile:
    return Profile().model_copy(update={"compression": "new"})


def test_the_choices_of_the_knob_are_the_list() -> None:
    assert tuple(COMPRESSIONS) == CHOICES
    assert all(name == one.name for name, one in COMPRESSIONS.items())


def test_every_description_beside_the_list_is_in_it() -> None:
    names = [module.name for module in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}.")]
    described = [one for name in names for one in vars(import_module(name)).values() if isinstance(one, Compression)]
    assert {one.name for one in described} == set(COMPRESSIONS)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_every_description_is_complete(name: str) -> None:
    described, profile = COMPRESSIONS[name], Profile(compression=name)
    assert described.words
    assert (described.family is None) == (name == "none")
    (bucket,) = build_plan(BUCKET.gradients, Cluster.imagined(2, 1), profile).buckets
    assert bucket.sent == described.sent(bucket, profile, False)
    for knob in described.knobs.model_fields if described.knobs else ():
        only_with = KNOBS[knob].only_with
        assert only_with is not None
        assert name in only_with.choices["compression"]
    assert TYPICAL.of(name).codec == described.costs.codec
    for where in (described.ranks_in, described.numpy_in):
        assert not where or callable(base._named(where))
    overridden = type(described)
    assert described.ranks_in or overridden.on_ranks is not Compression.on_ranks
    assert described.numpy_in or overridden.in_numpy is not Compression.in_numpy


def test_every_compression_is_a_strategy_that_goes_or_does_not_go_with_others() -> None:
    judges = [one.is_on for one in STRATEGIES if one.knob == "compression"]
    assert {value: sum(is_on(value) for is_on in judges) for value in CHOICES} == {
        value: int(value != "none") for value in CHOICES
    }


def test_a_value_without_a_description_is_refused_and_no_other_compression() -> None:
    with pytest.raises(ConversionError, match="compression: new has no description and cannot be"):
        build_plan(BUCKET.gradients, Cluster.imagined(2, 1), profile_of_a_value_that_only_the_schema_knows())
    with pytest.raises(ConversionError, match="compression: new has no description"):
        Parts(BUCKET, None, None, Profile(), None).make()  # type: ignore[arg-type]


def test_dgc_without_its_settings_is_no_dense_exchange() -> None:
    bucket = Bucket(0, BUCKET.gradients, 0, compression="dgc")
    with pytest.raises(ConversionError, match="momentum it has not taken over"):
        Parts(bucket, None, None, Profile(), None).make()  # type: ignore[arg-type]


def test_float16_is_refused_where_gloo_would_sum_it_with_the_way_out() -> None:
    with pytest.raises(ProfileError, match=r"compression: fp16 is refused on Gloo: .*; use compression: bf16"):
        refuse_on_this_device(Profile(compression="fp16"), paddle.CPUPlace())
    for other in set(CHOICES) - {"fp16"}:
        refuse_on_this_device(Profile(compression=other), paddle.CPUPlace())


def test_what_compressions_keep_of_a_gradient_keeps_its_nan() -> None:
    """Of those with a memory of values in float32; few bits travel with a block's scale, which says that it is NaN."""
    assert {name for name, known in COMPRESSIONS.items() if known.keeps_nan} == {"powersgd", "dgc"}
