"""Run as three ranks: rank 2 changes one parameter outside of training.

argv: how often the ranks compare, and the run (from 0) before which it does that.
"""

from __future__ import annotations

import sys

import numpy as np
import paddle

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.parallel.small_training import RANK, train
from tests.support.worker import report


def disturb(step: int) -> None:
    if RANK == 2 and step == int(sys.argv[2]):
        variable = paddle.static.global_scope().find_var("fc_1.w_0").get_tensor()
        variable.set(np.array(variable) * np.float32(1.0001), fleet.place())


paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
train(Profile(divergence_check_steps=int(sys.argv[1])), before_step=disturb)
fleet.save_persistables(None, "saved")
report(RANK, trained=True)
