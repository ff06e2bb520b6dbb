"""Trains one of PaddleRec's models as its tools/static_trainer.py does, with its calls in its order.

Arguments: the model's folder, and a file of JSON with the configuration, the data's files (one per rank) and the steps.
One process alone reads the batches of all files, and trains with the joint batch. Adam's epsilon is the models' own unless
one is given.
"""
import os
os.environ['FLAGS_enable_pir_api'] = '0'
import importlib
import json
import sys
from functools import partial

import numpy as np
import paddle
from paddle.io import DataLoader

from tests.support.worker import digest, report

folder, asked = sys.argv[1:]
with open(asked) as source:
    job = json.load(source)
config = job['config']
use_fleet = config['runner.use_fleet']
sys.path.append(folder)
reader = importlib.import_module(job['reader'])
StaticModel = importlib.import_module('static_model').StaticModel

if job['epsilon']:
    paddle.optimizer.Adam = partial(paddle.optimizer.Adam, epsilon=job['epsilon'])
paddle.enable_static()
model = StaticModel(config)
input_data = model.create_feeds()
input_data_names = [data.name for data in input_data]
fetch_vars = model.net(input_data)
paddle.seed(config['runner.seed'])
place = paddle.set_device('cpu')
rank = 0
if use_fleet:
    from paddle.distributed import fleet
    strategy = fleet.DistributedStrategy()
    fleet.init(is_collective=True, strategy=strategy)
    model.create_optimizer(strategy)
    rank = paddle.distributed.get_rank()
else:
    model.create_optimizer()

main = paddle.static.default_main_program()
exe = paddle.static.Executor(place)
exe.run(paddle.static.default_startup_program())


def parameters():
    held = main.state_dict('param', paddle.static.global_scope())
    return {name: np.array(value) for name, value in held.items()}


started = parameters()
if not use_fleet:
    files = [[one] for one in job['files']]
elif job['reader_shares_files']:
    files = [job['files']]
else:
    files = [[job['files'][rank]]]
loaders = [
    DataLoader(
        reader.RecDataset(own, config=config),
        batch_size=config['runner.train_batch_size'],
        places=place,
        drop_last=True) for own in files
]
losses = []
for batches in zip(*[loader() for loader in loaders]):
    joint = [np.concatenate([np.array(part) for part in parts]) for parts in zip(*batches)]
    fetched = exe.run(
        program=main,
        feed=dict(zip(input_data_names, joint)),
        fetch_list=[var for _, var in fetch_vars.items()])
    losses.append(float(fetched[0].item()))

trained = parameters()
report(rank, losses=losses, start=digest(started), trained=digest(trained))
report(rank, operators=[operator.name() for operator in main.global_block().ops])
if rank == 0:
    report(rank, **{'start/' + name: value for name, value in started.items()})
    report(rank, **{'end/' + name: value for name, value in trained.items()})
