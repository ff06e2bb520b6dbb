"""A parameter that is used by name in several places: one update by the sum of its gradients, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import paddle
import pytest
from paddle import nn
from paddle.regularizer import L1Decay, L2Decay

from fleet_train import fleet
from fleet_train.errors import ConversionError

CLIP = {"grad_clip": nn.ClipGradByGlobalNorm(1.0)}


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    fleet.init()
    yield
    fleet.shutdown()


def moved(
    first: Mapping[str, Any], second: Mapping[str, Any], *, wrapped: bool = True, is_table: bool = False, **given: Any
) -> float:
    """How far one step of SGD moves a parameter from 0.5, whose two uses have the gradients 1 and 2."""

    def use(attributes: Mapping[str, Any]) -> Any:
        attr = paddle.ParamAttr(name="w", initializer=nn.initializer.Constant(0.5), **attributes)
        if is_table:
            return nn.Embedding(1, 4, weight_attr=attr)(paddle.zeros([4, 1], "int64")).sum() / 4
        return nn.Linear(4, 1, weight_attr=attr, bias_attr=False)(paddle.ones([2, 4])).mean()

    main, startup = paddle.static.Program(), paddle.static.Program()
    with (
        paddle.static.scope_guard(paddle.static.Scope()),
        paddle.static.program_guard(main, startup),
        paddle.utils.unique_name.guard(),
    ):
        loss = use(first) + 2 * use(second)
        optimizer = paddle.optimizer.SGD(0.1, **given)
        (fleet.distributed_optimizer(optimizer) if wrapped else optimizer).minimize(loss)
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        executor.run(main)
        return 0.5 - float(np.array(paddle.static.global_scope().find_var("w").get_tensor()).ravel()[0])


@pytest.mark.parametrize("is_table", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "given", "words"),
    [
        ({}, {"learning_rate": 0.1}, {}, "learning_rate: 1.0 in one and 0.1 in another|0.1 in one and 1.0 in another"),
        ({"learning_rate": 0.1}, {"learning_rate": 0.2}, {}, "write the same learning_rate into every ParamAttr"),
        ({"regularizer": L2Decay(1.0)}, {}, {}, r"regularizer: .*L2Decay\(1.0\)"),
        ({"regularizer": L2Decay(1.0)}, {"regularizer": L1Decay(1.0)}, {}, "or give one of the places a name"),
        ({"regularizer": L2Decay(1.0)}, {"regularizer": L2Decay(1.0000001)}, {}, "regularizer"),
        ({"need_clip": False}, {}, CLIP, "need_clip: (False in one and True|True in one and False)"),
    ],
)
def test_unlike_attributes_have_no_common_update(
    first: Any, second: Any, given: Any, words: str, is_table: bool
) -> None:
    for one, other in ((first, second), (second, first)):
        with pytest.raises(ConversionError, match=f"parameter 'w' is used by name .*({words})"):
            moved(one, other, is_table=is_table, **given)


@pytest.mark.parametrize(
    ("first", "second", "given"),
    [
        ({}, {}, {}),
        ({"learning_rate": 0.1}, {"learning_rate": 0.1}, {}),
        ({"trainable": False}, {}, {}),
        ({"trainable": False, "learning_rate": 0.1}, {"regularizer": L2Decay(1.0)}, {}),
        ({}, {"trainable": False}, {}),
        ({"need_clip": False}, {}, {}),
        ({"need_clip": False}, {"need_clip": False}, CLIP),
    ],
)
def test_what_one_update_can_do_is_what_plain_paddle_does(first: Any, second: Any, given: Any) -> None:
    for one, other in ((first, second), (second, first)):
        assert moved(one, other, **given) == pytest.approx(moved(one, other, wrapped=False, **given), rel=1e-6)


def test_equal_regularizers_of_uses_act_once() -> None:
    decay = [{"regularizer": L2Decay(1.0)} for _ in range(2)]
    assert moved(*decay) == pytest.approx(0.1 * (3 + 0.5))
