"""fleet_train: static-graph Paddle programs on many machines after four changed lines.

``from fleet_train import fleet, role_maker, DistributedStrategy`` is the whole public surface of a training script;
``fleet_train.spawn`` starts ranks on this machine without the launcher.
The names are loaded on first use, so that the command line starts without importing Paddle. Below the stock launcher's
legacy mode, the import corrects the variables that say which rank this is.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fleet_train.cluster.correction import correct_this_process

if TYPE_CHECKING:
    from fleet_train.convert import fleet, role_maker
    from fleet_train.convert.strategy import DistributedStrategy
    from fleet_train.spawning.spawn import spawn

__version__ = "0.1.0"
__all__ = ["DistributedStrategy", "fleet", "role_maker", "spawn"]

_HOMES = {
    "fleet": ("fleet_train.convert.fleet", None),
    "role_maker": ("fleet_train.convert.role_maker", None),
    "DistributedStrategy": ("fleet_train.convert.strategy", "DistributedStrategy"),
    "spawn": ("fleet_train.spawning.spawn", "spawn"),
}


correct_this_process()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fleet_train' has no attribute {name!r}; it has {', '.join(__all__)}")
    from fleet_train.cluster.advice import advise_this_process

    advise_this_process()  # before these modules import Paddle; the launcher imports none of them
    module_name, attribute = _HOMES[name]
    module = import_module(module_name)
    value = getattr(module, attribute) if attribute else module
    globals()[name] = value
    return value
