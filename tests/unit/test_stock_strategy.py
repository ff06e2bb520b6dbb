"""A `paddle.distributed.fleet.DistributedStrategy` is adopted: every field has a fate, or is refused by its name."""

from __future__ import annotations

import re
from typing import Any

import paddle
import pytest
from paddle.distributed import fleet

from fleet_train.convert.strategy import DistributedStrategy
from fleet_train.errors import ProfileError
from fleet_train.profile import Profile
from fleet_train.profile.fleet_objects import differing
from tests.unit.test_strategy import ADAPTIVE, AMP, said, settings_of

PROTOBUF_STRING = 9


def stock(**assigned: Any) -> Any:
    """A ``paddle.distributed.fleet.DistributedStrategy``."""
    strategy = fleet.DistributedStrategy()
    for name, value in assigned.items():
        setattr(strategy, name, value)
    return strategy


NUMBERS = {"incr_every_n_steps": 10, "decr_every_n_nan_or_inf": 1, "incr_ratio": 4.0, "decr_ratio": 0.5}
SYNCHRONISED = {"sync_batch_norm": True, "fuse_all_reduce_ops": False, "sync_nccl_allreduce": False}
HIERARCHICAL = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 4}
LOCAL = {"use_local_sgd": True, "local_sgd_steps": 4, "local_sgd_is_warm_steps": 30}
O2 = {"amp_level": "O2", "amp_dtype": "float16"}


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"nccl_comm_num": 2, "fuse_grad_size_in_MB": 4}, {"nccl_comm_num": 2, "fuse_grad_size_in_MB": 4.0}),
        ({"fuse_grad_size_in_MB": 32}, {"fuse_grad_size_in_MB": 32.0}),  # Fleet's own default, but assigned
        ({"_fuse_grad_size_in_TFLOPS": 20.0}, {"fuse_parameter_groups_size": 20}),
        *((same, same) for same in (SYNCHRONISED, HIERARCHICAL)),
        ({"recompute": True, "recompute_configs": {"checkpoints": ["w"]}}, {"recompute_checkpoints": ["w"]}),
        ({"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 30}}, LOCAL),
        (
            {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4, "begin_step": 30}},
            ADAPTIVE | LOCAL,
        ),
        ({"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4, "avg": True}}, {"accumulate_steps": 4}),
        ({"fp16_allreduce": True}, {"compression": "fp16"}),
        ({"calc_comm_same_stream": True}, {"collective_stream": "calc"}),
        ({"amp": True, "amp_configs": NUMBERS}, AMP | {f"amp_{name}": value for name, value in NUMBERS.items()}),
        (
            {"amp": True, "amp_configs": {"init_loss_scaling": 128.0, "use_dynamic_loss_scaling": False}},
            AMP | {"amp_init_loss_scaling": 128.0, "amp_dynamic_loss_scaling": False},
        ),
        ({"amp": True, "amp_configs": {"use_pure_bf16": True}}, O2 | {"amp_dtype": "bfloat16"}),
        ({"amp": True, "amp_configs": {"use_pure_fp16": True, "use_fp16_guard": False}}, O2),
        (
            {"sharding": True, "sharding_configs": {"stage": 2, "sharding_degree": 4}},
            {"sharding": True, "sharding_stage": 2, "sharding_degree": 4},
        ),
        ({"hybrid_configs": {"sharding_degree": 2}}, {"sharding": True, "sharding_degree": 2}),
        ({"cudnn_exhaustive_search": True}, {"environment": {"FLAGS_cudnn_exhaustive_search": "1"}}),
        ({"conv_workspace_size_limit": 1024}, {"environment": {"FLAGS_conv_workspace_size_limit": "1024"}}),
        ({"last_comm_group_size_MB": 2}, {"last_comm_group_size_MB": 2.0}),
        ({"fuse_grad_size_in_num": 10}, {"fuse_parameter_groups_size": 10}),
    ],
)
def test_fields_become_the_same_knobs_in_any_order_and_from_a_stock_strategy(
    given: dict[str, Any], settings: dict[str, Any]
) -> None:
    backwards = DistributedStrategy()
    for name in reversed(given):
        setattr(backwards, name, given[name])
    assert settings_of(DistributedStrategy(**given)) == settings_of(backwards) == settings
    assert settings_of(DistributedStrategy.from_stock(stock(**given))) == settings


REFUSED = {
    "lars": "build paddle.incubate.optimizer.LarsMomentumOptimizer yourself",
    "lamb": "build paddle.optimizer.Lamb yourself",
    "pipeline": "only data parallelism is supported",
    "tensor_parallel": "only data parallelism is supported",
    "elastic": "changes the number of ranks",
    "auto": "automatic parallelism",
    "without_graph_optimization": "leave it at True",
    "asp": "paddle.incubate.asp",
    "fuse_grad_merge": "merged gradients are not fused",
    "adam_d2sum": "wrap the optimizer that you want",
    "heter_ccl_mode": "different kinds of devices",
    "is_fl_ps_mode": "parameter servers",
    "qat": "paddle.quantization",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_flipped_field_of_the_stock_strategy_without_a_knob_is_refused_with_the_reason(name: str) -> None:
    given = stock()
    setattr(given.strategy, name, not getattr(given.strategy, name))
    with pytest.raises(ProfileError) as caught:
        DistributedStrategy.from_stock(given)
    assert str(caught.value).startswith(f"DistributedStrategy.{name}")
    assert REFUSED[name] in str(caught.value)


def test_every_leaf_of_the_stock_strategy_has_a_fate_or_is_refused_by_name() -> None:
    """Change one field after another, whatever its type and however deep; each must be heard."""
    unheard, paths = [], sorted(leaves(stock().strategy.DESCRIPTOR))
    for path in paths:
        given = stock()
        change(given.strategy, path)
        assert differing(given.strategy, stock().strategy), f"{path} was not changed"
        if f"DistributedStrategy.{path.split('.')[0]}" not in what_is_said(given):
            unheard.append(path)
    # Knobs that are carried out need no words; a_sync_configs.k_steps = 0 is what `a_sync = False` leaves behind.
    assert unheard == [
        "a_sync_configs.k_steps",
        "fuse_all_reduce_ops",
        "fuse_grad_size_in_MB",
        "last_comm_group_size_MB",
        "nccl_comm_num",
        "sync_batch_norm",
        "sync_nccl_allreduce",
        "use_hierarchical_allreduce",
    ]
    assert len(paths) > 200


def what_is_said(given: Any) -> str:
    try:
        return "\n".join(said(DistributedStrategy.from_stock(given)))
    except ProfileError as error:
        return str(error)


def leaves(descriptor: Any, prefix: str = "") -> list[str]:
    found: list[str] = []
    for field in descriptor.fields:
        if field.message_type and not field.is_repeated:
            found += leaves(field.message_type, f"{prefix}{field.name}.")
        else:
            found.append(prefix + field.name)
    return found


def change(message: Any, path: str) -> None:
    *sections, name = path.split(".")
    for section in sections:
        message = getattr(message, section)
    field, value = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.is_repeated:
        value.add() if field.message_type else value.append("x" if field.type == PROTOBUF_STRING else 1)
    elif field.enum_type:
        setattr(message, name, next(v.number for v in field.enum_type.values if v.number != value))
    elif isinstance(value, bool):
        setattr(message, name, not value)
    else:
        setattr(message, name, f"{value}x" if isinstance(value, str) else value + 1)


@pytest.mark.parametrize(
    ("switch", "field", "value", "said"),
    [
        ("gradient_merge", "avg", False, "given false: asks for the sum"),
        ("recompute", "enable_offload", True, "given true: keeps activations on the host"),
        ("amp", "use_optimizer_fp16", True, "given true: the optimizer and its state"),
        ("amp", "custom_black_list", ["relu"], "given ['relu']: which operators"),
    ],
)
def test_what_cannot_be_carried_out_is_refused_by_name_in_a_stock_strategy_too(
    switch: str, field: str, value: object, said: str
) -> None:
    given = {switch: True, f"{switch}_configs": {field: value}}
    for make in (DistributedStrategy, lambda **given: DistributedStrategy.from_stock(stock(**given))):
        with pytest.raises(ProfileError, match=re.escape(f"DistributedStrategy.{switch}_configs.{field}: {said}")):
            make(**given).to_profile()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"localsgd": True}, "localsgd: given true beside adaptive_localsgd: true"),
        ({"localsgd_configs": {"k_steps": 4}}, ".*: 1, but localsgd_configs.k_steps asks for 4; keep one of the two"),
    ],
)
def test_a_stock_strategy_does_not_ask_for_two_kinds_of_local_sgd(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ProfileError, match=rf"^DistributedStrategy\.{said}"):
        DistributedStrategy.from_stock(stock(adaptive_localsgd=True, **given))


def test_fields_that_the_stock_class_keeps_outside_its_protobuf_are_read() -> None:
    with pytest.raises(ProfileError) as caught:
        DistributedStrategy.from_stock(stock(fuse_grad_size_in_TFLOPS=0, hybrid_configs={"order": ["mp", "dp"]}))
    assert [line.split(":")[0] for line in str(caught.value).split("\n")] == [
        "DistributedStrategy.hybrid_parallel_order",
        "DistributedStrategy.fuse_grad_size_in_TFLOPS (read as fuse_parameter_groups_size)",
    ]


def test_sizes_of_fleets_groups_become_buckets_that_rank_0_names() -> None:
    strategy = DistributedStrategy.from_stock(stock(_fuse_grad_size_in_TFLOPS=20.0, fuse_grad_size_in_MB=0))
    assert settings_of(strategy) == {"fuse_parameter_groups_size": 20, "fuse_grad_size_in_MB": 4096}
    assert said(strategy) == [
        "DistributedStrategy.fuse_grad_size_in_MB: 0 is mapped: read as fuse_grad_size_in_MB: 4096; Fleet's 0 is no "
        "limit by size, fuse_parameter_groups_size is the limit",
        "DistributedStrategy.fuse_grad_size_in_TFLOPS: 20 is mapped: read as fuse_parameter_groups_size, the number of "
        "gradients, because Fleet sets FLAGS_fuse_parameter_groups_size with it",
    ]


def test_a_field_of_a_later_paddle_is_refused_by_its_name() -> None:
    given = stock()
    given.__dict__["brand_new_field"] = 5
    with pytest.raises(
        ProfileError, match=r"^DistributedStrategy\.brand_new_field: given 5: fleet_train does not know"
    ):
        DistributedStrategy.from_stock(given)


def test_a_default_build_strategy_is_accepted_and_a_cuda_graph_refused() -> None:
    given = stock(build_strategy=paddle.static.BuildStrategy())
    for unchanged in (stock(), given):
        assert DistributedStrategy.from_stock(unchanged).to_profile() == Profile(name="strategy")
    passes = paddle.static.BuildStrategy()
    passes.allow_cuda_graph_capture = True
    refusal = r"^DistributedStrategy\.build_strategy\.allow_cuda_graph_capture: given true: host operators cannot"
    with pytest.raises(ProfileError, match=refusal):
        DistributedStrategy.from_stock(stock(build_strategy=passes))
    with pytest.raises(ProfileError, match=refusal):
        DistributedStrategy().build_strategy = passes


@pytest.mark.parametrize("given", ["multi_node", 3, None, object()])
def test_something_else_is_no_stock_strategy(given: object) -> None:
    with pytest.raises(ProfileError, match=r"^strategy: given a builtins\.\w+; allowed: None, fleet_train"):
        DistributedStrategy.from_stock(given)
