"""Low precision where requested, float32 parameters and gradients, and training as good as without."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.nn import functional as F

from fleet_train.convert import process
from fleet_train.convert.passes import precision
from fleet_train.convert.passes.precision import lower_precision
from fleet_train.errors import ConversionError, DataError
from fleet_train.profile import Profile
from tests.unit.passes.training import CLASSES, FEATURES, Trained, batches, mlp, relative_difference

O1, O2 = Profile(amp_level="O1"), Profile(amp_level="O2")
O1_RECOMPUTED = Profile(amp_level="O1", recompute_segments=2)
NATIVE = pytest.param(
    False,
    id="native",
    marks=pytest.mark.skipif(
        not paddle.base.core.supports_bfloat16(), reason="this processor has no AVX-512, which oneDNN's bfloat16 needs"
    ),
)
HOW = [pytest.param(True, id="emulated"), NATIVE]


def minimize_lowered(settings: Profile, emulated: bool | None = None) -> Any:
    def minimize(optimizer: Any, loss: Any) -> Any:
        count = lower_precision(loss, settings, on_gpu=False, emulated=emulated)
        optimizer.minimize(loss)
        return count

    return minimize


def convolutional(features: Any) -> Any:
    """Convolution, batch norm, pooling, layer norm, dropout, a weight that is used twice, a branch."""
    hidden = nn.Conv2D(1, 6, 3, padding=1)(features.reshape([-1, 1, 4, 4]))
    hidden = F.max_pool2d(F.relu(nn.BatchNorm2D(6)(hidden)), 2).flatten(1)
    shared = nn.Linear(24, 24)
    hidden = F.gelu(shared(F.gelu(shared(hidden)))) + hidden
    return nn.Linear(24, CLASSES)(F.dropout(nn.LayerNorm(24)(hidden), 0.1))


def autocast_mlp(features: Any) -> Any:
    """What a script that casts by hand gets: the reference for O1."""
    features.stop_gradient = False  # else Paddle's own gradient of the first matmul crashes
    with paddle.amp.auto_cast(level="O1", dtype="bfloat16"):
        return mlp(features).cast("float32")


def rounded_mlp(features: Any) -> Any:
    """The same where no operator computes in bfloat16: products of rounded values, rounded."""

    def product(values: Any, layer: nn.Linear) -> Any:
        return _rounded(paddle.matmul(_rounded(values), _rounded(layer.weight))) + layer.bias

    hidden = paddle.tanh(product(features, nn.Linear(FEATURES, 24)))
    return product(hidden, nn.Linear(24, CLASSES))


def _rounded(values: Any) -> Any:
    return values.cast("bfloat16").cast("float32")


def dtypes_of(trained: Trained, operator_name: str) -> list[str]:
    operators = trained.main.global_block().ops
    return [str(one.result(0).dtype).rpartition(".")[2] for one in operators if one.name() == operator_name]


OPTIMIZERS = {
    "SGD": lambda: paddle.optimizer.SGD(0.1),
    "Momentum": lambda: paddle.optimizer.Momentum(0.05, 0.9),
    "Adam": lambda: paddle.optimizer.Adam(0.01, epsilon=1e-3),
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("emulated", HOW)
def test_o1_equals_casting_by_hand(emulated: bool, seed: int) -> None:
    paddle.seed(seed)
    by_hand = Trained(OPTIMIZERS["Momentum"], network=rounded_mlp if emulated else autocast_mlp)
    start = by_hand.parameters()
    lowered = Trained(OPTIMIZERS["Momentum"], minimize_lowered(O1, emulated))
    lowered.start_from(by_hand.state())
    for batch in batches(10, 16, seed):
        by_hand.step(batch)
        lowered.step(batch)
    assert relative_difference(by_hand.parameters(), start) > 1e-2
    # auto_cast adds the bias in bfloat16 as well, so that one rounding per layer differs
    assert relative_difference(lowered.parameters(), by_hand.parameters()) < (1e-5 if emulated else 1e-2)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("emulated", HOW)
def test_a_product_and_its_gradients_are_those_of_bfloat16(emulated: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    x, w, c = (random.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 4), (8, 4)))
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        values = {
            name: paddle.static.data(name, list(array.shape), "float32")
            for name, array in zip("xwc", (x, w, c), strict=True)
        }
        for value in values.values():
            value.stop_gradient = False
        product = paddle.matmul(values["x"], values["w"])
        loss = (product * values["c"]).sum()
        assert lower_precision(loss, O1, on_gpu=False, emulated=emulated) == 1
        gradients = paddle.static.gradients(loss, [values["x"], values["w"]])
    found = paddle.static.Executor(paddle.CPUPlace()).run(
        main, feed={"x": x, "w": w, "c": c}, fetch_list=[loss, *gradients]
    )
    products = bfloat16(bfloat16(x) @ bfloat16(w))
    expected = [np.sum(products * c), bfloat16(bfloat16(c) @ bfloat16(w).T), bfloat16(bfloat16(x).T @ bfloat16(c))]
    for got, wanted in zip(found, expected, strict=True):
        # A sum added up in another order may be rounded to the neighbour: one unit in the last of 8 places.
        assert np.abs(got - wanted).max() <= 2**-7 * np.abs(wanted).max()
    assert np.mean(found[2] == expected[2]) > 0.9


def bfloat16(values: Any) -> Any:
    """Float32 rounded to 8 places, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32)


def test_a_processor_without_bfloat16_is_asked_and_rank_0_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for here in (False, True):
        monkeypatch.setattr(paddle.base.core, "supports_bfloat16", lambda here=here: here)
        trained = Trained(OPTIMIZERS["SGD"], minimize_lowered(O1))
        assert set(dtypes_of(trained, "pd_op.matmul")) == {"bfloat16" if here else "float32"}
        said = precision.notices_of(O1, on_gpu=False)
        assert [bool(said), bool(precision.notices_of(O1, on_gpu=True))] == [not here, False]
        assert all("is emulated on this processor, which has no AVX-512" in line for line in said)
        assert precision.notices_of(Profile(), on_gpu=False) == []
        beside_recompute = precision.notices_of(O1_RECOMPUTED, on_gpu=False)
        assert ["beside recompute" in line for line in beside_recompute] == [here]
        assert precision.notices_of(O1_RECOMPUTED, on_gpu=True) == []


@pytest.mark.parametrize("emulated", HOW)
def test_a_frozen_layer_before_a_product_trains_as_in_float32(emulated: bool) -> None:
    def frozen(features: Any) -> Any:
        fixed = paddle.ParamAttr(trainable=False)
        return nn.Linear(16, CLASSES)(F.tanh(nn.Linear(FEATURES, 16, weight_attr=fixed, bias_attr=fixed)(features)))

    exact = Trained(OPTIMIZERS["SGD"], network=frozen)
    lowered = Trained(OPTIMIZERS["SGD"], minimize_lowered(O2, emulated), frozen)
    lowered.start_from(exact.state())
    for batch in batches(6, 16, seed=1):
        assert lowered.step(batch) == pytest.approx(exact.step(batch), rel=0.02)


@pytest.mark.parametrize("settings", [O1, O2], ids=["O1", "O2"])
def test_parameters_and_their_gradients_stay_float32(settings: Profile) -> None:
    def minimize(optimizer: Any, loss: Any) -> Any:
        lower_precision(loss, settings, on_gpu=False)
        pairs = optimizer.backward(loss)
        optimizer.apply_gradients(pairs)
        return pairs

    trained = Trained(OPTIMIZERS["Adam"], minimize, convolutional)
    dtypes = {value.dtype for pair in trained.result for value in pair}
    assert dtypes == {paddle.float32}
    assert {str(value.dtype) for value in trained.state().values()} == {"float32"}


def test_values_that_a_branch_reads_stay_float32() -> None:
    def branching(features: Any) -> Any:
        hidden = nn.Linear(FEATURES, CLASSES)(features)
        big = hidden.sum() > 1e9
        return paddle.static.nn.cond(big, lambda: hidden * 2.0, lambda: hidden + 1.0)

    trained = Trained(OPTIMIZERS["SGD"], minimize_lowered(O2), branching)
    losses = [trained.step(batch) for batch in batches(1, 16, seed=0) * 5]
    assert losses[-1] < losses[0]


def test_loss_that_is_itself_a_product_stays_float32() -> None:
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        loss = nn.Linear(FEATURES, 1)(paddle.static.data("features", [1, FEATURES], "float32")) * 0.5
        lower_precision(loss, O2, on_gpu=False)
    assert loss.dtype == paddle.float32


def test_float16_program_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "has_kernels", lambda *_: True)
    settings = Profile(amp_level="O2", amp_dtype="float16", amp_keep_batch_norm_fp32=False)
    main = paddle.static.Program()
    with paddle.static.program_guard(main, paddle.static.Program()):
        loss = convolutional(paddle.static.data("features", [None, FEATURES], "float32")).mean()
        lower_precision(loss, settings, on_gpu=True)
    norm = next(operator for operator in main.global_block().ops if operator.name() == "pd_op.batch_norm_")
    dtypes = [result.dtype for result in norm.results() if result.is_dense_tensor_type()]
    assert dtypes[:5] == [paddle.float16] + [paddle.float32] * 4
    assert {norm.operand_source(index).dtype for index in range(1, 5)} == {paddle.float32}
    assert loss.dtype == paddle.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Profile().model_copy(update={"amp_level": "O4"}), "'O4' is unknown; use O0, O1, O2"),
        (O1.model_copy(update={"amp_dtype": "int8"}), "'int8' is unknown; use bfloat16 or float16"),
        (Profile(amp_level="O1", amp_dtype="float16"), "needs a GPU: .* use bfloat16"),
        (Profile(amp_level="O2", amp_keep_batch_norm_fp32=False), "no bfloat16 batch norm on CPU; leave it on"),
    ],
)
def test_refusals(settings: Profile, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        Trained(OPTIMIZERS["SGD"], minimize_lowered(settings))


def test_o1_lowers_products_only_and_o2_what_follows_until_an_operator_needs_float32() -> None:
    plain, same = Trained(OPTIMIZERS["SGD"]), Trained(OPTIMIZERS["SGD"], minimize_lowered(Profile()))
    assert same.operators() == plain.operators()
    for settings in (O1, O2):
        trained = Trained(OPTIMIZERS["SGD"], minimize_lowered(settings, emulated=False), convolutional)
        gelu = "bfloat16" if settings is O2 else "float32"
        assert trained.result == (4 if settings is O1 else trained.result)
        assert dtypes_of(trained, "pd_op.conv2d") == ["bfloat16"]
        assert dtypes_of(trained, "pd_op.matmul") == ["bfloat16"] * 3
        assert dtypes_of(trained, "pd_op.gelu") == [gelu] * 2
        for name in ("batch_norm_", "relu", "layer_norm", "cross_entropy_with_softmax"):
            assert set(dtypes_of(trained, f"pd_op.{name}")) == {"float32"}, name
        assert settings is O2 or set(dtypes_of(trained, "pd_op.add")) == {"float32"}


@pytest.mark.parametrize("emulated", HOW)
def test_a_product_of_no_chosen_rows_has_no_gradient(emulated: bool) -> None:
    main, start = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(main, start), paddle.utils.unique_name.guard():
        x = paddle.static.data("x", [-1, 64], "float32")
        chosen = paddle.gather(nn.Linear(64, 64)(x), paddle.nonzero(x[:, 0] > 0).flatten())
        layer = nn.Linear(64, 64)
        loss = layer(chosen).tanh().sum()
        assert lower_precision(loss, O1, on_gpu=False, emulated=emulated) == 2
        gradients = paddle.static.gradients(loss, [layer.weight, layer.bias])
    exe = paddle.static.Executor(paddle.CPUPlace())
    with paddle.static.scope_guard(paddle.static.Scope()):
        exe.run(start)
        sizes = []
        for sign in (1, -1, 1, -1, -1):
            found = exe.run(main, feed={"x": np.full([4, 64], sign, "float32")}, fetch_list=gradients)
            sizes.append([float(np.abs(each).max()) for each in found])
    assert [max(size) == 0 for size in sizes] == [False, True, False, True, True], sizes


@NATIVE.marks[0]
def test_a_feed_without_samples_is_refused_where_bfloat16_would_read_old_memory() -> None:
    native = Trained(OPTIMIZERS["SGD"], minimize_lowered(O1, emulated=False))
    none = (np.zeros([0, FEATURES], "float32"), np.zeros([0, 1], "int64"))
    try:
        precision.give_out_float32()
        with pytest.raises(DataError, match=r"'features' is fed without samples: .*amp_level: O0"):
            native.step(none)
        with pytest.raises(DataError, match="without samples"), paddle.static.program_guard(native.main):
            native.exe.run(feed={"features": none[0], "labels": none[1]})
        assert np.isfinite(native.step(batches(1, 16, 0)[0]))
    finally:
        process.put_back()
