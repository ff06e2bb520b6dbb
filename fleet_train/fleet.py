"""Another name of the facade, for ``import fleet_train.fleet as fleet`` and ``from fleet_train.fleet import init``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fleet_train.convert import fleet

if TYPE_CHECKING:
    from fleet_train.convert.fleet import *  # noqa: F403

sys.modules[__name__] = fleet
