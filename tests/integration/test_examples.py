"""The examples of tools/examples train what they show, as the pages start them; and the installed package does.

Two ranks of the launcher end with the result of one process.
"""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support import commands
from tests.support.ports import free_ports
from tests.support.processes import ROOT, output_of, python
from tests.support.ranks import run_launchers, run_ranks

EXAMPLES = ROOT / "tools" / "examples"
STATE = "persistables.safetensors"
HOSTS = ("127.0.0.2", "127.0.0.3")
PAGE = (ROOT / "docs" / "start.md").read_text()


def printed_command(*words: str) -> str:
    """The one of docs/start.md with these words."""
    (command,) = [each for each in commands.shell_commands(PAGE) if all(word in each for word in words)]
    return command


@dataclass(frozen=True)
class Run:
    """What a run printed, and where it saved."""

    printed: str
    folder: Path

    def measures(self, pattern: str) -> list[float]:
        """The groups of ``pattern``, which one line of the output must have."""
        (line,) = re.findall(pattern, self.printed)
        return [float(number) for number in ([line] if isinstance(line, str) else line)]


def two_ranks(name: str, folder: Path, *flags: str) -> Run:
    """As the page starts it, with a port of its own and the script's full path."""
    command = printed_command("launch --nproc_per_node=2 ", name)
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


@dataclass(frozen=True)
class Learning:
    """``bounds``: of each number in the line; ``alike``: how near one process is to two ranks, and both to the page."""

    pattern: str
    bounds: tuple[tuple[float, float], ...]
    alike: tuple[float, float]
    noise: tuple[str, ...] = ()


LEARNING = {
    "image_classification.py": Learning(r"held-out accuracy ([\d.]+) over 360 images", ((0.96, 1.0),), (0.006, 0.02)),
    # By counting words it cannot be learned: the rule is about their order. The loss does not depend on the keys'
    # biases: their gradients are rounding errors, which AdamW makes large.
    "text_transformer.py": Learning(
        r"held-out accuracy ([\d.]+) on \d rank\(s\); by counting words ([\d.]+)",
        ((0.93, 1.0), (0.0, 0.6)),
        (0.006, 0.04),
        ("linear_1.b_0", "linear_7.b_0"),
    ),
    "click_through.py": Learning(
        r"held-out AUC ([\d.]+) on \d rank\(s\); the true probabilities have ([\d.]+)",
        ((0.8, 0.9), (0.8, 0.9)),
        (0.002, 0.005),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LEARNING)
def test_two_ranks_learn_what_one_process_learns(name: str, tmp_path: Path) -> None:
    case = LEARNING[name]
    one, two = one_process(name, tmp_path), two_ranks(name, tmp_path)
    reached = two.measures(case.pattern)
    assert all(least < value <= most for value, (least, most) in zip(reached, case.bounds, strict=True)), two.printed
    assert reached == pytest.approx(one.measures(case.pattern), abs=case.alike[0])
    assert reached == pytest.approx(Run(PAGE, ROOT).measures(case.pattern), abs=case.alike[1])
    assert_same_parameters(one.folder, two.folder, noise=case.noise)


@pytest.mark.long
def test_a_gan_begins_as_in_one_process_and_reaches_the_clouds(tmp_path: Path) -> None:
    steps = ("--steps", "50")
    one, two = one_process("gan.py", tmp_path, *steps), two_ranks("gan.py", tmp_path / "begun", *steps)
    for program in ("judging", "making"):
        assert_same_parameters(one.folder / program, two.folder / program)
    whole = two_ranks("gan.py", tmp_path)
    inside, reached = whole.measures(r"([\d.]+) of the points lie in (\d) of 8 clouds on 2 rank")
    assert inside > 0.7, whole.printed
    assert reached >= 7


def test_a_table_is_sent_whole_or_in_few_bits() -> None:
    """19080 bytes of embeddings and 3332 of layers; int8 takes a quarter and the scales."""
    sent = []
    for strategy in ("--script", "--strategy int8_compression"):
        words = shlex.split(printed_command(f"plan --nodes 2 {strategy}"))
        printed = output_of(python(*words[1:]), cwd=ROOT)
        sent.append(float(re.findall(r"sent by a rank: ([\d.]+) MB", printed)[0]))
    whole, few = sent
    assert whole == pytest.approx((530 * 9 + 24 * 32 + 32 + 32 + 1) * 4 / 2**20, abs=0.001)
    assert 0.2 * whole < few < 0.3 * whole


def costs(output: str) -> list[float]:
    return [float(cost) for cost in re.findall(r"^step\d+ cost=([\d.]+)$", output, re.MULTILINE)]


def test_with_fleet_one_process_trains_exactly_as_before(tmp_path: Path) -> None:
    single = run_ranks(EXAMPLES / "single_card.py", 1, nodes=0, folder=tmp_path / "single")
    fleet = run_ranks(EXAMPLES / "train_with_fleet.py", 1, nodes=0, folder=tmp_path / "fleet")
    curve = costs(single.ranks[0].output)
    assert len(curve) == 100
    assert curve[-1] < 0.5 * curve[0]
    assert costs(fleet.ranks[0].output) == curve
    assert all(any((tmp_path / name / "output").iterdir()) for name in ("single", "fleet"))


def test_two_machines_train_and_rank_0_saves(tmp_path: Path) -> None:
    commands.put_script(tmp_path, 2, EXAMPLES / "train_with_fleet.py")
    port = free_ports(3, HOSTS)
    lines = [commands.on_node(commands.FLEET_TRAIN, node, HOSTS, port) for node in range(2)]
    result = run_launchers(lines, folder=tmp_path)
    logs = sorted(path.name for folder in result.folders for path in (folder / "mylog").glob("workerlog.*"))
    assert logs == ["workerlog.0", "workerlog.0", "workerlog.1", "workerlog.1"]
    curve = costs(result.nodes[0].output)  # rank 0's output belongs on the terminal
    assert len(curve) == 100
    assert curve[-1] < 0.5 * curve[0]
    saved = [any((folder / "output").rglob("*")) for folder in result.folders]
    assert saved == [True, False], "rank 0 saves for all"


@pytest.mark.long
def test_old_tuning_is_mapped_with_a_message(tmp_path: Path) -> None:
    zero, one = (rank.output for rank in run_ranks(EXAMPLES / "old_recipe.py", 2, nodes=2, folder=tmp_path).ranks)
    assert len(costs(zero)) == 50, "every second step fetches the loss"
    assert [name for name in ("num_threads", "num_iteration_per_drop_scope") if name not in zero] == []
    assert "is mapped" not in one, "what is mapped is said once, on rank 0"


@pytest.mark.long
def test_a_program_of_ones_own_is_trained(tmp_path: Path) -> None:
    last = two_ranks("own_program.py", tmp_path).printed.splitlines()[-1]
    assert re.fullmatch(r"640 steps on 2 rank\(s\): mean squared error 0\.00.* over 201 samples", last)


@pytest.mark.long
def test_the_installed_package_finds_its_profiles_and_trains(tmp_path: Path) -> None:
    checkout, site, elsewhere = (tmp_path / name for name in ("checkout", "site", "elsewhere"))
    for folder in (checkout, elsewhere):
        folder.mkdir()
    for part in ("fleet_train", "strategies", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, checkout / part)  # building writes into its folder: not into this checkout

    def run(command: str, folder: Path, extra: dict[str, str] | None = None) -> str:
        return output_of(shlex.split(command), extra, folder)

    run(f"{commands.INSTALL} --no-deps --quiet --target {site}", checkout)
    shutil.rmtree(checkout)
    installed = {"PYTHONPATH": str(site)}
    where = run('python -c "import fleet_train; print(fleet_train.__file__)"', elsewhere, installed)
    assert where.strip() == str(site / "fleet_train" / "__init__.py")
    assert "multi_node" in run("python -m fleet_train profiles", elsewhere, installed)
    shutil.copy(EXAMPLES / "train_with_fleet.py", elsewhere / "train.py")
    assert "step99 cost=" in run("python train.py", elsewhere, installed)
