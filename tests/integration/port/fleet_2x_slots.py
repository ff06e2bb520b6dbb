"""Click-through rates as recommenders of Paddle 2.x are trained: slot files, a generator of lines, train_from_dataset."""
import os
import sys

import numpy as np
import paddle
import paddle.distributed.fleet as fleet

BATCH, LINES = 16, 320


class Lines(fleet.MultiSlotDataGenerator):
    """Turns the lines of a file into slots."""

    def generate_sample(self, line):
        def slots():
            label, dense, ids = line.split(';')
            yield [
                ('label', [int(label)]),
                ('dense', [float(value) for value in dense.split()]),
                ('ids', [int(value) for value in ids.split()]),
            ]

        return slots


def write_files():
    random = np.random.RandomState(fleet.worker_index())
    names = ['part-%d.txt' % part for part in range(fleet.worker_num())]
    with open(names[fleet.worker_index()], 'w') as out:
        for _ in range(LINES):
            dense, ids = random.uniform(-1, 1, 3), random.randint(0, 20, 2)
            out.write('%d;%s;%s\n' % (dense.sum() > 0, ' '.join('%.4f' % one for one in dense), ' '.join(map(str, ids))))
    return names


def train():
    paddle.enable_static()
    fleet.init(is_collective=True)
    label = paddle.static.data(name='label', shape=[None, 1], dtype='int64')
    dense = paddle.static.data(name='dense', shape=[None, 3], dtype='float32')
    ids = paddle.static.data(name='ids', shape=[None, 2], dtype='int64')
    rows = paddle.static.nn.embedding(ids, size=[20, 4])
    both = paddle.concat([dense, paddle.reshape(rows, [-1, 8])], axis=1)
    logits = paddle.static.nn.fc(paddle.static.nn.fc(both, 16, activation='relu'), 2)
    loss = paddle.nn.functional.cross_entropy(input=logits, label=label)

    strategy = fleet.DistributedStrategy()
    strategy.execution_strategy = paddle.static.ExecutionStrategy()
    optimizer = fleet.distributed_optimizer(paddle.optimizer.Adam(learning_rate=0.02), strategy)
    optimizer.minimize(loss)

    place = paddle.CUDAPlace(int(os.environ.get('FLAGS_selected_gpus', 0)))
    exe = paddle.static.Executor(place)
    exe.run(paddle.static.default_startup_program())
    fleet.init_worker()

    dataset = paddle.distributed.QueueDataset()
    dataset.init(
        batch_size=BATCH,
        thread_num=2,
        use_var=[label, dense, ids],
        pipe_command='%s %s --lines' % (sys.executable, os.path.abspath(__file__)))
    files = write_files()
    fleet.barrier_worker()
    dataset.set_filelist(fleet.util.get_file_shard(files))
    for epoch in range(2):
        exe.train_from_dataset(
            paddle.static.default_main_program(),
            dataset,
            fetch_list=[loss],
            fetch_info=['epoch %d loss' % epoch],
            print_period=5)
    fleet.save_persistables(exe, 'slots_out')
    fleet.stop_worker()


if '--lines' in sys.argv:
    Lines().run_from_stdin()
else:
    train()
