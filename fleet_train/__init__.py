"""fleet_train: static-graph Paddle programs on many machines after five changed lines.

``from fleet_train import fleet, role_maker, DistributedStrategy`` is the whole public surface of a training script;
``fleet_train.spawn`` calls a function in ranks on this machine.
The names are loaded on first use, so that the command line starts without importing Paddle. Under the stock launcher's
legacy mode, the import corrects the variables that give this process's rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleet_train.cluster.at_import import correct_this_process
from fleet_train.lazy import load_on_use

if TYPE_CHECKING:
    from fleet_train.convert import fleet, role_maker
    from fleet_train.convert.strategy import DistributedStrategy
    from fleet_train.spawning.spawn import spawn

__version__ = "0.1.0"
__all__ = ["DistributedStrategy", "fleet", "role_maker", "spawn"]


def _advise() -> None:
    from fleet_train.cluster.at_import import advise_this_process

    advise_this_process()  # before these modules import Paddle; the launcher imports none of them


correct_this_process()

__getattr__ = load_on_use(
    __name__,
    {
        "fleet": "=fleet_train.convert.fleet",
        "role_maker": "=fleet_train.convert.role_maker",
        "DistributedStrategy": "convert.strategy",
        "spawn": "spawning.spawn",
    },
    beforehand=_advise,
)
