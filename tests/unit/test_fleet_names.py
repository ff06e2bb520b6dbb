"""Every name of Fleet is in the facade, or has an error that says what to use."""

from __future__ import annotations

import inspect

import pytest

from fleet_train.convert import fleet
from fleet_train.convert.calls import ABSENT, UtilBase
from fleet_train.errors import ConversionError

# `paddle.fluid.incubate.fleet.collective` of Paddle 1.6 to 1.8, which is not installed any more: its module, its fleet.
OLD_MODULE = (
    "CollectiveOpBasedOptimizer CollectiveOptimizer Collective DistFCConfig DistributedStrategy LambConfig".split()
)
OLD_FLEET = """
    TrainStatus all_reduce_worker barrier_worker clean_redundant_check_points clean_redundant_checkpoints
    distributed_optimizer init init_server init_worker is_first_worker is_server is_worker is_xpu load_check_point
    load_checkpoint main_program run_server run_worker save_check_point save_checkpoint save_inference_model
    save_persistables server_endpoints server_index server_num split_files startup_program stop stop_worker
    worker_endpoints worker_index worker_num _origin_program _transpiled_program
""".split()
NEEDS_A_JOB = {"main_program", "startup_program", "_origin_program", "_transpiled_program"}


def names_of_paddles_fleet() -> set[str]:
    from paddle.distributed import fleet as theirs

    private = {"_final_strategy", "_get_applied_meta_list", "_get_applied_graph_list"}
    module = {name for name in dir(theirs) if not name.startswith("_")} | set(theirs.__all__)
    methods = {name for name in dir(theirs.Fleet) if not name.startswith("_")}
    return module | methods | private


def has(name: str) -> bool:
    if name in NEEDS_A_JOB:
        with pytest.raises(ConversionError, match=r"fleet\.init"):
            getattr(fleet, name)
        return True
    return hasattr(fleet, name)


def test_every_name_of_paddles_fleet_has_a_fate() -> None:
    names = names_of_paddles_fleet() | {*OLD_MODULE, *OLD_FLEET}
    assert len(names) > 100
    assert sorted(name for name in names if not has(name) and name not in ABSENT) == []


def test_a_name_has_one_fate() -> None:
    assert [name for name in ABSENT if hasattr(fleet, name)] == []


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_an_absent_name_says_why_or_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(fleet, name)
    assert isinstance(caught.value, ConversionError)
    assert str(caught.value).startswith(f"fleet.{name} ")
    assert len(ABSENT[name]) > 15


def test_names_that_paddle_does_not_have_have_no_fate() -> None:
    private = {name for name in ABSENT if name.startswith("_")}
    older = {"get_worker_endpoints", "get_current_id", "current_id", "current_endpoint", "get_loss_scaling", "stop"}
    older |= {"shrink_sparse_table", "shrink_dense_table", "get_heter_file_shard", "amp_init"}
    assert set(ABSENT) - private - names_of_paddles_fleet() - {*OLD_MODULE, *OLD_FLEET} <= older


def test_helpers_of_util_have_paddles_arguments() -> None:
    from paddle.distributed.fleet import UtilBase as Theirs

    for name in [name for name in dir(Theirs) if not name.startswith("_")]:
        if name not in ABSENT:
            theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (Theirs, UtilBase))
            assert list(ours.parameters) == list(theirs.parameters), name


@pytest.mark.parametrize(
    "name", ["save_persistables", "save_inference_model", "init_worker", "worker_endpoints", "init"]
)
def test_calls_take_paddles_arguments_in_paddles_order(name: str) -> None:
    from paddle.distributed.fleet import Fleet

    theirs = list(inspect.signature(getattr(Fleet, name)).parameters)[1:]
    ours = inspect.signature(getattr(fleet, name))
    positional = [p.name for p in ours.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    renamed = {"executor": "exe", "feeded_var_names": "feeds", "target_vars": "targets"}
    order = [renamed.get(one, one) for one in theirs if one != "mode"]
    assert [one for one in positional if one in order] == order
    assert set(theirs) <= set(ours.parameters)


def test_a_mistyped_name_is_an_attribute_error_with_the_nearest_one() -> None:
    assert not hasattr(fleet, "worker_nums")
    with pytest.raises(AttributeError, match="no attribute 'worker_nums'; did you mean 'worker_num'"):
        _ = fleet.worker_nums


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fleet.save_persistables(1, "out", executor=1), "was given executor= and exe=, which name one"),
        (lambda: fleet.save_persistables(1), "fleet.save_persistables needs dirname="),
        (lambda: fleet.save_persistables(1, "out", filename="all"), "filename='all': the files' names are fixed"),
        (lambda: fleet.save_persistables(1, "out", mode=1), "mode=1: modes are for parameter servers"),
        (lambda: fleet.load_persistables(1, "out", filename="all"), "filename='all': the files' names are fixed"),
        (lambda: fleet.save_inference_model(1, "out", ["x"]), "needs targets= or target_vars="),
        (
            lambda: fleet.save_inference_model(1, "out", ["x"], [1], feeded_var_names=["x"]),
            "feeded_var_names= and feeds=",
        ),
        (lambda: fleet.save_inference_model(1, "out", ["x"], [1], None, False), "use fleet.save_persistables"),
        (lambda: fleet.all_reduce([1], "sum", mode="max"), "was given mode= and op="),
        (lambda: fleet.init(1, role=2), "was given role= and role_maker="),
    ],
)
def test_arguments_that_contradict_are_type_errors_with_both_names(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(TypeError) as caught:
        call()
    assert message in str(caught.value)
    assert isinstance(caught.value, ConversionError)


def test_an_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="dirnam"):
        fleet.save_persistables(1, dirnam="out")  # type: ignore[call-arg]


@pytest.mark.parametrize("given", [True, "multi_node"])
def test_init_with_something_else_as_role_maker_says_the_order(given: object) -> None:
    with pytest.raises(Exception, match=r"its order is init\(role_maker, is_collective, strategy\)"):
        fleet.init(given)


def test_init_without_collective_training_is_refused() -> None:
    with pytest.raises(Exception, match=r"asks for parameter servers; .* write fleet.init\(is_collective=True\)"):
        fleet.init(is_collective=False)


def test_exporting_targets_by_name_is_refused() -> None:
    with pytest.raises(ConversionError, match="have no names; pass the values themselves"):
        fleet.save_inference_model(1, "out", ["x"], ["fc_0.tmp_0"])
