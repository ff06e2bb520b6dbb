"""A rank of the benchmark of embeddings. argv: assignment, and the rank where no launcher of ours gives it.

The models are PaddleRec's DeepFM and Wide&Deep, written once for the layers of Paddle and of PyTorch.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray

from fleet_train.files import publish_where_linked
from tools.benchmarks.contestants import HOROVOD, OURS, TORCH
from tools.benchmarks.ranks import interface_bytes, wait_for_all
from tools.benchmarks.trainees import under_horovod

DEEPFM, WIDE_DEEP = MODELS = ("deepfm", "wide_deep")
SGD, ADAM = OPTIMIZERS = ("sgd", "adam")
ONE = "one"
ROWS, WIDTH, FIELDS, DENSE = 1_000_000, 16, 26, 13
LAYERS = {DEEPFM: (400, 400, 400), WIDE_DEEP: (512, 256, 128, 32)}
RATES = {SGD: 0.01, ADAM: 0.001}
# Of Adam, on all sides. With the usual 1e-8, it makes a whole step of a gradient that is rounding alone.
EPSILON = 1e-3
# How many values each categorical field of Criteo's data of 2014 has; frequencies of a field are Zipf's.
VALUES_OF_FIELDS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306, 10, 5652,
    2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
EXPONENT = 1.1
Batch = tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]


@dataclass(frozen=True)
class Assignment:
    """``side``: who trains, and how its tables are sent, such as ours:rows. ``batch``: samples of a rank in a step.

    one:ours is one process that goes through the shares of all ranks in turn and updates with the mean of their
    gradients. The joint batch in one product is rounded otherwise, which now and then turns a ReLU on or off: a
    difference of up to 3e-3 of a bias.
    """

    model: str
    optimizer: str
    side: str
    folder: str
    ranks: int
    batch: int
    steps: int
    seed: int
    timeout_seconds: float

    @property
    def kind(self) -> str:
        return self.side.partition(":")[0]

    @property
    def uses_paddle(self) -> bool:
        return OURS in self.side.split(":")

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Assignment:
        return Assignment(**json.loads(path.read_text(encoding="utf-8")))


def batch_of(seed: int, rank: int, step: int, samples: int) -> Batch:
    """Ids [samples, 26], dense features [samples, 13], clicks [samples, 1]: a rank's share of a step.

    A value of a field is drawn by Zipf's law and hashed into the rows 1 .. 999,999 of one table for all fields.
    """
    random = np.random.default_rng([seed, rank, step])
    most, power = np.array(VALUES_OF_FIELDS, np.float64), 1 - EXPONENT
    values = ((most**power - 1) * random.random((samples, FIELDS)) + 1) ** (1 / power)
    keys = values.astype(np.int64) * 2_654_435_761 + np.arange(FIELDS) * 40_503
    dense = np.log1p(random.exponential(1.0, (samples, DENSE))).astype(np.float32)
    odds = dense.mean(axis=1) - 2 + (keys[:, :4] % 7 == 0).sum(axis=1)
    clicks = random.random(samples) < 1 / (1 + np.exp(-odds))
    return keys % (ROWS - 1) + 1, dense, clicks.astype(np.float32)[:, None]


def table_widths(model: str) -> list[int]:
    return [1, WIDTH] if model == DEEPFM else [WIDTH]


def ideal_bytes(model: str, rows: float, ranks: int) -> tuple[float, float]:
    """What a rank sends in a step at least: ids (int32) and float32 values of the ``rows`` that a rank has touched, to
    every other rank; and the other parameters in an allreduce of float32."""
    of_rows = rows * (ranks - 1) * sum(4 + 4 * width for width in table_widths(model))
    others = sum(int(np.prod(shape)) for shape, _ in shapes(model) if shape[0] != ROWS)
    return of_rows, 2 * (ranks - 1) / ranks * 4 * others


def shapes(model: str) -> list[tuple[tuple[int, ...], float]]:
    """Shape and spread of the start values of every parameter, in the order of `Network.tensors`; 0 for zeros."""
    if model == DEEPFM:
        spread, size = 0.1 / WIDTH**0.5, (FIELDS + DENSE) * WIDTH
        found = [((ROWS, width), spread) for width in (1, WIDTH)] + [((DENSE,), spread), ((1, DENSE, WIDTH), spread)]
    else:
        size = FIELDS * WIDTH + DENSE
        found = [((ROWS, WIDTH), 0.05), ((DENSE, 1), DENSE**-0.5), ((1,), 0.0)]
    for one, other in pairwise((size, *LAYERS[model], 1)):
        found += [((one, other), one**-0.5), ((other,), 0.0)]
    return found


def start_values(model: str, seed: int) -> list[NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape, np.float32) * np.float32(spread) for shape, spread in shapes(model)]


def network(model: str, kit: Any) -> Any:
    """The network of a framework's layers: from ids and dense features to logits [samples, 1]."""

    class Network(kit.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            is_deepfm = model == DEEPFM
            self.tables = kit.layers([kit.embedding(width) for width in table_widths(model)])
            size = (FIELDS + DENSE) * WIDTH if is_deepfm else FIELDS * WIDTH + DENSE
            self.deep = kit.layers([kit.Linear(*pair) for pair in pairwise((size, *LAYERS[model], 1))])
            if is_deepfm:
                self.first, self.second = kit.parameter(self, [DENSE]), kit.parameter(self, [1, DENSE, WIDTH])
            else:
                self.wide = kit.Linear(DENSE, 1)

        def tensors(self) -> list[Any]:
            between = [self.first, self.second] if model == DEEPFM else [self.wide.weight, self.wide.bias]
            ends = [tensor for layer in self.deep for tensor in (layer.weight, layer.bias)]
            return [*(table.weight for table in self.tables), *between, *ends]

        def forward(self, ids: Any, dense: Any) -> Any:
            vectors = self.tables[-1](ids)
            if model == WIDE_DEEP:
                return self.wide(dense) + self.through(kit.concat([vectors.flatten(1), dense], 1))
            features = kit.concat([vectors, dense.unsqueeze(2) * self.second], 1)
            linear = self.tables[0](ids).sum(1) + (dense * self.first).sum(1).unsqueeze(1)
            pairs = features.sum(1).square() - features.square().sum(1)
            return linear + 0.5 * pairs.sum(1).unsqueeze(1) + self.through(features.flatten(1))

        def through(self, hidden: Any) -> Any:
            for layer in list(self.deep)[:-1]:
                hidden = kit.relu(layer(hidden))
            return list(self.deep)[-1](hidden)

    return Network()


class PaddleKit:
    def __init__(self) -> None:
        import paddle

        self.Layer, self.Linear, self.layers = paddle.nn.Layer, paddle.nn.Linear, paddle.nn.LayerList
        self.relu, self.concat = paddle.nn.functional.relu, paddle.concat

        # Start values are set later; drawing a million rows takes seconds.
        zeros = paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(0.0))
        self.embedding = lambda width: paddle.nn.Embedding(ROWS, width, 0, sparse=True, weight_attr=zeros)
        self.parameter = paddle.nn.Layer.create_parameter


class TorchKit:
    def __init__(self) -> None:
        import torch

        self.Layer, self.Linear, self.layers = torch.nn.Module, torch.nn.Linear, torch.nn.ModuleList
        self.relu, self.concat = torch.relu, torch.cat
        self.embedding = lambda width: torch.nn.Embedding(ROWS, width, padding_idx=0, sparse=True)
        self.parameter = lambda _, shape: torch.nn.Parameter(torch.empty(shape))


class PaddleTrainee:
    """A static program. With ``ours`` the changed lines; the profile is the launcher's --strategy."""

    def __init__(self, assignment: Assignment) -> None:
        import paddle

        paddle.enable_static()
        self.rank, self._place = 0, paddle.CPUPlace()
        rate = RATES[assignment.optimizer]
        ids = paddle.static.data("ids", [None, FIELDS], "int64")
        dense = paddle.static.data("dense", [None, DENSE], "float32")
        clicks = paddle.static.data("clicks", [None, 1], "float32")
        built = network(assignment.model, PaddleKit())
        self._loss = paddle.nn.functional.binary_cross_entropy_with_logits(built(ids, dense), clicks)
        is_sgd = assignment.optimizer == SGD
        optimizer = (
            paddle.optimizer.SGD(rate) if is_sgd else paddle.optimizer.Adam(rate, epsilon=EPSILON, lazy_mode=True)
        )
        if assignment.kind == ONE:
            self._prepare_update(assignment.model, optimizer, built)
        elif assignment.kind == OURS:
            from fleet_train import fleet, role_maker

            fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
            self.rank = fleet.worker_index()
            optimizer = fleet.distributed_optimizer(optimizer)
        if assignment.kind != ONE:
            optimizer.minimize(self._loss)
        self._main = paddle.static.default_main_program()
        self._executor, scope = paddle.static.Executor(self._place), paddle.static.global_scope()
        self._executor.run(paddle.static.default_startup_program())
        self._held = [scope.find_var(parameter.name).get_tensor() for parameter in built.tensors()]
        for held, value in zip(self._held, start_values(assignment.model, assignment.seed), strict=True):
            held.set(value, self._place)

    def step(self, batch: Batch) -> float:
        feed = dict(zip(("ids", "dense", "clicks"), batch, strict=True))
        (loss,) = self._executor.run(self._main, feed=feed, fetch_list=[self._loss])
        return float(loss.item())

    def _prepare_update(self, model: str, optimizer: Any, built: Any) -> None:
        """The backward pass, and a second program with the same parameters that updates them by fed gradients."""
        import paddle

        found = {parameter.name: gradient for parameter, gradient in optimizer.backward(self._loss)}
        self._gradients = [found[parameter.name] for parameter in built.tensors()]
        self._update = paddle.static.Program()
        startup = paddle.static.default_startup_program()
        with paddle.static.program_guard(self._update, startup), paddle.utils.unique_name.guard():
            parameters = network(model, PaddleKit()).tensors()
            fed = [paddle.static.data(f"mean_{place}", one.shape, "float32") for place, one in enumerate(parameters)]
            optimizer.apply_gradients(list(zip(parameters, fed, strict=True)))

    def step_of_all(self, shares: Sequence[Batch]) -> float:
        """A step with the mean of the gradients of these batches."""
        feeds = [dict(zip(("ids", "dense", "clicks"), share, strict=True)) for share in shares]
        fetched = [self._executor.run(self._main, feed=f, fetch_list=[self._loss, *self._gradients]) for f in feeds]
        gradients = zip(*(found[1:] for found in fetched), strict=True)
        means = [sum(every[1:], every[0]) * np.float32(1 / len(shares)) for every in gradients]
        self._executor.run(self._update, feed={f"mean_{place}": mean for place, mean in enumerate(means)})
        return float(np.mean([found[0] for found in fetched]))

    def weights(self) -> list[NDArray[np.float32]]:
        return [np.array(held) for held in self._held]


class TorchTrainee:
    """PyTorch with sparse gradients of embeddings: under DDP, under Horovod, or alone.

    Its Adam is two optimizers: SparseAdam for tables, which moves the touched rows only, and the fused Adam for
    the rest.
    """

    def __init__(self, assignment: Assignment, rank: int) -> None:
        import torch

        torch.set_num_threads(1)
        self._torch, self.rank, self._model = torch, rank, network(assignment.model, TorchKit())
        self._tensors = [tensor.detach() for tensor in self._model.tensors()]
        self._matrices = {id(layer.weight) for layer in self._model.modules() if isinstance(layer, torch.nn.Linear)}
        self._named = self._model.tensors()
        for tensor, value in zip(self._own_order(), start_values(assignment.model, assignment.seed), strict=True):
            tensor.copy_(torch.from_numpy(value))
        rate, every = RATES[assignment.optimizer], list(self._model.parameters())
        tables = [table.weight for table in self._model.tables]
        others = [one for one in every if not any(one is table for table in tables)]
        if assignment.optimizer == SGD:
            self._optimizers: list[Any] = [torch.optim.SGD(every, lr=rate)]
        else:
            fused = torch.optim.Adam(others, lr=rate, eps=EPSILON, fused=True)
            self._optimizers = [torch.optim.SparseAdam(tables, lr=rate, eps=EPSILON), fused]
        if assignment.kind == TORCH:
            torch.distributed.init_process_group("gloo")  # MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
            self._model = torch.nn.parallel.DistributedDataParallel(self._model)
        elif assignment.kind == HOROVOD:
            world = (Path(assignment.folder), assignment.ranks, rank, assignment.timeout_seconds)
            self._optimizers = under_horovod(self._optimizers, self._model, *world)

    def _own_order(self) -> list[Any]:
        """Tensors in the order of ``shapes``; linear layers' matrices transposed, as views."""
        pairs = zip(self._named, self._tensors, strict=True)
        return [tensor.T if id(named) in self._matrices else tensor for named, tensor in pairs]

    def step(self, batch: Batch) -> float:
        return self.step_of_all([batch])

    def step_of_all(self, shares: Sequence[Batch]) -> float:
        """A step with the mean of the gradients of these batches."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        total = 0.0
        for share in shares:
            ids, dense, clicks = map(self._torch.from_numpy, share)
            loss = self._torch.nn.functional.binary_cross_entropy_with_logits(self._model(ids, dense), clicks)
            (loss / len(shares)).backward()
            total += float(loss.detach()) / len(shares)
        for optimizer in self._optimizers:
            optimizer.step()
        return total

    def weights(self) -> list[NDArray[np.float32]]:
        return [np.array(tensor.numpy()) for tensor in self._own_order()]


def run(trainee: PaddleTrainee | TorchTrainee, assignment: Assignment) -> None:
    """Train, and write this rank's record; rank 0 writes the parameters."""
    folder, ranks, rank, size = Path(assignment.folder), assignment.ranks, trainee.rank, assignment.batch
    is_one = assignment.kind == ONE
    shares = range(ranks) if is_one else [rank]
    batches = [[batch_of(assignment.seed, each, step, size) for each in shares] for step in range(assignment.steps)]
    seconds, losses, sent = [], [], []
    members = 1 if is_one else ranks
    wait_for_all(folder, members, rank, 1, assignment.timeout_seconds)
    for batch in batches:
        began = time.perf_counter()
        losses.append(trainee.step_of_all(batch) if is_one else trainee.step(batch[0]))
        seconds.append(round(time.perf_counter() - began, 6))
        sent.append(0 if is_one else interface_bytes())
    wait_for_all(folder, members, rank, 2, assignment.timeout_seconds)
    weights = trainee.weights()
    record = {
        "step_seconds": seconds,
        "losses": losses,
        "sent_after": sent,
        "touched_rows": [len(np.unique(batch[0][0])) for batch in batches],
        "digest": hashlib.sha256(b"".join(value.tobytes() for value in weights)).hexdigest(),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    if rank == 0:
        np.savez(folder / "weights.npz", *weights)
    publish_where_linked(folder / f"rank{rank}.json", json.dumps(record).encode())
    wait_for_all(folder, members, rank, 3, assignment.timeout_seconds)  # no rank ends while another may need it


def main() -> None:
    assignment = Assignment.read(Path(sys.argv[1]))
    if not assignment.uses_paddle:
        run(TorchTrainee(assignment, int(sys.argv[2])), assignment)
        return
    trainee = PaddleTrainee(assignment)
    if len(sys.argv) > 2:
        trainee.rank = int(sys.argv[2])
    run(trainee, assignment)


if __name__ == "__main__":
    main()
