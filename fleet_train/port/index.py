"""All tables under the full names of what they are about, and the spellings that lead to the same thing."""

from __future__ import annotations

import re

from fleet_train.port.rules import Rule, To, Todo
from fleet_train.port.table_layers import ATTRIBUTES, CLIPS, INITIALIZERS, LAYERS, NETS, OPTIMIZERS, REGULARIZERS
from fleet_train.port.table_programs import DATASETS, FACADE, PROGRAMS, ROLE_MAKERS, SAVING, STATIC

FLUID = "paddle.fluid."
FLEET = "paddle.distributed.fleet."

_RULES: dict[str, Rule] = {
    **{f"{FLUID}{name}": rule for name, rule in PROGRAMS.items()},
    **{f"{FLUID}{name}": rule for name, rule in ATTRIBUTES.items()},
    **{f"{FLUID}layers.{name}": rule for name, rule in LAYERS.items()},
    **{f"{FLUID}nets.{name}": rule for name, rule in NETS.items()},
    **{f"{FLUID}optimizer.{name}": rule for name, rule in OPTIMIZERS.items()},
    **{f"{FLUID}clip.{name}": rule for name, rule in CLIPS.items()},
    **{f"{FLUID}regularizer.{name}": rule for name, rule in REGULARIZERS.items()},
    **{f"{FLUID}initializer.{name}": rule for name, rule in INITIALIZERS.items()},
    **{f"{FLEET}{name}": rule for name, rule in FACADE.items()},
    **{f"{FLEET}base.role_maker.{name}": rule for name, rule in ROLE_MAKERS.items()},
    FLEET.rstrip("."): To("fleet"),
    f"{FLEET}base.role_maker": To("role_maker"),
    "paddle.fluid.incubate.fleet.parameter_server": Todo("collective training: parameter servers are not supported"),
    **{f"paddle.distributed.{name}": To(f"compat.{name}") for name in DATASETS[:2]},
    "fleetx": Todo(
        "the network from paddle.vision.models or paddle.nn and data from paddle.io.DataLoader, or "
        "`fleet_train train --model ResNet50`"
    ),
    **STATIC,
}
CARRIED_OUT = [f"paddle.incubate.optimizer.{name}Optimizer" for name in ("GradientMerge", "Recompute")]
_IN_FLEET_SCRIPTS: dict[str, Rule] = {
    **{f"{FLUID}{name}": rule for name, rule in SAVING.items()},
    "paddle.static.ExecutionStrategy": SAVING["ExecutionStrategy"],
    "paddle.static.BuildStrategy": SAVING["BuildStrategy"],
    # Around the optimizer itself, distributed_optimizer carries them out.
    **{name: To(name) for name in CARRIED_OUT},
}

IN_STATIC_MODE = ("paddle.nn.ClipGradByValue",)
"""Names that only static programs cannot use."""

_LAYER_MODULES = "nn|ops|tensor|loss|control_flow|io|metric_op|learning_rate_scheduler|rnn|detection|sequence_lod"
# Modules in which 1.x defined what the table has under the public name.
_HOMES = (
    (r"paddle\.incubate\.distributed\.fleet(?=\.(?!recompute_)|$)", "paddle.fluid.incubate.fleet"),
    (r"paddle\.fluid\.incubate\.fleet\.collective\.fleet(?=\.|$)", "paddle.distributed.fleet"),
    (r"paddle\.fluid\.incubate\.fleet\.collective\.(?=DistributedStrategy|CollectiveOptimizer)", FLEET),
    (r"paddle\.fluid\.incubate\.fleet\.(base\.)?role_maker(?=\.|$)", f"{FLEET}base.role_maker"),
    (r"paddle\.fluid\.incubate\.fleet\.base\.fleet_base\.", FLEET),
    (r"paddle\.distributed\.fleet\.base\.(distributed_strategy|fleet_base)\.", FLEET),
    (r"paddle\.fleet(?=\.|$)", "paddle.distributed.fleet"),
    (rf"paddle\.fluid\.layers\.({_LAYER_MODULES})\.", f"{FLUID}layers."),
    (r"paddle\.fluid\.(executor|framework|compiler|param_attr|data_feeder|backward|dataset)\.", FLUID),
    (r"paddle\.distributed\.fleet\.metrics\.metric(?=\.|$)", f"{FLEET}metrics"),
    (r"paddle\.fluid\.core\.(?=(CPU|CUDA|CUDAPinned)Place)", FLUID),
    (r"paddle\.static\.nn\.(common|sequence_lod|control_flow|metric)\.", "paddle.static.nn."),
    (r"(paddle\.fluid\.optimizer\.\w+?)Optimizer(?=\.|$)", r"\1"),
    (r"(paddle\.fluid\.initializer\.\w+?)Initializer(?=\.|$)", r"\1"),
    (r"(paddle\.fluid\.regularizer\.\w+?)Regularizer(?=\.|$)", r"\1"),
)
_OLD = re.compile(
    r"(paddle\.fluid|paddle\.distributed\.fleet|paddle\.fleet|fleetx|"
    r"paddle\.incubate\.distributed\.fleet(?=\.(?!recompute_)))(\.|$)"
)
_FLEET_MODULE = re.compile(
    r"paddle\.((fluid\.incubate|incubate\.distributed)\.fleet\.(collective|base|role_maker)|distributed\.fleet|fleet)"
    r"(\.|$)"
)


def canonical(name: str) -> str:
    """The name under which the table has what ``name`` spells."""
    for pattern, replacement in _HOMES:
        name = re.sub(rf"^{pattern}", replacement, name)
    return name


def is_old(name: str) -> bool:
    """Whether a full name lies in a package that does not exist any more, or is fleet's."""
    return bool(_OLD.match(name))


def is_fleet(name: str) -> bool:
    """Whether a full name is of Fleet itself, of 1.x or 2.x."""
    return bool(_FLEET_MODULE.match(name))


def rule_of(name: str, in_fleet_script: bool) -> Rule | None:
    """What becomes of a full name in any of its spellings."""
    key = canonical(name)
    if in_fleet_script and key in _IN_FLEET_SCRIPTS:
        return _IN_FLEET_SCRIPTS[key]
    return _RULES.get(key) or _rule_of_package(key)


def _rule_of_package(key: str) -> Rule | None:
    """What is said of everything below a name: paddle.fluid.dygraph."""
    while "." in key:
        key = key.rpartition(".")[0]
        rule = _RULES.get(key)
        if isinstance(rule, Todo) and key in _PACKAGES:
            return rule
    return None


def is_module(name: str) -> bool:
    """Whether the table has names below this one, or 1.x had a module of this name for names of the table."""
    key = canonical(name) + "."
    return key in _PREFIXES or bool(_HOME.match(key))


def rows() -> dict[str, Rule]:
    """The whole table; rows that hold in fleet scripts only have `` (in fleet scripts)`` behind their name."""
    return _RULES | {f"{name} (in fleet scripts)": rule for name, rule in _IN_FLEET_SCRIPTS.items()}


_PREFIXES = {".".join(name.split(".")[:count]) + "." for name in _RULES for count in range(1, name.count(".") + 1)}
_HOME = re.compile(
    r"paddle\.fluid\.((incubate|incubate\.fleet|incubate\.fleet\.collective|incubate\.fleet\.base|executor|framework|"
    rf"compiler|param_attr|data_feeder|backward|dataset|core|layers\.({_LAYER_MODULES}))\.)$"
)
_PACKAGES = {
    "fleetx",
    *(f"{FLUID}{name}" for name in ("contrib", "dygraph", "metrics", "profiler", "transpiler")),
    f"{FLUID}incubate.fleet.parameter_server",
    f"{FLUID}incubate.fleet.utils.fleet_util",
    f"{FLEET}meta_optimizers",
    f"{FLEET}meta_optimizers.sharding.utils",
    "paddle.distributed.transpiler",
}
