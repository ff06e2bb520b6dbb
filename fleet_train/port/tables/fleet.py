"""Fleet's own names: those of its collective mode in Paddle 1.6 to 1.8, and of ``paddle.distributed.fleet`` in 2.x."""

from __future__ import annotations

from fleet_train.port.tables.programs import DATASETS, GENERATORS
from fleet_train.port.tables.rules import Rule, To, Todo

_SERVERS = "delete it: parameter servers are not supported; collective training has workers only"
_KEPT = (
    "CollectiveOptimizer UserDefinedRoleMaker all_reduce_worker barrier_worker init init_worker is_first_worker "
    "is_server is_worker local_rank main_program node_num nranks rank server_endpoints server_num split_files "
    "startup_program stop_worker util worker_endpoints worker_index worker_num"
)

# What a ``fleet`` has: the object of 1.x and the module of 2.x.
FACADE: dict[str, Rule] = {
    **{name: To(f"fleet.{name}") for name in _KEPT.split()},
    "distributed_optimizer": To("fleet.distributed_optimizer", "optimizer strategy"),
    "_origin_program": To("fleet.main_program"),
    "save_persistables": To(
        "fleet.save_persistables",
        "executor>exe dirname main_program / filename-None",
        hand="fleet.save_persistables(exe, dirname): one folder, whose file names are fixed",
    ),
    "load_persistables": To("fleet.load_persistables", "executor>exe dirname main_program"),
    "save_inference_model": To(
        "fleet.save_inference_model",
        "executor>exe dirname feeded_var_names>feeds target_vars>targets / main_program-None "
        "export_for_deployment-True",
        hand="fleet.save_inference_model(exe, dirname, feeds, targets): the program is that of the targets",
    ),
    "DistributedStrategy": To("DistributedStrategy"),
    **{
        name: Todo("a static program: dynamic mode is not supported (paddle.enable_static(), docs/old-programs.md)")
        for name in ("distributed_model", "distributed_scaler")
    },
    "PaddleCloudRoleMaker": To("role_maker.PaddleCloudRoleMaker"),
    **{f"metrics.{name}": To(f"fleet.metrics.{name}") for name in "sum max min auc mae mse rmse acc".split()},
    **{name: To(f"compat.{name}") for name in DATASETS},
    **{name: To(f"compat.{name}") for name in GENERATORS},
    "save_check_point": Todo("fleet.save_persistables(exe, dirname) and a file of your own for the epoch"),
    "load_check_point": Todo("fleet.load_persistables(exe, dirname) and a file of your own for the epoch"),
    "save": Todo("fleet.save_persistables(exe, dirname) or fleet.save_inference_model(exe, dirname, feeds, targets)"),
    "meta_optimizers": Todo("the profile's knobs: python -m fleet_train profiles"),
    **{
        name: Todo(_SERVERS)
        for name in (
            "init_server",
            "run_server",
            "server_index",
            "shrink",
        )
    },
}

ROLE_MAKERS: dict[str, Rule] = {
    "PaddleCloudRoleMaker": To("role_maker.PaddleCloudRoleMaker", "is_collective"),
    "UserDefinedCollectiveRoleMaker": To("role_maker.UserDefinedCollectiveRoleMaker", "current_id worker_endpoints"),
    **{
        name: Todo("role_maker.PaddleCloudRoleMaker(is_collective=True): the launcher sets the ranks")
        for name in (
            "UserDefinedRoleMaker",
            "MPISymetricRoleMaker",
            "GeneralRoleMaker",
        )
    },
}

# Saving by hand below fleet: a collective call, which no rank may leave out.
SAVING: dict[str, Rule] = {
    "io.save_persistables": FACADE["save_persistables"],
    "io.load_persistables": To(
        "fleet.load_persistables",
        "executor>exe dirname main_program / filename-None",
        hand="fleet.load_persistables(exe, dirname): a folder that fleet.save_persistables wrote",
    ),
    "io.save_inference_model": To(
        "fleet.save_inference_model",
        "/ dirname feeded_var_names>feeds target_vars>targets executor>exe main_program-None model_filename-None "
        "params_filename-None export_for_deployment-True program_only-False",
        hand="fleet.save_inference_model(exe, dirname, feeds, targets): its file names are fixed",
    ),
    "ExecutionStrategy": To("DistributedStrategy", "", then="exec_strategy"),
    "BuildStrategy": To("DistributedStrategy", "", then="build_strategy"),
}
