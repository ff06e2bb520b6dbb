"""A plan carried out in numpy, for all ranks in one process: what each strategy means, without Paddle and processes."""

from fleet_train.plan.simulate.job import Local, SimulatedJob, Step
from fleet_train.plan.simulate.optimizers import Adam, Momentum, NumpyOptimizer, Sgd

__all__ = ["Adam", "Local", "Momentum", "NumpyOptimizer", "Sgd", "SimulatedJob", "Step"]
