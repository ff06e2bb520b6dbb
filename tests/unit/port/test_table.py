"""Every row of the table: the new form of an old line (golden.yaml), whose names exist today; and what calls become."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_train.port import Ported, port
from fleet_train.port.index import rows
from fleet_train.port.rules import To
from tests.support.processes import output_of, python

OLD_IMPORTS = """\
import os

import fleetx
import paddle
import paddle.fluid as fluid
"""
FLEET_IMPORTS = """\
from paddle.distributed import fleet
from paddle.distributed.fleet.base import role_maker
"""
FLUID = "import paddle.fluid as fluid\n"
GOLDEN: dict[str, dict[str, str]] = yaml.safe_load((Path(__file__).parent / "golden.yaml").read_text())
ROWS = rows()
# What the old lines of Fleet itself and those of fleet scripts need around them.
OF_FLEET = {
    name for name in GOLDEN if name.startswith("paddle.distributed.fleet") or name.endswith("(in fleet scripts)")
}


def script(lines: Sequence[str], fleet: bool) -> str:
    """A function for each line, ported together: a pass over many lines costs as one. ``fleet``: with Fleet 2.x."""
    functions = [f"def case_{number}():\n{textwrap.indent(line, '    ')}\n" for number, line in enumerate(lines)]
    return "\n\n".join([OLD_IMPORTS + (FLEET_IMPORTS if fleet else ""), *functions])


def split(ported: str) -> list[str]:
    """What became of each line."""
    bodies = re.split(r"^def case_\d+\(\):\n", ported, flags=re.MULTILINE)[1:]
    return [textwrap.dedent(body).strip() for body in bodies]


@pytest.fixture(scope="module")
def ported() -> dict[str, str]:
    """Each row's old line, ported: two scripts, with Fleet and without."""
    found = {}
    for names, fleet in ((sorted(GOLDEN.keys() - OF_FLEET), False), (sorted(OF_FLEET), True)):
        new = port(script([GOLDEN[name]["old"] for name in names], fleet).encode(), "golden.py").new.decode()
        found |= dict(zip(names, split(new), strict=True))
    return found


def test_every_row_has_a_golden_line() -> None:
    assert GOLDEN.keys() == ROWS.keys()


@pytest.mark.parametrize("row", sorted(GOLDEN))
def test_old_line_becomes_the_golden_one(row: str, ported: dict[str, str]) -> None:
    assert ported[row] == GOLDEN[row]["new"]


def run_python(*arguments: str) -> Any:
    """What a program of today's Paddle prints, as JSON, in its last line."""
    return json.loads(output_of(python(*arguments)).splitlines()[-1])


_LOOK = """
import inspect, json, sys
import paddle
from fleet_train import DistributedStrategy, compat, fleet, role_maker
from fleet_train.port.table_programs import BUILD_FIELDS
wrong = []
for name, keywords in json.load(open(sys.argv[1])):
    owner, _, last = name.rpartition(".")
    if owner == "fleet":
        there = last in fleet.__all__
    else:
        there = True
    try:
        thing = None if name in ("fleet.main_program", "fleet.startup_program") else eval(name)
    except AttributeError as error:
        there = False
    if not there:
        wrong.append(f"{name} does not exist")
    elif keywords:
        known = inspect.signature(thing).parameters
        wrong += [f"{name} has no parameter {word}" for word in keywords if word not in known]
fields = {name for name in dir(paddle.static.BuildStrategy()) if name[0] != "_"} - {"ReduceStrategy"}
wrong += [f"BuildStrategy has a field {name}" for name in fields ^ BUILD_FIELDS]
print(json.dumps(wrong))
"""


def test_every_target_exists_today_with_the_arguments_that_are_written(tmp_path: Path) -> None:
    asked: list[Any] = []
    for rule in ROWS.values():
        if isinstance(rule, To):
            words = [one.new for one in rule.parameters if one.dropped is None and one.old != rule.act]
            words += [keyword for keyword, _ in rule.added]
            direct = set(rule.targets) - {rule.otherwise}
            asked += [(name, words) for name in sorted(direct)] + ([(rule.otherwise, [])] if rule.otherwise else [])
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    assert run_python("-c", _LOOK, str(tmp_path / "asked.json")) == []


def test_compat_takes_the_arguments_of_1_8_in_their_order() -> None:
    old = json.loads((Path(__file__).parent / "signatures_1_8.json").read_text())
    code = (
        "import inspect, json\nfrom fleet_train import compat\n"
        "show = lambda f: [[p.name, None if p.default is p.empty else repr(p.default)] for p in "
        "inspect.signature(f).parameters.values()]\n"
        "print(json.dumps({name: show(getattr(compat, name)) for name in compat.__all__}))"
    )
    now = run_python("-c", code)
    assert now.keys() == old.keys() | {"backward", "clone", "clone_for_test", "minimize"}  # methods in 1.8
    for name, parameters in old.items():
        ours = now[name][: len(parameters)]
        assert [one for one, _ in ours] == [one for one, _ in parameters], name
        assert [one for one in ours if one[0] not in ("type", "place")] == [
            one for one in parameters if one[0] not in ("type", "place")
        ], name


def port_text(text: str) -> Ported:
    return port(text.encode(), "train.py")


OURS, COMPAT, RELU = "from fleet_train import fleet", "from fleet_train import compat", "paddle.nn.functional.relu(x)"


@pytest.mark.parametrize(
    ("imported", "used", "now_imported", "now"),
    [
        ("import paddle.fluid as fluid", "fluid.layers.relu(x)", "import paddle", RELU),
        ("import paddle.fluid", "paddle.fluid.layers.relu(x)", "import paddle", RELU),
        ("from paddle import fluid as F", "F.layers.relu(x)", "import paddle", RELU),
        ("import paddle.fluid.layers as L", "L.relu(x)", "import paddle", RELU),
        ("from paddle.fluid import layers", "layers.relu(x)", "import paddle", RELU),
        ("from paddle.fluid.layers import relu as r", "r(x)", "import paddle", RELU),
        ("from paddle.fluid.layers.nn import relu", "relu(x)", "import paddle", RELU),
        ("import paddle.incubate.distributed.fleet.collective as c", "c.fleet.init(r)", OURS, "fleet.init(r)"),
        (
            "from paddle.incubate.distributed.fleet import role_maker",
            "role_maker.PaddleCloudRoleMaker(is_collective=True)",
            "from fleet_train import role_maker",
            "role_maker.PaddleCloudRoleMaker(is_collective=True)",
        ),
        # What Paddle 3 still has below incubate stays.
        (
            "from paddle.incubate.distributed.fleet import recompute_hybrid",
            "recompute_hybrid(c, f, x)",
            "from paddle.incubate.distributed.fleet import recompute_hybrid",
            "recompute_hybrid(c, f, x)",
        ),
        ("from paddle.distributed.fleet import metrics", "metrics.auc(p, n)", OURS, "fleet.metrics.auc(p, n)"),
        ("import paddle.distributed.fleet.metrics.metric as m", "m.auc(p, n)", OURS, "fleet.metrics.auc(p, n)"),
        ("import paddle.distributed.fleet as fleet", "fleet.metrics.auc(p, n)", OURS, "fleet.metrics.auc(p, n)"),
    ],
)
def test_an_alias_is_resolved(imported: str, used: str, now_imported: str, now: str) -> None:
    assert port_text(f"{imported}\ny = {used}\n").new.decode() == f"{now_imported}\ny = {now}\n"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("fluid.layers.reduce_mean(*args)", "`*args` hides"),
        ("fluid.layers.matmul(x, **options)", "`**options` hides"),
        ("fluid.layers.reduce_mean(x, dims=1)", "`dims` is not known"),
        ("fluid.layers.mean(x, None, 3)", "3 positional arguments, 2 are known"),
        ("fluid.optimizer.Momentum(0.1, 0.9, None)", "order of these positional arguments differs"),
        ("fluid.layers.relu6(x, threshold=4.0)", "`threshold=4.0` has no equal today"),
        ("fluid.layers.scale(x, act=chosen)", "`act=chosen` cannot be read"),
        ("fluid.initializer.Xavier(uniform=flag)", "`uniform=flag` decides between"),
        ("fluid.initializer.Normal(0.0, 1.0, 7)", "`seed=7` has no equal today"),
        ("fluid.optimizer.Adam(0.1, epsilon=1e-3)", "`epsilon=1e-3` cannot be read"),
        ("fluid.layers.data('x', [1], lod_level=1)", "levels of detail"),
    ],
)
def test_a_call_that_may_mean_something_else_stays_and_says_why(line: str, reason: str) -> None:
    result = port_text(f"{FLUID}y = {line}\n")
    assert result.new.decode().splitlines()[-1] == f"y = {line}"
    assert reason in result.marks[-1].do


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("fluid.layers.conv2d(**options)", "compat.conv2d(**options)"),
        ("fluid.layers.elementwise_add(x, y, axis=0)", "compat.elementwise_add(x, y, axis=0)"),
        ("fluid.layers.elementwise_add(x, y, act=act)", "compat.elementwise_add(x, y, act=act)"),
        ("fluid.layers.elementwise_add(x, y, -1)", "paddle.add(x, y)"),
        ("fluid.layers.dropout(x, 0.5, is_test=testing)", "compat.dropout(x, 0.5, is_test=testing)"),
        ("fluid.layers.dropout(x, 0.5, seed=3)", "compat.dropout(x, 0.5, seed=3)"),
        ("fluid.layers.data('x', [3, size])", "compat.data('x', [3, size])"),
        ("fluid.layers.data('x', [-1, 3])", "paddle.static.data('x', [-1, 3])"),
        ("fluid.layers.data('x', [3], False, 'int64')", "paddle.static.data('x', [3], dtype='int64')"),
        ("fluid.layers.data('x', [3], stop_gradient=False)", "compat.data('x', [3], stop_gradient=False)"),
        ("fluid.layers.split(x, 2)", "paddle.split(x, 2, axis=-1)"),
        ("fluid.layers.reduce_mean(x, 1, True)", "paddle.mean(x, axis=1, keepdim=True)"),
        (
            "fluid.initializer.TruncatedNormal(0.0, 0.02)",
            "paddle.nn.initializer.TruncatedNormal(mean=0.0, std=0.02, a=-2 * 0.02, b=2 * 0.02)",
        ),
        ("fluid.layers.fc(fluid.layers.flatten(x), 3)", "compat.fc(compat.flatten(x), 3)"),
        (
            "fluid.default_main_program().clone(for_test=True)",
            "compat.clone_for_test(paddle.static.default_main_program())",
        ),
        ("main.clone(for_test=False)", "compat.clone(main)"),
        ("main_model.clone(True)", "main_model.clone(True)"),
        ("main.clone()", "compat.clone(main)"),
        ("fluid.layers.utils.map_structure(f, x)", "paddle.utils.layers_utils.map_structure(f, x)"),
        ("fluid.require_version('1.8')", "paddle.utils.require_version('1.8')"),
        ("fluid.CompiledProgram(main).with_data_parallel(loss_name=loss.name)", "main"),
    ],
)
def test_a_call_becomes_what_keeps_its_meaning(old: str, now: str) -> None:
    result = port_text(f"{FLUID}y = {old}\n")
    assert result.new.decode().splitlines()[-1] == f"y = {now}"
    assert result.marks == ()


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("paddle.static.nn.fc(x, 3, weight_attr=w)", "compat.fc(x, 3, param_attr=w)"),
        ("paddle.static.nn.fc(x=x, size=3, activation='relu')", "compat.fc(input=x, size=3, act='relu')"),
        ("paddle.create_parameter([3], 'float32')", "compat.create_parameter([3], 'float32')"),
        ("exe.train_from_dataset(main, dataset)", "compat.train_from_dataset(exe, main, dataset)"),
        (
            "self._exe.infer_from_dataset(dataset=d, fetch_list=[loss.name])",
            "compat.infer_from_dataset(self._exe, dataset=d, fetch_list=[loss])",
        ),
    ],
)
def test_what_differs_in_2_x_is_handed_to_compat(old: str, now: str) -> None:
    once = port_text(f"import paddle\ny = {old}\n")
    assert once.new.decode() == f"import paddle\n{COMPAT}\ny = {now}\n"
    assert once.marks == ()
    assert not port(once.new, "train.py").changed


@pytest.mark.parametrize(
    "line",
    [
        "test = main.clone(for_test=testing)",
        "main.all_parameters()",
        "exe.train_from_dataset(**options)",
        "tokenizer.train_from_dataset(path=path)",
        "opt.minimize(loss, grad_clip=clip)",
        "compiled.with_data_parallel(loss_name=name)",
    ],
)
def test_removed_methods_are_marked(line: str) -> None:
    assert len(port_text(f"import paddle\n{line}\n").marks) == 1
    assert port_text(line + "\n").marks == (), "a script without Paddle is not looked at"
