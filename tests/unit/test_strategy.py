"""`DistributedStrategy`: Fleet's names, checked on assignment; no field of a stock one is ignored."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import paddle
import pytest
from paddle.distributed import fleet

from fleet_train.convert.strategy import DistributedStrategy
from fleet_train.errors import ProfileError
from fleet_train.profile import Profile, applied_mappings
from tests.support.processes import ROOT

AMP = {"amp_level": "O1", "amp_dtype": "float16"}
O2_IN_FLOAT16, O2_IN_BFLOAT16 = ({"amp_level": "O2", "amp_dtype": dtype} for dtype in ("float16", "bfloat16"))
ADAPTIVE = {"use_local_sgd": True, "local_sgd_schedule": "adaptive"}

# What becomes of each boolean field of the stock strategy when it is flipped: a word of the refusal, or what it sets.
BOOLEAN_FIELDS: dict[str, str | dict[str, Any]] = {
    "amp": AMP,
    "recompute": {"recompute_checkpoints": []},
    "localsgd": {"use_local_sgd": True, "local_sgd_steps": 1, "local_sgd_is_warm_steps": 1},
    "dgc": {"compression": "dgc"},
    "gradient_merge": {"accumulate_steps": 1},
    "lars": "build paddle.incubate.optimizer.LarsMomentumOptimizer yourself",
    "lamb": "build paddle.optimizer.Lamb yourself",
    "pipeline": "only data parallelism is supported",
    "elastic": "changes the number of ranks",
    "auto": "automatic parallelism",
    "a_sync": {},
    "sync_nccl_allreduce": {"sync_nccl_allreduce": False},
    "use_hierarchical_allreduce": {"use_hierarchical_allreduce": True},
    "sync_batch_norm": {"sync_batch_norm": True},
    "fuse_all_reduce_ops": {"fuse_all_reduce_ops": False},
    "cudnn_exhaustive_search": {"environment": {"FLAGS_cudnn_exhaustive_search": "1"}},
    "cudnn_batchnorm_spatial_persistent": {"environment": {"FLAGS_cudnn_batchnorm_spatial_persistent": "1"}},
    "adaptive_localsgd": ADAPTIVE | {"local_sgd_steps": 1, "local_sgd_is_warm_steps": 1},
    "fp16_allreduce": {"compression": "fp16"},
    "sharding": "only data parallelism is supported",
    "find_unused_parameters": {},
    "tensor_parallel": "only data parallelism is supported",
    "without_graph_optimization": "leave it at True",
    "calc_comm_same_stream": "keep communication from overlapping",
    "asp": "paddle.incubate.asp",
    "fuse_grad_merge": "merged gradients are not fused",
    "semi_auto": "automatic parallelism",
    "adam_d2sum": "wrap the optimizer that you want",
    "auto_search": "automatic parallelism",
    "heter_ccl_mode": "different kinds of devices",
    "is_fl_ps_mode": "parameter servers",
    "with_coordinator": "parameter servers",
    "qat": "paddle.quantization",
    "split_data": "automatic parallelism",
}
PROTOBUF_BOOL, PROTOBUF_STRING = 8, 9


def stock(**assigned: Any) -> Any:
    """A ``paddle.distributed.fleet.DistributedStrategy``."""
    strategy = fleet.DistributedStrategy()
    for name, value in assigned.items():
        setattr(strategy, name, value)
    return strategy


def settings_of(strategy: DistributedStrategy) -> dict[str, Any]:
    settings = strategy.to_profile().settings()
    assert settings.pop("name") == "strategy"
    return settings


def said(strategy: DistributedStrategy) -> list[str]:
    return sorted(applied_mappings(strategy.to_profile()))


def test_a_fresh_strategy_is_the_default_profile() -> None:
    assert DistributedStrategy().to_profile() == Profile(name="strategy")
    assert DistributedStrategy().to_profile().explicit == frozenset()
    assert DistributedStrategy.from_stock(stock()).to_profile() == Profile(name="strategy")


def test_the_old_recipes_script_becomes_a_profile() -> None:
    strategy = DistributedStrategy()
    strategy.exec_strategy.num_threads = 3
    strategy.exec_strategy.num_iteration_per_drop_scope = 30
    strategy.nccl_comm_num = 2
    strategy.fuse_all_reduce_ops = True
    strategy.mode = "collective"
    strategy.collective_mode = "grad_allreduce"
    settings = {"num_threads": 3, "num_iteration_per_drop_scope": 30, "nccl_comm_num": 2, "fuse_all_reduce_ops": True}
    assert settings_of(strategy) == settings
    assert strategy.to_profile().origin("num_threads") == "DistributedStrategy"
    assert (strategy.exec_strategy.num_threads, strategy.num_threads, strategy.mode) == (3, 3, "collective")


def test_a_strategy_from_a_profile_may_be_changed_and_the_profile_stays() -> None:
    profile = Profile(name="mine", nccl_comm_num=2, environment={"A": "1"})
    strategy = DistributedStrategy.from_profile(profile)
    assert strategy.to_profile() is profile
    strategy.fuse_grad_size_in_MB = 4
    changed = strategy.to_profile()
    assert (changed.name, changed.nccl_comm_num, changed.fuse_grad_size_in_MB) == ("mine", 2, 4.0)
    assert changed.environment == {"A": "1"}
    assert profile.fuse_grad_size_in_MB == "auto"


def test_a_strategy_from_a_name_or_a_file(tmp_path: Path) -> None:
    assert DistributedStrategy.from_profile("two_communicators").nccl_comm_num == 2
    path = tmp_path / "mine.yaml"
    path.write_text("extends: multi_node\nnccl_comm_num: 3\n")
    assert DistributedStrategy.from_profile(str(path)).nccl_comm_num == 3
    with pytest.raises(ProfileError, match="did you mean 'multi_node'"):
        DistributedStrategy.from_profile("multinode")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nccl_com_num", 2, "nccl_com_num: unknown attribute; did you mean 'nccl_comm_num'?"),
        ("zzz", 2, "zzz: unknown attribute"),
        ("FLAGS_sync_nccl_allreduce", 1, "unknown attribute; did you mean 'sync_nccl_allreduce'?"),
        ("nccl_comm_num", "2", "nccl_comm_num: given '2' (text); allowed: a whole number, 1 to 16, or auto"),
        ("nccl_comm_num", 99, "nccl_comm_num: given 99; allowed: a whole number, 1 to 16, or auto"),
        ("fuse_all_reduce_ops", 1, "fuse_all_reduce_ops: given 1 (a whole number); allowed: true or false"),
        ("fuse_grad_size_in_MB", -2, "allowed: a number, more than 0"),
        ("recompute", 1, "recompute: given 1: allowed: true or false"),
        ("recompute_configs", {"enable_offload": True}, "given true: has no such field here; checkpoints is known"),
        ("amp", 1, "amp: given 1: allowed: true or false"),
        (
            "amp_configs",
            {"dtype": "int4"},
            "dtype (read as amp_dtype): given 'int4'; allowed: one of bfloat16, float16",
        ),
        ("amp_configs", {"levels": "O1"}, "levels: given 'O1': has no such field here; level, dtype, use_pure_fp16, "),
        ("amp_configs", {"incr_ratio": 1.0}, "incr_ratio (read as amp_incr_ratio): given 1; allowed: a number, more"),
        ("amp_configs", {"level": "O3"}, "level (read as amp_level): given 'O3': Apex's pure half precision also "),
        ("amp_configs", {"custom_white_list": ["softmax"]}, "custom_white_list: given ['softmax']: which operators"),
        ("amp_configs", {"use_fp16_guard": True}, "given true: regions under fp16_guard are not supported; set it to"),
        ("gradient_merge_configs", {"avg": False}, "leave it at True and scale the learning rate"),
        ("dgc_configs", {"sparsity": [0.9, 1.0]}, "(read as dgc_sparsity): given 1; allowed: a number, 0 to 0.9999"),
        ("a_sync", True, "a_sync: given true: belongs to parameter servers, which are out of scope here: "),
        ("exec_strategy", 3, "exec_strategy: given 3 (a whole number); allowed: a mapping of field to value"),
        ("localsgd_configs", {"k_step": 3}, "given 3: has no such field here; k_steps and begin_step are known"),
        ("adaptive_localsgd_configs", {"k_steps": 3}, "no such field here; init_k_steps and begin_step are known"),
        ("adaptive_localsgd", 1, "adaptive_localsgd: given 1: allowed: true or false"),
        ("localsgd", 1, "localsgd (read as use_local_sgd): given 1 (a whole number); allowed: true or false"),
        ("collective_mode", "grad_alreduce", "given 'grad_alreduce': allowed: grad_allreduce or local_sgd"),
        ("local_sgd_schedule", "adaptiv", "one of constant, doubling, adaptive; did you mean 'adaptive'?"),
        ("fuse_elewise_add_act_ops", 1, "build_strategy.fuse_elewise_add_act_ops: given 1: allowed: true or false"),
        ("hybrid_configs", {"mp_degree": 1, "dp_degree": 4}, "dp_degree: given 4: is the number of ranks, which "),
    ],
)
def test_a_wrong_assignment_is_an_error_at_once(name: str, value: object, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        setattr(DistributedStrategy(), name, value)
    assert str(caught.value).startswith("DistributedStrategy.")
    assert name in str(caught.value)
    assert message in str(caught.value)


NUMBERS = {"incr_every_n_steps": 10, "decr_every_n_nan_or_inf": 1, "incr_ratio": 4.0, "decr_ratio": 0.5}


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"nccl_comm_num": 2, "fuse_grad_size_in_MB": 4}, {"nccl_comm_num": 2, "fuse_grad_size_in_MB": 4.0}),
        ({"_fuse_grad_size_in_TFLOPS": 20.0}, {"fuse_parameter_groups_size": 20}),
        ({"recompute": True, "recompute_configs": {"checkpoints": ["w"]}}, {"recompute_checkpoints": ["w"]}),
        ({"forward_recompute": True, "recompute_checkpoints": ["w"]}, {"recompute_checkpoints": ["w"]}),
        ({"amp": True, "amp_configs": NUMBERS}, AMP | {f"amp_{name}": value for name, value in NUMBERS.items()}),
        ({"use_amp": True, "amp_loss_scaling": 2**10}, AMP | {"amp_init_loss_scaling": 1024.0}),
        (
            {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 8},
            {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 8},
        ),
        (
            {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4, "begin_step": 30}},
            ADAPTIVE | {"local_sgd_steps": 4, "local_sgd_is_warm_steps": 30},
        ),
    ],
)
def test_what_fleet_calls_otherwise_becomes_knobs(given: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings_of(DistributedStrategy(**given)) == settings


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("use_local_sgd", {"use_local_sgd": True}),
        ("localsgd", {"use_local_sgd": True}),
        ("use_hierarchical_allreduce", {"use_hierarchical_allreduce": True}),
        ("sync_nccl_allreduce", {"sync_nccl_allreduce": True}),
        ("sync_batch_norm", {"sync_batch_norm": True}),
        ("amp", AMP),
        ("use_amp", AMP),
        ("dgc", {"compression": "dgc"}),
        ("use_dgc", {"compression": "dgc"}),
        ("fp16_allreduce", {"compression": "fp16"}),
        ("gradient_merge", {"accumulate_steps": 1}),
        ("adaptive_localsgd", ADAPTIVE),
    ],
)
def test_a_switch_is_carried_out_under_each_of_its_names(name: str, settings: dict[str, Any]) -> None:
    strategy = DistributedStrategy(**{name: True})
    assert settings_of(strategy) == settings
    if settings.keys() != {name}:
        assert any(one.startswith(f"DistributedStrategy.{name}: true is mapped: read as ") for one in said(strategy))
    setattr(strategy, name, False)
    assert strategy.to_profile() == Profile(name="strategy")


def test_recompute_without_checkpoints_says_that_nothing_is_recomputed() -> None:
    assert any(
        "without any, nothing is recomputed" in sentence for sentence in said(DistributedStrategy(recompute=True))
    )
    assert DistributedStrategy(recompute=False).to_profile() == Profile(name="strategy")


def test_the_old_recipes_local_sgd_script_becomes_a_profile() -> None:
    strategy = DistributedStrategy(use_local_sgd=True, local_sgd_is_warm_steps=3, local_sgd_steps=4)
    strategy.collective_mode = "local_sgd"
    assert settings_of(strategy) == {"use_local_sgd": True, "local_sgd_is_warm_steps": 3, "local_sgd_steps": 4}
    assert said(strategy) == ["DistributedStrategy.collective_mode: 'local_sgd' is mapped: read as use_local_sgd: true"]
    assert (strategy.localsgd, dict(strategy.localsgd_configs)) == (True, {"begin_step": 3, "k_steps": 4})


@pytest.mark.parametrize(
    ("configs", "settings"),
    [
        ({"dtype": "bfloat16"}, AMP | {"amp_dtype": "bfloat16"}),
        ({"level": "O2"}, O2_IN_FLOAT16),
        ({"use_pure_bf16": True}, O2_IN_BFLOAT16),
        ({"use_pure_fp16": True, "use_fp16_guard": False}, O2_IN_FLOAT16),
        (
            {"init_loss_scaling": 128.0, "use_dynamic_loss_scaling": False, "incr_every_n_steps": 1000},
            AMP | {"amp_init_loss_scaling": 128.0, "amp_dynamic_loss_scaling": False},
        ),
    ],
)
def test_mixed_precision_is_the_same_whichever_comes_first(configs: dict[str, Any], settings: dict[str, Any]) -> None:
    first, second = DistributedStrategy(amp=True), DistributedStrategy(amp_configs=configs)
    first.amp_configs, second.amp = configs, True
    assert settings_of(first) == settings_of(second) == settings


NO_EFFECT = "has no effect while {0} is false; set {0} to True, or remove it"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"amp_configs": {"level": "O2"}}, "amp_configs.level: " + NO_EFFECT.format("amp")),
        ({"amp_configs": {"use_pure_fp16": True}}, "amp_configs.use_pure_fp16: " + NO_EFFECT.format("amp")),
        ({"amp_configs": {"use_pure_bf16": True}}, "amp_configs.use_pure_bf16: " + NO_EFFECT.format("amp")),
        (
            {"gradient_merge_configs": {"k_steps": 4}},
            "gradient_merge_configs.k_steps: " + NO_EFFECT.format("gradient_merge"),
        ),
        (
            {"dgc": True, "fp16_allreduce": True},
            "dgc: asks for compression: 'dgc', but fp16_allreduce asks for 'fp16'; keep one of the two",
        ),
        (
            {"amp": True, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 4, "avg": True}},
            "gradient_merge_configs.k_steps (read as accumulate_steps): 4 does not go with",
        ),
        (
            {"fuse_grad_size_in_MB": 4, "fuse_all_reduce_ops": False},
            "fuse_grad_size_in_MB: has no effect while fuse_all_reduce_ops is false",
        ),
        (
            {"localsgd_configs": {"k_steps": 2}},
            "localsgd_configs.k_steps (read as local_sgd_steps): has no effect while",
        ),
        (
            {"use_local_sgd": True, "outer_lr": 0.7},
            "outer_lr: has no effect while outer_optimizer is none; set outer_optimizer: slowmo or diloco, or remove ",
        ),
    ],
)
def test_contradictions_are_reported_when_the_strategy_is_used(given: dict[str, Any], message: str) -> None:
    strategy = DistributedStrategy(**given)
    with pytest.raises(ProfileError) as caught:
        strategy.to_profile()
    assert str(caught.value).startswith(f"DistributedStrategy.{message}")


def test_merged_gradients_go_with_bfloat16() -> None:
    strategy = DistributedStrategy(amp=True, gradient_merge=True, gradient_merge_configs={"k_steps": 4, "avg": True})
    strategy.amp_configs = {"dtype": "bfloat16"}
    assert strategy.to_profile().accumulate_steps == 4


def test_a_configuration_over_a_profile_that_has_it_on_needs_no_switch() -> None:
    strategy = DistributedStrategy.from_profile(Profile(accumulate_steps=2, amp_level="O1"))
    assert (strategy.gradient_merge, strategy.amp) == (True, True)
    strategy.gradient_merge_configs = {"k_steps": 8}
    strategy.amp_configs = {"level": "O2"}
    strategy.amp = True
    profile = strategy.to_profile()
    assert (profile.accumulate_steps, profile.amp_level, profile.amp_dtype) == (8, "O2", "bfloat16")


def test_the_same_switch_over_a_profile_that_has_it_on_changes_nothing() -> None:
    strategy = DistributedStrategy.from_profile(Profile(name="mine", accumulate_steps=2, amp_level="O1"))
    strategy.gradient_merge = strategy.amp = True
    assert strategy.to_profile() == Profile(name="mine", accumulate_steps=2, amp_level="O1")


def test_a_switch_that_is_turned_off_again_leaves_the_other_one_of_its_knob() -> None:
    strategy = DistributedStrategy(localsgd=True, adaptive_localsgd=True)
    strategy.adaptive_localsgd = False
    assert settings_of(strategy) == {"use_local_sgd": True}


def test_adaptive_local_sgd_can_be_read_whatever_set_it() -> None:
    given = [DistributedStrategy(), *map(DistributedStrategy.from_profile, ("local_sgd", "local_sgd_adaptive"))]
    assert [strategy.adaptive_localsgd for strategy in given] == [False, False, True]
    assert said(DistributedStrategy(adaptive_localsgd=True))[0].endswith(
        "read as use_local_sgd: true and local_sgd_schedule: 'adaptive'; periods grow up to local_sgd_max_steps, "
        "Fleet's up to 16"
    )


@pytest.mark.parametrize("name", ["amp", "dgc", "lars", "lamb", "sharding", "pipeline", "recompute", "gradient_merge"])
def test_a_switch_that_is_left_off_asks_for_nothing(name: str) -> None:
    strategy = DistributedStrategy(**{name: False})
    assert getattr(strategy, name) is False
    assert said(strategy) == []


def test_a_wrong_execution_setting_is_reported() -> None:
    strategy = DistributedStrategy()
    with pytest.raises(
        ProfileError, match=r"^exec_strategy\.num_thread: unknown attribute; did you mean 'num_threads'\?$"
    ):
        strategy.exec_strategy.num_thread = 2
    with pytest.raises(ProfileError, match=r"^DistributedStrategy\.num_threads: given 0; allowed"):
        strategy.exec_strategy.num_threads = 0
    with pytest.raises(ProfileError, match="one run of the executor is one step"):
        strategy.exec_strategy.num_iteration_per_run = 2


def test_an_execution_strategy_of_another_class_gives_what_it_changes() -> None:
    class ExecutionStrategy:
        def __init__(self) -> None:
            self.num_threads = 0
            self.use_experimental_executor = False

    given = ExecutionStrategy()
    given.num_threads, given.use_experimental_executor = 2, True
    strategy = DistributedStrategy()
    strategy.exec_strategy = given
    assert strategy.num_threads == 2
    assert applied_mappings(strategy.to_profile())[0] == (
        "DistributedStrategy.exec_strategy.use_experimental_executor: true is mapped: the current executor is the only "
        "one"
    )


def test_execution_strategy_is_the_exec_strategy_of_fleet_2_x() -> None:
    strategy = DistributedStrategy()
    strategy.execution_strategy = DistributedStrategy().exec_strategy
    assert strategy.is_empty()
    threads = DistributedStrategy().exec_strategy
    threads.num_threads = 3
    strategy.execution_strategy = threads
    strategy.execution_strategy.num_iteration_per_drop_scope = 30
    assert (strategy.exec_strategy.num_threads, strategy.execution_strategy.num_threads) == (3, 3)
    assert strategy.to_profile().num_iteration_per_drop_scope == 30
    with pytest.raises(ProfileError, match=r"^exec_strategy\.thread: unknown attribute"):
        strategy.execution_strategy.thread = 3


def test_an_unknown_attribute_is_an_attribute_error_too() -> None:
    strategy = DistributedStrategy()
    assert not hasattr(strategy, "nonsense")
    with pytest.raises(ProfileError, match="did you mean 'nccl_comm_num'"):
        _ = strategy.nccl_comm_nums


def test_defaults_can_be_read_under_every_name() -> None:
    strategy = DistributedStrategy()
    assert (strategy.nccl_comm_num, strategy.amp, strategy.localsgd) == ("auto", False, False)
    assert dict(strategy.localsgd_configs) == {"begin_step": 100, "k_steps": 2}
    with pytest.raises(TypeError):  # a copy whose change nobody would see is how the stock strategy does it
        strategy.localsgd_configs["k_steps"] = 4


def test_a_strategy_can_be_copied_and_printed() -> None:
    strategy = DistributedStrategy(nccl_comm_num=2)
    reference = copy.deepcopy(strategy)
    reference.nccl_comm_num = 3
    assert strategy.nccl_comm_num == 2
    assert repr(strategy) == "DistributedStrategy(name='strategy', nccl_comm_num=2)"


def test_a_strategy_is_empty_until_something_is_set_in_it_even_a_default() -> None:
    assert DistributedStrategy().is_empty()
    assert copy.deepcopy(DistributedStrategy()).is_empty()
    for given in ({"amp": False}, {"fuse_all_reduce_ops": True}, {"name": "mine"}):
        assert not DistributedStrategy(**given).is_empty()
    assert not DistributedStrategy.from_profile("single_node").is_empty()


def test_importing_the_strategy_does_not_import_paddle() -> None:
    code = (
        "import sys; from fleet_train import DistributedStrategy as D; D().to_profile(); print('paddle' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_boolean_field_of_the_stock_strategy_has_a_fate() -> None:
    names = {field.name for field in stock().strategy.DESCRIPTOR.fields if field.type == PROTOBUF_BOOL}
    assert names == BOOLEAN_FIELDS.keys()


@pytest.mark.parametrize("name", BOOLEAN_FIELDS)
def test_a_flipped_boolean_of_the_stock_strategy_is_never_ignored(name: str) -> None:
    given, fate = stock(), BOOLEAN_FIELDS[name]
    setattr(given.strategy, name, not getattr(given.strategy, name))
    if isinstance(fate, str):
        with pytest.raises(ProfileError) as caught:
            DistributedStrategy.from_stock(given)
        assert fate in str(caught.value)
        assert str(caught.value).startswith(f"DistributedStrategy.{name}")
        return
    strategy = DistributedStrategy.from_stock(given)
    assert settings_of(strategy) == fate
    assert fate or any(f"DistributedStrategy.{name}" in sentence for sentence in said(strategy))


def test_every_leaf_of_the_stock_strategy_has_a_fate_or_is_refused_by_name() -> None:
    """Change one field after another, whatever its type and however deep; each must be heard."""
    unheard, paths = [], sorted(leaves(stock().strategy.DESCRIPTOR))
    for path in paths:
        given = stock()
        change(given.strategy, path)
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


def test_what_is_mapped_of_a_stock_strategy_is_said_by_name() -> None:
    given = stock(nccl_comm_num=2, fuse_grad_size_in_num=10, last_comm_group_size_MB=2, conv_workspace_size_limit=1024)
    given.find_unused_parameters, given.a_sync = True, False
    strategy = DistributedStrategy.from_stock(given)
    assert settings_of(strategy) == {
        "nccl_comm_num": 2,
        "fuse_parameter_groups_size": 10,
        "last_comm_group_size_MB": 2.0,
        "environment": {"FLAGS_conv_workspace_size_limit": "1024"},
    }
    assert [sentence.removeprefix("DistributedStrategy.") for sentence in said(strategy)] == [
        "a_sync: false is mapped: training is always synchronous here",
        "conv_workspace_size_limit: 1024 is mapped: read as environment.FLAGS_conv_workspace_size_limit",
        "find_unused_parameters: true is mapped: parameters without a gradient are found when the program is converted",
        "fuse_grad_size_in_num: 10 is mapped: read as fuse_parameter_groups_size",
    ]


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"fuse_grad_size_in_MB": 32}, {"fuse_grad_size_in_MB": 32.0}),  # Fleet's own default, but assigned
        (
            {"localsgd": True, "localsgd_configs": {"k_steps": 4, "begin_step": 30}},
            {"use_local_sgd": True, "local_sgd_steps": 4, "local_sgd_is_warm_steps": 30},
        ),
        (
            {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 4, "begin_step": 30}},
            ADAPTIVE | {"local_sgd_steps": 4, "local_sgd_is_warm_steps": 30},
        ),
        (
            {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4, "avg": True}},
            {"accumulate_steps": 4},
        ),
        (
            {"dgc": True, "dgc_configs": {"rampup_begin_step": 10, "rampup_step": 5, "sparsity": [0.9, 0.99]}},
            {"compression": "dgc", "dgc_rampup_begin_step": 10, "dgc_rampup_steps": 5, "dgc_sparsity": 0.99},
        ),
        ({"amp": True, "amp_configs": {"init_loss_scaling": 64.0}}, AMP | {"amp_init_loss_scaling": 64.0}),
        ({"amp": True, "amp_configs": {"use_dynamic_loss_scaling": False}}, AMP | {"amp_dynamic_loss_scaling": False}),
        (
            {"amp": True, "amp_configs": {"decr_ratio": 0.7, "incr_every_n_steps": 50}},
            AMP | {"amp_decr_ratio": 0.7, "amp_incr_every_n_steps": 50},
        ),
        ({"recompute": True, "recompute_configs": {"checkpoints": ["w"]}}, {"recompute_checkpoints": ["w"]}),
        ({"amp": True, "amp_configs": {"use_pure_fp16": True}}, O2_IN_FLOAT16),
        ({"amp": True, "amp_configs": {"use_pure_bf16": True}}, O2_IN_BFLOAT16),
        (
            {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 4, "sync_nccl_allreduce": True},
            {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 4, "sync_nccl_allreduce": True},
        ),
    ],
)
def test_a_stock_strategy_is_adopted_with_its_configs(given: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings_of(DistributedStrategy.from_stock(stock(**given))) == settings


@pytest.mark.parametrize(
    ("given", "start"),
    [
        (
            {"gradient_merge": True, "gradient_merge_configs": {"avg": False}},
            "gradient_merge_configs.avg: given false: asks for the sum",
        ),
        (
            {"recompute": True, "recompute_configs": {"enable_offload": True}},
            "recompute_configs.enable_offload: given true: has no such field",
        ),
        (
            {"amp": True, "amp_configs": {"use_optimizer_fp16": True}},
            "amp_configs.use_optimizer_fp16: given true: the optimizer and its state",
        ),
        (
            {"amp": True, "amp_configs": {"custom_black_list": ["relu"]}},
            "amp_configs.custom_black_list: given ['relu']: which operators",
        ),
        (
            {"dgc": True, "fp16_allreduce": True},
            "fp16_allreduce: asks for compression: 'fp16', but dgc asks for 'dgc'; keep one of the two",
        ),
        (
            {"localsgd": True, "adaptive_localsgd": True},
            "localsgd: given true beside adaptive_localsgd: true; keep one of the two",
        ),
        (
            {"adaptive_localsgd": True, "localsgd_configs": {"k_steps": 4}},
            "adaptive_localsgd_configs.init_k_steps: asks for local_sgd_steps: 1, but localsgd_configs.k_steps asks "
            "for 4; keep one of the two",
        ),
    ],
)
def test_what_cannot_be_carried_out_in_a_stock_strategy_is_refused_by_name(given: dict[str, Any], start: str) -> None:
    with pytest.raises(ProfileError) as caught:
        DistributedStrategy.from_stock(stock(**given))
    assert str(caught.value).startswith(f"DistributedStrategy.{start}")


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
    assert DistributedStrategy.from_stock(given).to_profile() == Profile(name="strategy")
    passes = paddle.static.BuildStrategy()
    passes.allow_cuda_graph_capture = True
    refusal = r"^DistributedStrategy\.build_strategy\.allow_cuda_graph_capture: given true: host operators cannot"
    with pytest.raises(ProfileError, match=refusal):
        DistributedStrategy.from_stock(stock(build_strategy=passes))
    with pytest.raises(ProfileError, match=refusal):
        DistributedStrategy().build_strategy = passes


@pytest.mark.parametrize(
    "name",
    "fuse_elewise_add_act_ops fuse_bn_act_ops enable_addto enable_auto_fusion fuse_relu_depthwise_conv "
    "fuse_all_optimizer_ops fuse_broadcast_ops enable_inplace memory_optimize cache_runtime_context "
    "remove_unnecessary_lock enable_sequential_execution".split(),
)
def test_a_pass_of_the_old_executor_is_mapped_in_one_sentence(name: str) -> None:
    strategy = DistributedStrategy()
    setattr(strategy.build_strategy, name, True)
    (sentence,) = said(strategy)
    assert sentence.startswith(f"DistributedStrategy.build_strategy.{name}: true is mapped: ")
    assert strategy.to_profile() == Profile(name="strategy")


def test_a_pass_that_is_switched_off_where_fleet_has_it_on_is_mapped_too() -> None:
    strategy = DistributedStrategy()
    strategy.build_strategy.fuse_bn_add_act_ops = True
    strategy.build_strategy.enable_addto = False
    assert said(strategy) == []
    strategy.build_strategy.fuse_bn_add_act_ops = False
    assert len(said(strategy)) == 1


@pytest.mark.parametrize("name", ["allow_op_delay", "use_thread_barrier"])
def test_the_old_executors_waits_are_mapped_in_one_sentence(name: str) -> None:
    strategy = DistributedStrategy()
    setattr(strategy.exec_strategy, name, True)
    (sentence,) = said(strategy)
    assert sentence.endswith("results stay the same")


def test_reduce_is_mapped_to_allreduce_and_a_sum_of_gradients_refused() -> None:
    strategy = DistributedStrategy()
    strategy.build_strategy.reduce_strategy = paddle.static.BuildStrategy.ReduceStrategy.Reduce
    (sentence,) = said(strategy)
    assert "by allreduce, with the same results" in sentence
    with pytest.raises(ProfileError, match="multiply the loss by the number of ranks"):
        strategy.build_strategy.gradient_scale_strategy = 1


def test_an_own_build_strategy_gives_what_both_classes_know() -> None:
    passes = paddle.static.BuildStrategy()
    passes.fuse_all_reduce_ops = False
    passes.nccl_comm_num = 2
    strategy = DistributedStrategy()
    strategy.build_strategy = passes
    assert (strategy.fuse_all_reduce_ops, strategy.nccl_comm_num) == (False, 2)


@pytest.mark.parametrize("given", ["multi_node", 3, None, object()])
def test_something_else_is_no_stock_strategy(given: object) -> None:
    with pytest.raises(ProfileError, match=r"^strategy: given a builtins\.\w+; allowed: None, fleet_train"):
        DistributedStrategy.from_stock(given)
