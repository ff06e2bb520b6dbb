"""Carries out a plan in numpy for all ranks in one process: shows what each strategy does, without Paddle."""

from fleet_train.plan.simulate.job import Local, SimulatedJob, Step
from fleet_train.plan.simulate.optimizers import Adam, Momentum, NumpyOptimizer, Sgd

__all__ = ["Adam", "Local", "Momentum", "NumpyOptimizer", "Sgd", "SimulatedJob", "Step"]
