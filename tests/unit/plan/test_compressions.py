"""A compression is complete or absent, and few bits keep what they round."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from itertools import combinations
from typing import Any
from unittest.mock import Mock

import numpy as np
import paddle
import pytest

from fleet_train import compression
from fleet_train.cluster import Cluster
from fleet_train.collectives.methods.codec import DeviceCodec, HostCodec, make_codec
from fleet_train.collectives.methods.quantised import rounds
from fleet_train.collectives.methods.registry import Parts
from fleet_train.convert.planning import refuse_on_this_device
from fleet_train.errors import ConversionError, ProfileError
from fleet_train.plan import Bucket, TensorSpec, build_plan
from fleet_train.plan.build import fragments_of
from fleet_train.profile import KNOBS, Profile, methods
from fleet_train.profile.methods import COMPRESSIONS
from fleet_train.profile.methods.base import Compression, QuantisedSettings
from fleet_train.profile.methods.rows import ROWS

CHOICES = KNOBS["compression"].choices
BUCKET = Bucket(0, (TensorSpec("w", (8, 8), "float32"),), 0, compression="new")
INT8 = {"use_local_sgd": False, "compression": "int8"}


def test_every_description_is_in_the_list_and_the_choices_of_the_knob_are_those() -> None:
    names = [module.name for module in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}.")]
    folders = pkgutil.iter_modules(compression.__path__, f"{compression.__name__}.")
    names += [f"{folder.name}.description" for folder in folders]
    described = [one for name in names for one in vars(import_module(name)).values() if isinstance(one, Compression)]
    assert {one.name for one in described} == {*COMPRESSIONS, ROWS}  # which embeddings choose, not the knob
    assert [one.name for one in COMPRESSIONS.values()] == list(COMPRESSIONS) == list(CHOICES)


def test_a_value_without_a_description_is_refused_and_no_other_compression() -> None:
    unknown = Profile().model_copy(update={"compression": "new"})
    with pytest.raises(ConversionError, match="compression: new has no description and cannot be"):
        build_plan(BUCKET.gradients, Cluster.imagined(2, 1), unknown)
    bucket = Bucket(0, BUCKET.gradients, 0, compression="new")
    with pytest.raises(ConversionError, match="compression: new has no description"):
        Parts(bucket, None, None, Profile(), None).make()  # type: ignore[arg-type]


def test_float16_is_refused_where_gloo_would_sum_it_with_the_way_out() -> None:
    with pytest.raises(ProfileError, match=r"compression: fp16 is refused on Gloo: .*; use compression: bf16"):
        refuse_on_this_device(Profile(compression="fp16"), paddle.CPUPlace())
    for other in set(CHOICES) - {"fp16"}:
        refuse_on_this_device(Profile(compression=other), paddle.CPUPlace())


ELEMENTS = 1_000_003
BITS = pytest.mark.parametrize("bits", [8, 4])


def numbers(seed: int, blocks: int = 60, block: int = 512) -> np.ndarray:
    """Blocks of very different sizes, of one zero and of values next to zero."""
    random = np.random.default_rng(seed)
    sizes = 10.0 ** random.integers(-20, 10, [blocks, 1])
    sizes[3], sizes[5] = 0.0, 1e-38
    return (random.standard_normal([blocks, block]) * sizes).astype(np.float32).reshape(-1)


@BITS
def test_what_is_read_and_what_is_kept_back_are_what_was_there(bits: int) -> None:
    settings, values = QuantisedSettings(bits), numbers(seed=0)
    wire, kept = HostCodec(settings).encode(paddle.to_tensor(values))
    read = HostCodec(settings).decode([wire], 1.0).numpy()
    largest = np.repeat(np.abs(values.reshape(-1, 512)).max(axis=1), 512)
    assert (np.abs(read - values) <= largest / settings.levels * 0.5001 + 1e-30).all()
    np.testing.assert_allclose(read.astype(np.float64) + kept.numpy(), values, rtol=0, atol=largest.max() * 1e-7)
    assert np.abs(read).max() > 0
    assert wire.shape == [60 * settings.block_bytes]


@BITS
@pytest.mark.parametrize("block", [32, 512])
def test_a_device_writes_the_bits_of_the_host(bits: int, block: int) -> None:
    settings = QuantisedSettings(bits, block)
    values, start = numbers(7, block=block), numbers(8, block=block)
    results = []
    for codec in (make_codec(settings, True), make_codec(settings, False)):
        total = codec.add(paddle.to_tensor(start), [paddle.to_tensor(values[:1000].reshape(20, 50))])
        wire, kept = codec.encode(total)
        both = codec.decode([wire, wire], 0.25, None)
        results.append((np.array(wire.numpy()), np.array(kept.numpy()), np.array(both.numpy())))
    for host, device in zip(*results, strict=True):
        np.testing.assert_array_equal(host, device)


@BITS
@pytest.mark.parametrize("make", [HostCodec, DeviceCodec])
def test_a_block_with_nan_or_infinity_is_nan_for_all_and_leaves_no_error(bits: int, make: type) -> None:
    values = np.ones(512 * 4, np.float32)
    values[600], values[1100], values[1600] = np.nan, np.inf, -np.inf
    codec = make(QuantisedSettings(bits))
    wire, kept = codec.encode(paddle.to_tensor(values))
    read = codec.decode([wire], 1.0).numpy().reshape(4, 512)
    assert (read[0] == 1.0).all()
    assert np.isnan(read[1:]).all()
    assert (kept.numpy() == 0).all()


@BITS
@pytest.mark.parametrize("make", [HostCodec, DeviceCodec])
def test_stochastic_rounding_has_the_exact_value_as_its_mean(bits: int, make: type) -> None:
    settings = QuantisedSettings(bits, stochastic=True)
    codec, values = make(settings), np.linspace(-1, 1, 512, dtype=np.float32)
    reads = []
    for step in range(400):
        wire, _ = codec.encode(paddle.to_tensor(values), settings.dither("w", 0, 0, step))
        reads.append(np.array(codec.decode([wire], 1.0).numpy()))
    error_of_one, error_of_mean = np.abs(reads[0] - values).max(), np.abs(np.mean(reads, axis=0) - values).max()
    assert error_of_one > 0.4 / settings.levels
    # Five standard deviations of a mean of 400 draws of a half each, and the 256 steps of the random numbers.
    assert error_of_mean < (5 * 0.5 / 20 + 1 / 256) / settings.levels


@pytest.mark.parametrize("draw", [lambda low, _: low, lambda _, high: high - 1], ids=["the first", "the last"])
def test_each_seed_that_a_device_may_draw_is_one_that_it_takes(draw: Any) -> None:
    codec, random = DeviceCodec(QuantisedSettings(8, 32, stochastic=True)), Mock(integers=draw)
    wires = [codec.encode(paddle.ones([64]) * 0.3, random)[0].tolist() for _ in range(2)]
    assert wires[0] == wires[1]  # 0 would be a seed of Paddle's own choice


def test_random_numbers_follow_from_seed_name_rank_phase_and_step() -> None:
    settings = QuantisedSettings(8)
    keys = [("w", 0, 0, 1), ("v", 0, 0, 1), ("w", 1, 0, 1), ("w", 0, 1, 1), ("w", 0, 0, 2)]
    drawn = [settings.dither(*key).integers(0, 2**32, 4).tolist() for key in keys]
    assert all(one != other for one, other in combinations(drawn, 2))
    assert settings.dither(*keys[0]).integers(0, 2**32, 4).tolist() == drawn[0]


@BITS
@pytest.mark.parametrize("members", [2, 3, 16])
def test_each_rank_sends_the_few_bits_of_a_ring_allreduce(bits: int, members: int) -> None:
    profile = Profile(compression=f"int{bits}", fuse_grad_size_in_MB=64.0)
    plan = build_plan([TensorSpec("w", (ELEMENTS,), "float32")], Cluster.imagined(members, 1), profile)
    ideal = 2 * (members - 1) / members * ELEMENTS * bits / 8
    for sent in plan.sent_by_rank():
        assert ideal <= sent < 1.03 * ideal


@pytest.mark.parametrize("members", [2, 3, 4, 7, 16])
def test_each_member_exchanges_with_each_other_once(members: int) -> None:
    table = rounds(members)
    met = [pair for one in table for pair in one.items()]
    assert sorted(met) == [(a, b) for a in range(members) for b in range(members) if a != b]
    assert all(one[other] == member for one in table for member, other in one.items())
    assert len(table) == members - 1 + members % 2


def layers(*sizes: int) -> list[TensorSpec]:
    return [
        TensorSpec(f"layer_{i}.{kind}_0", (n,), "float32")
        for i, size in enumerate(sizes)
        for kind, n in (("w", size), ("b", 1))
    ]


@pytest.mark.parametrize("sizes", [(100, 1, 1, 1), (1, 1, 1, 100), (3, 90, 3, 3, 90), (1,) * 7])
@pytest.mark.parametrize("number", [2, 3, 4])
def test_neighbours_are_cut_where_sizes_come_out_most_even(sizes: tuple[int, ...], number: int) -> None:
    values = layers(*sizes)
    parts = fragments_of(values, number, "sequential")
    assert [position for part in parts for position in part] == list(range(len(values)))
    assert len(parts) == number
    assert all(parts)
    largest = max(sum(values[i].elements for i in part) for part in parts)
    assert largest <= sum(value.elements for value in values) / number + max(sizes) + 1


def test_local_groups_send_few_bits_between_their_leaders_only() -> None:
    profile = Profile(compression="int8", use_hierarchical_allreduce=True)
    plan = build_plan([TensorSpec("w", (ELEMENTS,), "float32")], Cluster.imagined(3, 2), profile)
    assert [(phase.kind, phase.groups) for phase in plan.phases()] == [
        ("reduce", ((0, 1), (2, 3), (4, 5))),
        ("alltoall", ((0, 2, 4),)),
        ("allgather", ((0, 2, 4),)),
        ("broadcast", ((0, 1), (2, 3), (4, 5))),
    ]
    plan = build_plan([TensorSpec("w", (1000,), "float32")], Cluster.imagined(2, 2), profile)
    (between,) = [phase for phase in plan.phases() if phase.groups == ((0, 2),)]
    # Two blocks of 512 numbers, each a byte, and of a scale of 4 bytes.
    assert (between.kind, between.nbytes) == ("allgather", 2 * (512 + 4))


def test_fragments_are_whole_layers_in_turn_or_neighbours() -> None:
    values = layers(5, 5, 5, 5, 5, 5)
    assert fragments_of(values, 1, "strided") == ()
    assert fragments_of(values, 3, "strided") == ((0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11))
    assert fragments_of(values, 3, "sequential") == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    without_dots = [TensorSpec(name, (3,), "float32") for name in ("w", "b", "fc.w", "fc.b")]
    assert fragments_of(without_dots, 3, "strided") == ((0,), (1,), (2, 3))
    with pytest.raises(ProfileError, match=r"local_sgd_fragments: 4 is more than the 3 layers that the program trains"):
        fragments_of(layers(5, 5, 5), 4, "strided")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_sgd_fragments": 3}, "local_sgd_fragments: 3 is more than local_sgd_steps, 2"),
        ({"local_sgd_fragments": 2, "local_sgd_schedule": "doubling"}, "does not go with local_sgd_schedule: doubling"),
        ({"local_sgd_fragments": 2, "local_sgd_momentum": "reset"}, "does not go with local_sgd_momentum: reset"),
        ({"local_sgd_fragment_pattern": "sequential"}, "has no effect while local_sgd_fragments is 1"),
        (
            {"local_sgd_steps": 9, "local_sgd_fragments": 3, "local_sgd_overlap_steps": 3},
            "3 is not below local_sgd_steps / local_sgd_fragments, 3: .* use 2 or less",
        ),
        ({"quantised_block_size": 64}, "has no effect while compression is none and local_sgd_dtype is float32"),
        (INT8 | {"quantised_block_size": 100}, "quantised_block_size: 100 is not a multiple of 32; use 96"),
        (INT8 | {"quantised_block_size": 64}, None),
        ({"local_sgd_dtype": "int8", "quantised_block_size": 64}, None),
    ],
)
def test_fragments_and_blocks_without_effect_or_place_are_refused(
    settings: dict[str, Any], message: str | None
) -> None:
    settings = {"use_local_sgd": True, **settings}
    if message is None:
        Profile(**settings)
    else:
        with pytest.raises(ProfileError, match=message):
            Profile(**settings)
