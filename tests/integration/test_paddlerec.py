"""PaddleRec's own static models train on two ranks, unchanged but for four lines.

The reference is one process of plain Paddle with the joint batch, which runs the files as they are (on PIR, too).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_train.cluster.at_import import is_amd_processor
from tests.support.ports import free_ports
from tests.support.processes import ROOT, python
from tests.support.ranks import run_launchers, run_ranks

SCRIPTS = ROOT / "tests" / "integration" / "paddlerec"
RANKS, STEPS = 2, 6
# With the models' own epsilon, 1e-8, Adam makes a whole step of a gradient that is rounding alone: the order of sums
# decides its direction. Parameters are compared strictly with this one, on both sides.
LARGER_EPSILON = 1e-3
WITH_OWN_EPSILON = 5e-6
TABLE_GRADIENT = "pd_op.embedding_grad"
# The startup program draws in its own order, as on ranks.
IN_PROGRAM_ORDER = {"FLAGS_new_executor_serial_run": "1", "FLAGS_new_executor_sequential_run": "1"}
ROWS = 1_000_001
# In one process, too: Paddle's sparse gradients, and with them Adam's lazy mode, are the old IR's alone.
ON_PIR = ("os.environ['FLAGS_enable_pir_api'] = '0'", "os.environ['FLAGS_enable_pir_api'] = '1'")
# What a user changes, by file: lines that are replaced (or followed) by others.
CHANGES = {
    "trainer.py": {"from paddle.distributed import fleet": "from fleet_train import fleet"},
    "deepfm/static_model.py": {
        "import paddle\n": "import paddle\nfrom fleet_train import fleet\n",
        "paddle.distributed.fleet.distributed_optimizer": "fleet.distributed_optimizer",
    },
    "dssm/static_model.py": {"import paddle.distributed.fleet as fleet": "from fleet_train import fleet"},
    "mmoe/static_model.py": {"import paddle.distributed.fleet as fleet": "from fleet_train import fleet"},
}


def click_lines(random: np.random.Generator, count: int) -> list[str]:
    """As ``sample_train.txt``: a click, 13 dense features, an id for each of 26 slots; some slots are missing."""
    lines = []
    for _ in range(count):
        dense = [f"dense_feature:{value:.6f}" for value in random.random(13)]
        ids = np.minimum(random.zipf(1.2, 26), ROWS - 1)
        slots = [f"{slot}:{one}" for slot, one in enumerate(ids, 1) if random.random() > 0.05]
        lines.append(" ".join([f"click:{random.integers(0, 2)}", *dense, *slots]))
    return lines


def document_lines(random: np.random.Generator, count: int) -> list[str]:
    """As ``train.txt``: the letter trigrams, counted, of a query, of its document and of another one."""
    counts = (random.random((count, 3, 2900)) < 0.005).astype(int)
    return ["\t".join(",".join(map(str, text)) for text in texts) for texts in counts]


def census_lines(random: np.random.Generator, count: int) -> list[str]:
    """As ``train_data.txt``: two labels, 499 features of which most are 0 or 1."""
    labels = random.integers(0, 2, (count, 2))
    features = (random.random((count, 499)) < 0.1).astype(float)
    features[:, :4] = random.integers(0, 100, (count, 4)) / 100
    return [",".join(f"{value:g}" for value in (*own, *line)) for own, line in zip(labels, features, strict=True)]


@dataclass(frozen=True)
class Model:
    """A folder's reader, hyperparameters as in its ``config.yaml``, and lines in the format of its sample data."""

    reader: str
    batch: int
    lines: Callable[[np.random.Generator, int], list[str]]
    settings: dict[str, Any] = field(default_factory=dict)
    reader_shares_files: bool = False
    """With fleet, its reader takes this rank's of all files."""
    slices_batch: bool = False
    """The loss is of the first ``slice_end`` samples: the batch's size."""
    untrained: str = ""
    """A parameter that its network does not use."""
    tables: int = 0
    tolerance: float = 1e-6
    """Of a parameter's largest value."""


MODELS = {
    "deepfm": Model(
        "criteo_reader",
        batch=16,
        lines=click_lines,
        settings={
            "sparse_inputs_slots": 27,
            "sparse_feature_number": ROWS,
            "sparse_feature_dim": 9,
            "dense_input_dim": 13,
            "fc_sizes": [512, 256, 128, 32],
        },
        reader_shares_files=True,
        untrained="create_parameter_2.w_0",
        tables=2,
    ),
    "dssm": Model(
        "bq_reader_train",
        batch=8,
        lines=document_lines,
        settings={"trigram_d": 2900, "neg_num": 1, "fc_sizes": [300, 300, 128], "fc_acts": ["relu"] * 3},
        slices_batch=True,
    ),
    "mmoe": Model(
        "census_reader",
        batch=4,
        lines=census_lines,
        settings={"feature_size": 499, "expert_num": 8, "gate_num": 2, "expert_size": 16, "tower_size": 8},
        tolerance=5e-6,  # its experts begin equal: gradients are small rests of what cancels
    ),
}


@dataclass(frozen=True)
class Case:
    """What is trained, and with which numbers; ``epsilon``: Adam's, None for the model's own."""

    name: str
    seed: int
    epsilon: float | None = None

    def job(self, files: list[str], use_fleet: bool) -> dict[str, Any]:
        """What ``trainer.py`` reads."""
        model = MODELS[self.name]
        hyper = {**model.settings, "optimizer.learning_rate": 0.001}
        if model.slices_batch:
            hyper["slice_end"] = model.batch if use_fleet else model.batch * RANKS
        runner = {"use_fleet": use_fleet, "train_batch_size": model.batch, "seed": self.seed}
        config = {f"hyper_parameters.{name}": value for name, value in hyper.items()}
        config |= {f"runner.{name}": value for name, value in runner.items()}
        reading = {"files": files, "reader": model.reader, "reader_shares_files": model.reader_shares_files}
        return {"config": config, **reading, "epsilon": self.epsilon}


def copied_scripts(folder: Path, changes: Mapping[str, Mapping[str, str]]) -> None:
    """Copy PaddleRec's files, and change what stands once in each."""
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, replaced in {"trainer.py": dict([ON_PIR]), **changes}.items():
        text = (folder / name).read_text()
        for old, new in (replaced | dict([ON_PIR]) if name == "trainer.py" else replaced).items():
            assert text.count(old) == 1, f"{name}: {old}"
            text = text.replace(old, new)
        (folder / name).write_text(text)


class Corpus:
    """Scripts with and without the changed lines, the data and the results of one process, made when asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        copied_scripts(folder / "alone", {})
        copied_scripts(folder / "ranks", CHANGES)
        self.alone = cache(self._alone)
        self.files = cache(self._files)

    def _files(self, name: str, seed: int) -> list[str]:
        model, random = MODELS[name], np.random.default_rng(seed)
        paths = [self.folder / f"{name}-{seed}-{rank}.txt" for rank in range(RANKS)]
        for path in paths:
            path.write_text("\n".join(model.lines(random, STEPS * model.batch)) + "\n")
        return [str(path) for path in paths]

    def arguments(self, case: Case, use_fleet: bool, folder: Path) -> list[str]:
        folder.mkdir(parents=True, exist_ok=True)
        asked = folder / "job.json"
        asked.write_text(json.dumps(case.job(self.files(case.name, case.seed), use_fleet)))
        scripts = self.folder / ("ranks" if use_fleet else "alone")
        return [str(scripts / "trainer.py"), str(scripts / case.name), str(asked)]

    def _alone(self, case: Case) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self.folder) as name:
            own = Path(name)
            script, *args = self.arguments(case, use_fleet=False, folder=own)
            # With the kernels of MKL that ranks use: tiny parameters show others' order of sums.
            environ = IN_PROGRAM_ORDER | ({"MKL_DEBUG_CPU_TYPE": "5"} if is_amd_processor() else {})
            return run_ranks(Path(script), 1, nodes=0, folder=own, args=args, env=environ).values[0]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("paddlerec"))


def trained(found: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name.removeprefix("end/"): value for name, value in found.items() if name.startswith("end/")}


def on_ranks(corpus: Corpus, folder: Path, case: Case, *flags: str) -> dict[str, Any]:
    """What rank 0 of a launch reports; start values, replicas and losses are compared with one process."""
    expected = corpus.alone(case)
    arguments = corpus.arguments(case, use_fleet=True, folder=folder / "job")
    ports = f"--started_port={free_ports(RANKS + 1)}"
    command = python("-m", "fleet_train", "launch", f"--nproc_per_node={RANKS}", ports, *flags, *arguments)
    result = run_launchers([command], folder=folder)
    assert result.of_all("start") == [expected["start"]] * RANKS
    assert len(set(result.of_all("trained"))) == 1, "the replicas differ"
    losses = result.of_all("losses")
    assert losses[0] != losses[1], "each rank has data of its own"
    assert len(losses[0]) == STEPS
    assert np.mean(losses, axis=0) == pytest.approx(expected["losses"], rel=1e-5)
    return result.values[0]


@pytest.mark.parametrize(
    ("name", "seed", "epsilon", "sparse"),
    [
        *((name, 1, LARGER_EPSILON, "true") for name in MODELS),
        *(pytest.param(name, 2, LARGER_EPSILON, "auto", marks=pytest.mark.long) for name in MODELS),
        pytest.param("deepfm", 1, LARGER_EPSILON, "false", marks=pytest.mark.long),
        pytest.param("deepfm", 3, None, "true", marks=pytest.mark.long),
    ],
)
def test_two_ranks_reach_the_parameters_of_one_process(
    corpus: Corpus, tmp_path: Path, name: str, seed: int, epsilon: float | None, sparse: str
) -> None:
    case, model = Case(name, seed, epsilon), MODELS[name]
    expected, found = corpus.alone(case), on_ranks(corpus, tmp_path, case, "--set", f"sparse_embeddings={sparse}")
    assert expected["operators"].count(TABLE_GRADIENT) == model.tables
    assert found["operators"].count(TABLE_GRADIENT) == model.tables * (sparse == "false"), "whole tables are sent"
    ours = trained(found)
    assert ours.keys() == trained(expected).keys()
    tolerance = model.tolerance if epsilon else WITH_OWN_EPSILON
    for one, end in trained(expected).items():
        start, scale = expected[f"start/{one}"], np.abs(end).max()
        assert one == model.untrained or np.abs(end - start).max() > 10 * tolerance * scale, f"{one} was not trained"
        assert np.abs(ours[one] - end).max() <= tolerance * scale, one
