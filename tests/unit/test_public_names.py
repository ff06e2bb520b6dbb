"""The names that users import and call: fixed here, or with an error that says what to use; none needs Paddle early."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from paddle.distributed import fleet as theirs

import fleet_train
from fleet_train.convert import fleet
from fleet_train.convert.calls import ABSENT, UtilBase
from fleet_train.errors import GUIDE, ConversionError
from tests.support.processes import ROOT, output_of, python

# Statements as users write them: literal, so that moving a module cannot move its name out of the test.
PINNED_FILE = Path(__file__).with_name("public_imports.txt")
PINNED = [line for line in PINNED_FILE.read_text().splitlines() if line and not line.startswith("#")]
OTHER_NAMES = {"fleet_train.convert.fleet": "fleet_train.fleet"}
NEED_A_JOB = {"fleet_train.fleet.main_program", "fleet_train.fleet.startup_program"}


def modules_loaded_by(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter after ``code``."""
    names = json.loads(output_of(python("-c", f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))")))
    return {name.partition(".")[0] for name in names}


def test_a_script_imports_three_names_and_starts_ranks_by_a_fourth() -> None:
    assert sorted(fleet_train.__all__) == ["DistributedStrategy", "fleet", "role_maker", "spawn"]
    with pytest.raises(AttributeError, match="DistributedStrategy, fleet, role_maker, spawn"):
        _ = fleet_train.flete


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import fleet_train", {"paddle", "numpy", "visualdl", "pydantic"}),
        ("from fleet_train import spawn", {"paddle", "numpy", "visualdl", "cloudpickle"}),
        ("from fleet_train import DistributedStrategy; DistributedStrategy().to_profile()", {"paddle"}),
    ],
)
def test_importing_loads_nothing_heavy(statement: str, unwanted: set[str]) -> None:
    assert not modules_loaded_by(statement) & unwanted


EXECUTE = """
import json, sys
failures = {}
for line in json.loads(sys.argv[1]):
    try:
        exec(line, {})
    except Exception as error:
        failures[line] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


@pytest.mark.parametrize("of_ray", [False, pytest.param(True, marks=pytest.mark.ray)])
def test_what_users_import_keeps_importing(of_ray: bool) -> None:
    """In a process of its own: some import Paddle, one imports Ray."""
    lines = [line for line in PINNED if line.startswith("from fleet_train.ray") == of_ray]
    assert json.loads(output_of(python("-c", EXECUTE, json.dumps(lines))).splitlines()[-1]) == {}


def imported(statements: str) -> set[str]:
    """Dotted names that these statements import: ``fleet_train.train.Trainer``; modules by their own names."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(statements)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def offered() -> Iterator[tuple[str, str]]:
    """Each module that has ``__all__`` with each name in it, read from the source."""
    for path in sorted((ROOT / "fleet_train").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
                yield from ((OTHER_NAMES.get(module, module), name) for name in ast.literal_eval(node.value))


def test_every_name_in_an_all_is_pinned() -> None:
    names = {f"{module}.{name}" for module, name in offered()}
    assert len(names) > 150
    missing = sorted(names - imported("\n".join(PINNED)) - NEED_A_JOB)
    assert not missing, f"public names that {PINNED_FILE.name} does not hold; users will rely on them: {missing}"


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


def test_every_name_of_paddles_fleet_has_one_fate() -> None:
    names = names_of_paddles_fleet() | {*OLD_MODULE, *OLD_FLEET}
    assert len(names) > 100
    assert sorted(name for name in names if not has(name) and name not in ABSENT) == []
    assert [name for name in ABSENT if hasattr(fleet, name)] == []


def test_an_absent_name_says_why_or_what_to_use_and_a_mistyped_one_the_nearest() -> None:
    for name in ABSENT:
        with pytest.raises(AttributeError) as caught:
            getattr(fleet, name)
        assert isinstance(caught.value, ConversionError)
        assert str(caught.value).startswith(f"fleet.{name} ")
    with pytest.raises(AttributeError, match="no attribute 'worker_nums'; did you mean 'worker_num'"):
        _ = fleet.worker_nums


def test_names_of_other_frameworks_lead_to_the_page_about_them() -> None:
    names = """init_process_group get_world_size DistributedSampler DistributedDataParallel convert_sync_batchnorm spawn
        ReduceOp scale_loss convert_syncbn_model size broadcast_parameters DistributedOptimizer Compression allreduce"""
    for name in names.split():
        assert ABSENT[name].endswith(f" ({GUIDE})"), name
    assert ABSENT["inference_model"] == "is fleet.save_inference_model"
    assert not any(GUIDE in ABSENT[name] for name in OLD_FLEET if name in ABSENT)


def test_helpers_of_util_have_paddles_arguments() -> None:
    for name in [name for name in dir(theirs.UtilBase) if not name.startswith("_")]:
        if name not in ABSENT:
            given, ours = (inspect.signature(getattr(kind, name)) for kind in (theirs.UtilBase, UtilBase))
            assert list(ours.parameters) == list(given.parameters), name


@pytest.mark.parametrize(
    "name", ["save_persistables", "save_inference_model", "init_worker", "worker_endpoints", "init"]
)
def test_calls_take_paddles_arguments_in_paddles_order(name: str) -> None:
    given = list(inspect.signature(getattr(theirs.Fleet, name)).parameters)[1:]
    ours = inspect.signature(getattr(fleet, name))
    positional = [p.name for p in ours.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    renamed = {"executor": "exe", "feeded_var_names": "feeds", "target_vars": "targets"}
    order = [renamed.get(one, one) for one in given if one != "mode"]
    assert [one for one in positional if one in order] == order
    assert set(given) <= set(ours.parameters)


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
def test_arguments_that_contradict_are_type_errors_with_both_names(call: Callable[[], None], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert message in str(caught.value)
    assert isinstance(caught.value, ConversionError)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fleet.init(True), r"its order is init\(role_maker, is_collective, strategy\)"),
        (lambda: fleet.init("multi_node"), r"its order is init\(role_maker, is_collective, strategy\)"),
        (lambda: fleet.init(is_collective=False), r"parameter servers; .* write fleet.init\(is_collective=True\)"),
        (lambda: fleet.save_inference_model(1, "out", ["x"], ["fc_0"]), "have no names; pass the values themselves"),
        (lambda: fleet.save_persistables(1, dirnam="out"), "dirnam"),
    ],
)
def test_values_that_mean_something_else_are_refused_with_what_to_write(call: Callable[[], None], message: str) -> None:
    with pytest.raises(Exception, match=message):
        call()


def test_an_import_of_all_names_leaves_pythons_own() -> None:
    import builtins

    from fleet_train.convert import fleet

    assert not set(fleet.__all__) & set(vars(builtins))
    assert callable(fleet.any)
    assert callable(fleet.all)
