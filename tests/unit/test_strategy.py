"""`DistributedStrategy`: Fleet's names, checked on assignment; what is adopted is in test_stock_strategy.py."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fleet_train.convert.strategy import DistributedStrategy
from fleet_train.errors import ProfileError
from fleet_train.profile import Profile, applied_mappings

AMP = {"amp_level": "O1", "amp_dtype": "float16"}
ADAPTIVE = {"use_local_sgd": True, "local_sgd_schedule": "adaptive"}


def settings_of(strategy: DistributedStrategy) -> dict[str, Any]:
    settings = strategy.to_profile().settings()
    assert settings.pop("name") == "strategy"
    return settings


def said(strategy: DistributedStrategy) -> list[str]:
    return sorted(applied_mappings(strategy.to_profile()))


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


def test_a_strategy_from_a_profile_its_name_or_file_may_be_changed_and_the_profile_stays(tmp_path: Path) -> None:
    profile = Profile(name="mine", nccl_comm_num=2, environment={"A": "1"})
    strategy = DistributedStrategy.from_profile(profile)
    assert strategy.to_profile() is profile
    strategy.fuse_grad_size_in_MB = 4
    changed = strategy.to_profile()
    assert (changed.name, changed.nccl_comm_num, changed.fuse_grad_size_in_MB) == ("mine", 2, 4.0)
    assert changed.environment == {"A": "1"}
    assert profile.fuse_grad_size_in_MB == "auto"
    assert DistributedStrategy.from_profile("two_communicators").nccl_comm_num == 2
    path = tmp_path / "mine.yaml"
    path.write_text("extends: multi_node\nnccl_comm_num: 3\n")
    assert DistributedStrategy.from_profile(str(path)).nccl_comm_num == 3
    with pytest.raises(ProfileError, match="did you mean 'multi_node'"):
        DistributedStrategy.from_profile("multinode")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nccl_com_num", 2, "nccl_com_num: unknown attribute; did you mean 'nccl_comm_num'?"),
        ("FLAGS_sync_nccl_allreduce", 1, "unknown attribute; did you mean 'sync_nccl_allreduce'?"),
        ("nccl_comm_num", "2", "nccl_comm_num: given '2' (text); allowed: a whole number, 1 to 16, or auto"),
        ("nccl_comm_num", 99, "nccl_comm_num: given 99; allowed: a whole number, 1 to 16, or auto"),
        ("fuse_all_reduce_ops", 1, "fuse_all_reduce_ops: given 1 (a whole number); allowed: true or false"),
        ("fuse_grad_size_in_MB", -2, "allowed: a number, more than 0"),
        ("amp", 1, "amp: given 1: allowed: true or false"),
        (
            "amp_configs",
            {"dtype": "int4"},
            "dtype (read as amp_dtype): given 'int4'; allowed: one of bfloat16, float16",
        ),
        ("amp_configs", {"levels": "O1"}, "levels: given 'O1': has no such field here; level, dtype, use_pure_fp16, "),
        ("amp_configs", {"incr_ratio": 1.0}, "incr_ratio (read as amp_incr_ratio): given 1; allowed: a number, more"),
        ("amp_configs", {"level": "O3"}, "level (read as amp_level): given 'O3': Apex's pure half precision also "),
        ("amp_configs", {"custom_white_list": ["conv2d", "relu"]}, "given ['conv2d', 'relu']: which operators run in "),
        ("amp_configs", {"custom_black_list": ["matmul_v2"]}, "given ['matmul_v2']: which operators run in low"),
        ("sharding_configs", {"mp_degree": 2}, "mp_degree: given 2: splits the model; only data parallelism"),
        ("sharding_configs", {"pp_degree": True}, "pp_degree: given true: splits the model"),
        ("sharding_configs", {"dp_degree": 2}, "given 2: follows from the number of ranks and sharding_degree; leave"),
        ("sharding_configs", {"optimize_offload": True}, "given true: keeps the optimizer's state on the host, which"),
        ("sharding_configs", {"gradient_merge_acc_step": 4}, "given 4: set gradient_merge and gradient_merge_configs"),
        ("sharding_configs", {"segment_MB": 4}, "given 4: has no such field here; stage, sharding_degree and those"),
        ("recompute_configs", {"enable_offload": True}, "given true: keeps activations on the host, which is not"),
        ("lars_configs", {"lars_coeff": 0.01}, "given 0.01: belongs to the optimizer: give these values to Lars"),
        ("qat_configs", {"weight_bits": 4}, "weight_bits: given 4: quantizes, which is out of scope here"),
        ("hybrid_configs", {"sharding_configs": {"comm_overlap": True}}, "tunes Fleet's dynamic mode; here fuse_grad"),
        (
            "dgc",
            True,
            "dgc: given true: DGC is not here any more: use compression: int4 (profile int4_compression), or",
        ),
        ("dgc_configs", {"sparsity": [0.9]}, "sparsity: given [0.9]: DGC is not here any more: use compression: int4"),
        ("a_sync", True, "a_sync: given true: belongs to parameter servers, which are out of scope here: "),
        ("exec_strategy", 3, "exec_strategy: given 3 (a whole number); allowed: a mapping of field to value"),
        ("localsgd_configs", {"k_step": 3}, "given 3: has no such field here; k_steps and begin_step are known"),
        ("localsgd", 1, "localsgd (read as use_local_sgd): given 1 (a whole number); allowed: true or false"),
        ("collective_mode", "grad_alreduce", "given 'grad_alreduce': allowed: grad_allreduce or local_sgd"),
        ("local_sgd_schedule", "adaptiv", "one of constant, doubling, adaptive; did you mean 'adaptive'?"),
        ("fuse_elewise_add_act_ops", 1, "build_strategy.fuse_elewise_add_act_ops: given 1: allowed: true or false"),
        ("hybrid_configs", {"mp_degree": 1, "dp_degree": 4}, "dp_degree: given 4: is the number of ranks, which "),
        ("exec_strategy.num_thread", 2, "exec_strategy.num_thread: unknown attribute; did you mean 'num_threads'?"),
        ("execution_strategy.thread", 3, "exec_strategy.thread: unknown attribute"),
        ("exec_strategy.num_threads", 0, "DistributedStrategy.num_threads: given 0; allowed"),
        ("exec_strategy.num_iteration_per_run", 2, "one run of the executor is one step"),
        ("build_strategy.gradient_scale_strategy", 2, "for another scale, scale the loss"),
    ],
)
def test_a_wrong_assignment_is_an_error_at_once(path: str, value: object, message: str) -> None:
    *parts, name = path.split(".")
    with pytest.raises(ProfileError) as caught:
        setattr(functools.reduce(getattr, parts, DistributedStrategy()), name, value)
    assert parts or str(caught.value).startswith("DistributedStrategy.")
    assert name in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({"forward_recompute": True, "recompute_checkpoints": ["w"]}, {"recompute_checkpoints": ["w"]}),
        ({"use_amp": True, "amp_loss_scaling": 2**10}, AMP | {"amp_init_loss_scaling": 1024.0}),
        ({"amp": True, "amp_configs": {"dtype": "bfloat16"}}, AMP | {"amp_dtype": "bfloat16"}),
        ({"amp_configs": {"level": "O2"}, "amp": True}, {"amp_level": "O2", "amp_dtype": "float16"}),
        (  # merged gradients go with bfloat16, not with float16
            {"amp_configs": {"dtype": "bfloat16"}, "amp": True, "accumulate_steps": 4},
            AMP | {"amp_dtype": "bfloat16", "accumulate_steps": 4},
        ),
    ],
)
def test_older_names_and_fields_of_our_own_become_knobs(given: dict[str, Any], settings: dict[str, Any]) -> None:
    assert settings_of(DistributedStrategy(**given)) == settings


# The sections of public examples for Fleet 2.x: what they set to what Fleet has anyway, and what only tunes.
SHARDED = {"segment_broadcast_MB": 32, "sharding_segment_strategy": "segment_broadcast_MB", "segment_anchors": None}
SHARDED |= {"mp_degree": 1, "dp_degree": 1, "pp_degree": 1, "hybrid_dp": False, "gradient_merge_acc_step": 1}
SHARDED |= {"optimize_offload": False, "optimize_cast": False, "use_calc_stream": False}
SECTIONS: dict[str, dict[str, Any]] = {
    "sharding_configs": SHARDED,
    "amp_configs": {"init_loss_scaling": 32768, "custom_black_list": [], "use_fp16_guard": True},
    "recompute_configs": {"enable_offload": False, "checkpoint_shape": []},
    "gradient_merge_configs": {"avg": True},
    "hybrid_configs": {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, "sep_degree": 1, "mp_configs": {}},
    "pipeline_configs": {"micro_batch_size": 1, "accumulate_steps": 1, "schedule_mode": "1F1B"},
    "tensor_parallel_configs": {"tensor_parallel_degree": 1, "tensor_init_seed": -1},
    "lars_configs": {"lars_coeff": 0.001, "lars_weight_decay": 0.0005, "epsilon": 0, "exclude_from_weight_decay": []},
    "lamb_configs": {"lamb_weight_decay": 0.01, "exclude_from_weight_decay": ()},
    "qat_configs": {"channel_wise_abs_max": True, "weight_bits": 8, "activation_bits": 8},
    "a_sync_configs": {"k_steps": 0, "launch_barrier": True, "send_queue_size": 16, "thread_pool_size": 1},
    "gradient_scale_configs": {"scale_strategy": "avg", "scale_gradient": False},
}


@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_section_has_anyway_is_taken_without_a_word(section: str) -> None:
    strategy = DistributedStrategy()
    setattr(strategy, section, SECTIONS[section])
    assert settings_of(strategy) == {}
    assert said(strategy) == []


def test_what_only_tunes_a_section_is_taken_with_a_word() -> None:
    strategy = DistributedStrategy(amp=True, sharding=True)
    strategy.sharding_configs = {"segment_broadcast_MB": 64, "segment_anchors": ["fc_0.tmp_0"], "optimize_cast": True}
    strategy.sharding_configs = {"hybrid_dp": True, "sharding_group_size": 4}
    strategy.amp_configs = {"custom_white_list": ["conv2d", "matmul_v2"], "custom_black_list": ["softmax"]}
    assert settings_of(strategy) == AMP | {"sharding": True, "sharding_degree": 4}
    words = "\n".join(said(strategy))
    for field in ("segment_broadcast_MB: 64", "segment_anchors: ['fc_0.tmp_0']", "optimize_cast: true"):
        assert f"sharding_configs.{field} is mapped: " in words
    assert (
        "amp_configs.custom_white_list: ['conv2d', 'matmul_v2'] is mapped: amp treats these operators so anyway"
        in words
    )


def test_regions_under_a_guard_are_refused_where_fleet_looks_at_them() -> None:
    strategy = DistributedStrategy(amp=True, amp_configs={"use_pure_fp16": True, "use_fp16_guard": True})
    with pytest.raises(ProfileError, match="regions under fp16_guard are not supported; set it to False"):
        strategy.to_profile()


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


def test_the_old_recipes_local_sgd_script_becomes_a_profile() -> None:
    strategy = DistributedStrategy(use_local_sgd=True, local_sgd_is_warm_steps=3, local_sgd_steps=4)
    strategy.collective_mode = "local_sgd"
    assert settings_of(strategy) == {"use_local_sgd": True, "local_sgd_is_warm_steps": 3, "local_sgd_steps": 4}
    assert said(strategy) == ["DistributedStrategy.collective_mode: 'local_sgd' is mapped: read as use_local_sgd: true"]
    assert (strategy.localsgd, dict(strategy.localsgd_configs)) == (True, {"begin_step": 3, "k_steps": 4})


PURE, MERGED = {"use_pure_bf16": True}, {"k_steps": 4, "avg": True}
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"amp_configs": PURE}, "amp_configs.use_pure_bf16: has no effect while amp is false; set amp to True, or remove"),
    (
        {"gradient_merge_configs": {"k_steps": 4}},
        "gradient_merge_configs.k_steps: has no effect while gradient_merge is false; set gradient_merge to True",
    ),
    (
        {"fp16_allreduce": True, "compression": "bf16"},
        "fp16_allreduce: asks for compression: 'fp16', but compression asks for 'bf16'; keep one of the two",
    ),
    (
        {"amp": True, "gradient_merge": True, "gradient_merge_configs": MERGED},
        "gradient_merge_configs.k_steps (read as accumulate_steps): 4 does not go with",
    ),
    (
        {"localsgd_configs": {"k_steps": 2}},
        "localsgd_configs.k_steps (read as local_sgd_steps): has no effect while",
    ),
]


@pytest.mark.parametrize(("given", "message"), CONTRADICTIONS)
def test_contradictions_are_reported_when_the_strategy_is_used(given: dict[str, Any], message: str) -> None:
    strategy = DistributedStrategy(**given)
    with pytest.raises(ProfileError) as caught:
        strategy.to_profile()
    assert str(caught.value).startswith(f"DistributedStrategy.{message}")


def test_the_sum_over_ranks_is_asked_for_by_both_of_fleets_names() -> None:
    strategies = [DistributedStrategy() for _ in range(3)]
    strategies[0].build_strategy.gradient_scale_strategy = 1
    strategies[1].gradient_scale_configs = {"scale_strategy": "sum"}
    strategies[2].gradient_scale_configs = {"scale_strategy": "avg"}
    assert [settings_of(each).get("average_over") for each in strategies] == ["nothing", "nothing", None]


def test_a_switch_and_a_configuration_over_a_profile_that_has_them_on() -> None:
    on = Profile(name="mine", accumulate_steps=2, amp_level="O1")
    strategy = DistributedStrategy.from_profile(on)
    assert (strategy.gradient_merge, strategy.amp) == (True, True)
    strategy.gradient_merge = strategy.amp = True
    assert strategy.to_profile() == on
    strategy.gradient_merge_configs = {"k_steps": 8}
    strategy.amp_configs = {"level": "O2"}
    profile = strategy.to_profile()
    assert (profile.accumulate_steps, profile.amp_level, profile.amp_dtype) == (8, "O2", "bfloat16")
    configured = DistributedStrategy.from_profile(Profile(accumulate_steps=2))
    configured.gradient_merge_configs = {"k_steps": 8}
    assert configured.to_profile().accumulate_steps == 8


def test_adaptive_local_sgd_can_be_read_whatever_set_it() -> None:
    given = [DistributedStrategy(), *map(DistributedStrategy.from_profile, ("local_sgd", "local_sgd_adaptive"))]
    assert [strategy.adaptive_localsgd for strategy in given] == [False, False, True]
    assert said(DistributedStrategy(adaptive_localsgd=True))[0].endswith(
        "read as use_local_sgd: true and local_sgd_schedule: 'adaptive'; periods grow up to local_sgd_max_steps, "
        "Fleet's up to 16"
    )


def test_a_switch_that_is_off_asks_for_nothing() -> None:
    for name in ("amp", "lars", "lamb", "sharding", "pipeline"):
        strategy = DistributedStrategy(**{name: False})
        assert getattr(strategy, name) is False
        assert said(strategy) == []
    both = DistributedStrategy(localsgd=True, adaptive_localsgd=True)
    both.adaptive_localsgd = False
    assert settings_of(both) == {"use_local_sgd": True}
    recomputing = DistributedStrategy(recompute=True)
    assert any("without any, nothing is recomputed" in sentence for sentence in said(recomputing))
    recomputing.recompute = False
    assert recomputing.to_profile() == Profile(name="strategy")


def test_execution_strategies_of_other_classes_and_of_fleet_2_x_give_what_they_change() -> None:
    given = SimpleNamespace(num_threads=2, use_experimental_executor=True)
    strategy = DistributedStrategy()
    strategy.exec_strategy = given
    assert strategy.num_threads == 2
    assert said(strategy)[0] == (
        "DistributedStrategy.exec_strategy.use_experimental_executor: true is mapped: the current executor is the only "
        "one"
    )
    strategy = DistributedStrategy()
    strategy.execution_strategy = DistributedStrategy().exec_strategy
    assert strategy.is_empty()
    threads = DistributedStrategy().exec_strategy
    threads.num_threads = 3
    strategy.execution_strategy = threads
    strategy.execution_strategy.num_iteration_per_drop_scope = 30
    assert (strategy.exec_strategy.num_threads, strategy.execution_strategy.num_threads) == (3, 3)
    assert strategy.to_profile().num_iteration_per_drop_scope == 30


def test_an_unknown_attribute_is_an_attribute_error_too() -> None:
    strategy = DistributedStrategy()
    assert not hasattr(strategy, "nonsense")
    with pytest.raises(ProfileError, match="did you mean 'nccl_comm_num'"):
        _ = strategy.nccl_comm_nums


def test_defaults_can_be_read_under_every_name_and_a_strategy_copied_and_printed() -> None:
    strategy = DistributedStrategy()
    assert (strategy.nccl_comm_num, strategy.amp, strategy.localsgd) == ("auto", False, False)
    assert dict(strategy.localsgd_configs) == {"begin_step": 100, "k_steps": 2}
    with pytest.raises(TypeError):  # a copy whose change nobody would see is how the stock strategy does it
        strategy.localsgd_configs["k_steps"] = 4
    strategy.nccl_comm_num = 2
    reference = copy.deepcopy(strategy)
    reference.nccl_comm_num = 3
    assert repr(strategy) == "DistributedStrategy(name='strategy', nccl_comm_num=2)"


def test_a_fresh_strategy_is_the_default_profile_and_empty_until_even_a_default_is_set() -> None:
    for fresh in (DistributedStrategy(), copy.deepcopy(DistributedStrategy())):
        assert fresh.is_empty()
        assert fresh.to_profile() == Profile(name="strategy")
        assert fresh.to_profile().explicit == frozenset()
    for given in ({"amp": False}, {"fuse_all_reduce_ops": True}, {"name": "mine"}):
        assert not DistributedStrategy(**given).is_empty()
    assert not DistributedStrategy.from_profile("single_node").is_empty()


@pytest.mark.parametrize(
    "path",
    "build_strategy.fuse_elewise_add_act_ops build_strategy.fuse_bn_act_ops build_strategy.enable_addto "
    "build_strategy.enable_auto_fusion build_strategy.fuse_relu_depthwise_conv build_strategy.fuse_all_optimizer_ops "
    "build_strategy.fuse_broadcast_ops build_strategy.enable_inplace build_strategy.memory_optimize "
    "build_strategy.cache_runtime_context build_strategy.remove_unnecessary_lock "
    "build_strategy.enable_sequential_execution exec_strategy.allow_op_delay exec_strategy.use_thread_barrier".split(),
)
def test_a_field_of_the_old_executor_is_mapped_in_one_sentence(path: str) -> None:
    strategy = DistributedStrategy()
    part, name = path.split(".")
    setattr(getattr(strategy, part), name, True)
    (sentence,) = said(strategy)
    assert sentence.startswith(f"DistributedStrategy.{path}: true is mapped: ")
    assert strategy.to_profile() == Profile(name="strategy")
