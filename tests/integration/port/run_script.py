"""Run a ported script as ``python SCRIPT ARGS`` would, then report this rank's parameters."""

import runpy
import sys

import paddle

from fleet_train import fleet
from tests.support.worker import digest, report

script, *sys.argv[1:] = sys.argv[1:]
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
state = fleet.main_program.state_dict("param", paddle.static.global_scope())
report(fleet.worker_index(), digest=digest(state), parameters=len(state))
