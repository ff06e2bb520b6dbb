"""Run as ranks by test_few_bits: a small network trained with the compression that the argument names."""

from __future__ import annotations

import sys

import paddle

from fleet_train import fleet, role_maker
from fleet_train.profile import Profile
from tests.parallel.small_training import RANK, state, train
from tests.support.worker import digest, report

paddle.seed(7)  # runs start alike
paddle.enable_static()
fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
train(Profile(compression=sys.argv[1], quantised_rounding="stochastic", compression_declines=False))
report(RANK, state=digest(state()))
