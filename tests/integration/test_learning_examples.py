"""The examples learn what they promise, on two ranks of the launcher, with the result of one process."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.launchers import run_launchers
from tests.support.ports import free_ports
from tests.support.processes import ROOT, clean_environ
from tests.support.ranks import run_ranks

EXAMPLES = ROOT / "tools" / "examples"
STATE = "persistables.safetensors"

# docs/examples.md prints these commands.
IMAGES = "python -m fleet_train launch --nproc_per_node=2 tools/examples/image_classification.py"
SENTENCES = "python -m fleet_train launch --nproc_per_node=2 tools/examples/text_transformer.py"
CLICKS = "python -m fleet_train launch --nproc_per_node=2 tools/examples/click_through.py"
WHOLE = "python -m fleet_train plan --nodes 2 --script tools/examples/click_through.py"
FEW_BITS = WHOLE.replace("--script", "--strategy int8_compression --script")
GAN = "python -m fleet_train launch --nproc_per_node=2 tools/examples/gan.py"


@dataclass(frozen=True)
class Run:
    """What a run printed, and where it saved."""

    printed: str
    folder: Path

    def measures(self, pattern: str) -> list[float]:
        """The groups of ``pattern``, which one line of the output must have."""
        (line,) = re.findall(pattern, self.printed)
        return [float(number) for number in ([line] if isinstance(line, str) else line)]


def on_the_page(pattern: str) -> list[float]:
    """The numbers of the line that docs/examples.md shows."""
    return Run((ROOT / "docs" / "examples.md").read_text(), ROOT).measures(pattern)


def two_ranks(command: str, folder: Path, *flags: str) -> Run:
    """``command`` as printed, with a port of its own and the script's full path."""
    words = [str(ROOT / word) if word.startswith("tools/") else word for word in shlex.split(command)]
    words.insert(words.index("launch") + 1, f"--started_port={free_ports(4)}")
    words += ["--output_dir", str(folder / "two"), *flags]
    result = run_launchers([words], folder=folder / "launcher", timeout_seconds=280)
    return Run((result.folders[0] / "log" / "workerlog.0").read_text(), folder / "two")


def one_process(name: str, folder: Path, *flags: str) -> Run:
    args = ["--output_dir", str(folder / "one"), *flags]
    result = run_ranks(EXAMPLES / name, 1, nodes=0, folder=folder / "alone", args=args, timeout_seconds=280)
    return Run(result.ranks[0].output, folder / "one")


def assert_same_parameters(one: Path, two: Path, *, noise: tuple[str, ...] = ()) -> None:
    """Every parameter to 1e-4, but for ``noise``."""
    found, expected = load_file(two / STATE), load_file(one / STATE)
    names = [name for name in expected if re.search(r"\.[wb]_0$", name) and name not in noise]
    assert len(names) >= 6, sorted(expected)
    for name in names:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-4, err_msg=name)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_images_are_classified_as_by_one_process(tmp_path: Path) -> None:
    one, two = one_process("image_classification.py", tmp_path), two_ranks(IMAGES, tmp_path)
    pattern = r"held-out accuracy ([\d.]+) over 360 images"
    assert two.measures(pattern)[0] > 0.96, two.printed
    assert two.measures(pattern) == pytest.approx(one.measures(pattern), abs=0.006)
    assert two.measures(pattern) == pytest.approx(on_the_page(pattern), abs=0.02)
    assert_same_parameters(one.folder, two.folder)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_sentences_are_understood_as_by_one_process(tmp_path: Path) -> None:
    one, two = one_process("text_transformer.py", tmp_path), two_ranks(SENTENCES, tmp_path)
    pattern = r"held-out accuracy ([\d.]+) on \d rank\(s\); by counting words ([\d.]+)"
    learned, counted = two.measures(pattern)
    assert learned > 0.93, two.printed
    assert counted < 0.6, "the rule is about the words' order"
    assert [learned, counted] == pytest.approx(one.measures(pattern), abs=0.006)
    assert [learned, counted] == pytest.approx(on_the_page(pattern), abs=0.04)
    # The loss does not depend on the keys' biases: their gradients are rounding errors, which AdamW makes large.
    assert_same_parameters(one.folder, two.folder, noise=("linear_1.b_0", "linear_7.b_0"))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_clicks_are_predicted_as_by_one_process(tmp_path: Path) -> None:
    one, two = one_process("click_through.py", tmp_path), two_ranks(CLICKS, tmp_path)
    pattern = r"held-out AUC ([\d.]+) on \d rank\(s\); the true probabilities have ([\d.]+)"
    reached, best = two.measures(pattern)
    assert 0.8 < reached < best < 0.9, two.printed
    assert [reached, best] == pytest.approx(one.measures(pattern), abs=0.002)
    assert [reached, best] == pytest.approx(on_the_page(pattern), abs=0.005)
    assert_same_parameters(one.folder, two.folder)


def test_a_table_is_sent_whole_or_in_few_bits() -> None:
    """19080 bytes of embeddings and 3332 of layers; int8 takes a quarter and the scales."""
    printed = [
        subprocess.run(
            shlex.split(command.replace("python", sys.executable, 1)),
            cwd=ROOT,
            env=clean_environ(),
            capture_output=True,
            text=True,
            timeout=150,
            check=True,
        ).stdout
        for command in (WHOLE, FEW_BITS)
    ]
    whole, few = (float(re.findall(r"sent by a rank: ([\d.]+) MB", text)[0]) for text in printed)
    assert whole == pytest.approx((530 * 9 + 24 * 32 + 32 + 32 + 1) * 4 / 2**20, abs=0.001)
    assert 0.2 * whole < few < 0.3 * whole


SPARSE = """
import paddle
paddle.enable_static()
ids = paddle.static.data("ids", [None, 3], "int64")
layer = paddle.nn.Embedding(30, 8, sparse=True)
loss = layer(ids).square().mean()
(_, gradient), = paddle.optimizer.Adam(0.1, lazy_mode=True).backward(loss)
print("gradient", list(gradient.shape), gradient.is_dense_tensor_type(), gradient.get_defining_op().name())
for make in (lambda: paddle.static.nn.embedding(ids, (30, 8), is_sparse=True),
             lambda: paddle.static.nn.sparse_embedding(ids, (30, 8)),
             lambda: paddle.static.default_main_program().clone(for_test=True)):
    try:
        make()
    except TypeError:
        print("TypeError")
"""


def test_what_the_page_says_of_sparse_gradients_is_so(tmp_path: Path) -> None:
    printed = run_ranks(SPARSE, 1, nodes=0, folder=tmp_path).ranks[0].output
    assert "gradient [30, 8] True pd_op.embedding_grad" in printed
    assert printed.count("TypeError\n") == 3


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_generator_reaches_the_clouds(tmp_path: Path) -> None:
    two, pattern = two_ranks(GAN, tmp_path), r"([\d.]+) of the points lie in (\d) of 8 clouds on 2 rank"
    inside, reached = two.measures(pattern)
    assert inside > 0.7, two.printed
    assert reached >= 7
    assert [inside, reached / 8] == pytest.approx([on_the_page(pattern)[0], on_the_page(pattern)[1] / 8], abs=0.2)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_gan_begins_as_in_one_process(tmp_path: Path) -> None:
    steps = ("--steps", "200")
    one, two = one_process("gan.py", tmp_path, *steps), two_ranks(GAN, tmp_path, *steps)
    for program in ("judging", "making"):
        assert_same_parameters(one.folder / program, two.folder / program)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_fits_below_100_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 100


def four_lines(text: str) -> list[str]:
    """The kinds of line that fleet_train needs, in their order, each once."""
    found = re.findall(r"^from fleet_train import|fleet\.init|fleet\.distributed_optimizer|fleet\.save_\w+", text, re.M)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("name", ["image_classification", "text_transformer", "click_through", "gan"])
def test_an_example_has_the_four_lines(name: str) -> None:
    assert four_lines((EXAMPLES / f"{name}.py").read_text()) == [
        "from fleet_train import",
        "fleet.init",
        "fleet.distributed_optimizer",
        "fleet.save_persistables",
    ]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_the_page_has_every_example(path: Path) -> None:
    assert f"(../tools/examples/{path.name})" in (ROOT / "docs" / "examples.md").read_text()
