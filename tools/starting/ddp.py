"""A rank of PyTorch's DistributedDataParallel up to the end of its first step. argv: the folder of the record."""

from __future__ import annotations

import itertools
import sys

# This folder is in the path because the script is in it; fleet_train may be another checkout's.
from stamps import BATCH, SIZES, Stamps  # type: ignore[import-not-found]

STAMPS = Stamps()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

STAMPS.stamp("import of the framework")


def main() -> None:
    dist.init_process_group("gloo")
    STAMPS.stamp("joining")
    layers: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(SIZES):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1])
    STAMPS.stamp("network and conversion")
    distributed = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(distributed.parameters(), lr=0.01, momentum=0.9)
    STAMPS.stamp("start values")  # broadcasts rank 0's parameters
    rank = dist.get_rank()
    generator = np.random.default_rng(rank)
    features = torch.from_numpy(generator.standard_normal((BATCH, SIZES[0]), dtype=np.float32))
    labels = torch.from_numpy(generator.integers(0, SIZES[-1], BATCH))
    loss = torch.nn.functional.cross_entropy(distributed(features), labels)
    loss.backward()
    optimizer.step()
    value = float(loss.detach())
    STAMPS.stamp("first step")
    assert np.isfinite(value)
    STAMPS.write(sys.argv[1], rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
