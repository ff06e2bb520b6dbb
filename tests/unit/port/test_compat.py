"""fleet_train.compat: what it refuses, and how it feeds; a ported line computes what it computed in Paddle 1.8.5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_train.port import port
from tests.support.processes import output_of, python
from tests.unit.port import fluid_numbers

HERE = Path(__file__).parent
RECORDED: dict[str, Any] = json.loads((HERE / "numbers_1_8.json").read_text())
# Paddle 1.8 gave a scalar one dimension, today it has none.
SCALARS = ([], [1])


# What is written -> part of the error that says what is wrong and what to do.
REFUSED = {
    "compat.conv2d(image, 4, 3, act='mish2')": "act='mish2': not supported; use one of elu, exp, gelu",
    "compat.data('words', [1], lod_level=1)": "lod_level=1: pad the sequences",
    "compat.DataFeeder(['x'])": "give the input variables instead of their names ['x']",
    "feeder.feed([(1,)])": "a sample has 1 entries for 2 inputs",
    "feeder.feed([([1, 2, 3], 5)])": "a sample of 'x' has 3 values, its shape is [2, 2]",
    "compat.embedding(x, [4, 4])": "the last dimension of the indices must be 1, given [-1, 2, 2]",
    "compat.embedding_v2(label, [4, 4], is_distributed=True)": "is_distributed=True needs parameter servers",
    "compat.one_hot(label, 4, allow_out_of_range=True)": "clip the indices first",
    "compat.dropout(x, 0.5, seed=7)": "seed=7 for one layer no longer exists; use paddle.seed",
    "compat.dropout(x, 0.5, dropout_implementation='both')": "use downgrade_in_infer or upscale_in_train",
    "compat.pool2d(image, 2, 'median')": "pool_type='median'; use 'max' or 'avg'",
    "compat.conv2d_transpose(image, 4, output_size=16)": "give filter_size",
    "compat.Executor().run(own, fetch_list=['mean_0.tmp_0'])": "fetch_list[0]: 'mean_0.tmp_0' is no parameter of the",
    "compat.minimize(None, total, parameter_list=['mean_0.tmp_0'])": "lists 'mean_0.tmp_0', and the loss's program",
    "exe.run(own, fetch_list=[total])": "exe.run: inside come from a loader: call its start() before",
    "[inside.set_batch_generator(lambda: []).start(), inside.start()]": "started twice: call its reset()",
    "compat.py_reader(2, [[-1, 1]], ['int64'], lod_levels=[1])": "lod_levels=[1]: pad the sequences",
    "rows('2 1 2 1\\n')": "rows.txt:1: not 2 slots of `count value ...` (float32, int64)",
    "rows('2 1 a 1 3\\n')": "rows.txt:1: not 2 slots",
    "rows('', 'cat; exit 3')": "rows.txt: pipe_command 'cat; exit 3' ended with exit code 3",
    "list(dataset('nowhere.txt').batches())": "nowhere.txt: No such file or directory",
    "compat.QueueDataset().set_hdfs_config('hdfs://a', 'b')": (
        "fs_name='hdfs://a': files are read from local or mounted folders"
    ),
    "compat.InMemoryDataset().init(parse_ins_id=True)": (
        "InMemoryDataset: parse_ins_id=True: lines have no identifiers here"
    ),
    "compat.QueueDataset().local_shuffle()": "QueueDataset.local_shuffle: use an InMemoryDataset",
    "compat.InMemoryDataset().local_shuffle()": "call load_into_memory() first",
    "compat.DatasetFactory().create_dataset('Dataset')": (
        "create_dataset('Dataset'): use one of QueueDataset, InMemoryDataset"
    ),
    "compat.train_from_dataset(exe, None, paddle.distributed.QueueDataset())": (
        "give a compat.QueueDataset or a compat.InMemoryDataset"
    ),
    "compat.train_from_dataset(exe, own, dataset('rows.txt'), print_period=0)": "a period of at least 1 batch",
    "compat.train_from_dataset(exe, own, dataset('rows.txt'), fetch_info=['loss'])": (
        "fetch_info=['loss'] and print_period=100: give a name for each of the 0 values"
    ),
    "compat.infer_from_dataset(exe, None, compat.QueueDataset(), fetch_handler=print)": (
        "infer_from_dataset: fetch_handler is not supported"
    ),
    "compat.from_generator([x], return_list=True)": "return_list=True is for dynamic mode",
    "iter(compat.from_generator([x]))": "set a generator first",
    "list(compat.from_generator([x, label]).set_batch_generator(lambda: [(1,)]))": (
        "a batch has 1 arrays for 2 inputs"
    ),
    "compat.embedding(label, [4, 4], param_attr=False)": ": param_attr=False: it has no form without this parameter",
    "compat.embedding(label, [4, 4], param_attr=['a', 'b'])": "2 attributes for one parameter; give one",
    "compat.fc([image, image], 3, param_attr=['a', 'b', 'c'])": "fc: param_attr lists 3 attributes for 2 inputs",
    "compat.fc(paddle.static.data('wide', [None, None]), 3)": (
        "the input [-1, -1] is open behind axis 1; fix its shape"
    ),
}

_CASES = """
import json, sys
import numpy as np
import paddle
from fleet_train import compat
from fleet_train.errors import ConversionError

paddle.enable_static()
x = paddle.static.data("x", [None, 2, 2])
label = paddle.static.data("label", [None, 1], "int64")
image = paddle.static.data("image", [None, 3, 8, 8])
feeder = compat.DataFeeder(feed_list=[x, label], place=None)


def refusal(expression):
    try:
        eval(expression) if isinstance(expression, str) else expression()
    except ConversionError as error:
        return str(error)
    return "nothing was refused"


def samples(count):
    return ((np.full(4, number), number) for number in range(count))


def shown(batches):
    return [[{name: list(value.shape) for name, value in feed.items()} for feed in batch] for batch in batches]


def clones():
    # What a clone for testing has of a program, in front of minimize and behind it, and what it refuses.
    main = paddle.static.Program()
    exe, ones = paddle.static.Executor(paddle.CPUPlace()), {"f": np.ones((2, 4), "float32")}
    with paddle.static.program_guard(main, paddle.static.Program()), paddle.utils.unique_name.guard():
        f = paddle.static.data("f", [None, 4])
        loss = paddle.mean(compat.dropout(compat.fc(f, 3), 0.5))
        early = compat.clone_for_test(main)
        paddle.optimizer.SGD(0.1).minimize(loss)
        late = paddle.max(f)
        exe.run(paddle.static.default_startup_program())
    built_on, right = compat.clone(main), compat.clone(main)
    with paddle.static.program_guard(built_on, paddle.static.Program()):
        doubled = loss * 2.0
    with paddle.static.program_guard(right, paddle.static.Program()):
        inputs = (one for one in right.global_block().ops if one.name() == "pd_op.data" and one.attrs()["name"] == "f")
        largest = paddle.max(next(inputs).result(0) * 3)
    other = paddle.static.Program()
    with paddle.static.program_guard(other, paddle.static.Program()), paddle.utils.unique_name.guard():
        f = paddle.static.data("f", [None, 4])
        h = compat.fc(f, 3)
        cond = paddle.static.nn.cond(paddle.sum(h) > 0, lambda: compat.dropout(h, 0.9), lambda: h * 1e9)
        in_branch = compat.clone_for_test(other)
        paddle.optimizer.SGD(0.1).minimize(paddle.mean(cond))
    names = [one.name() for one in compat.clone_for_test(main).global_block().ops]
    signs = [{"f": ones["f"]}, {"f": -ones["f"]}]  # one of them takes the branch with dropout
    return {
        "late": refusal(lambda: exe.run(early, feed=ones, fetch_list=[loss, late])),
        "built on": refusal(lambda: exe.run(built_on, feed=ones, fetch_list=[doubled])),
        "built on its own": exe.run(right, feed=ones, fetch_list=[largest])[0].item(),
        "flow": refusal(lambda: compat.clone_for_test(other)),
        "learns": [name for name in names if name.endswith("_grad") or "sgd" in name],
        "same": [float(exe.run(early, feed=ones, fetch_list=loss)[0]) for _ in range(2)],
        "branch": [[exe.run(in_branch, feed=feed, fetch_list=[cond])[0].tolist() for feed in signs] for _ in range(2)],
        "own": exe.run(early, feed=ones, fetch_list=[early.global_block().ops[-1].result(0)])[0].tolist(),
    }


shared = paddle.ParamAttr(learning_rate=0.5)
compat.conv2d(image, 2, 3, param_attr=shared)
exe = paddle.static.Executor(paddle.CPUPlace())
own = paddle.static.Program()
with paddle.static.program_guard(own, paddle.static.Program()):
    value = paddle.static.data("inside", [None, 2])
    total = paddle.sum(value)
    inside = compat.from_generator([value], capacity=2, iterable=False)


def raised(function):
    try:
        function()
    except Exception as error:
        return error


def fetched_until_the_end():
    found = []
    for _ in range(2):
        inside.reset()
        inside.decorate_batch_generator(lambda: (np.full((1, 2), number, "float32") for number in range(5)))
        inside.start()
        try:
            while True:
                found.append(exe.run(own, fetch_list=[total])[0].item())
        except paddle.base.core.EOFException:
            pass
    return found


def failed():
    inside.reset()
    inside.set_batch_generator(lambda: (1 // 0 for _ in range(2))).start()
    error = raised(lambda: exe.run(own, fetch_list=[total]))
    inside.reset()
    return error


def dataset(path, command="cat"):
    made = compat.QueueDataset()
    made.init(batch_size=2, thread_num=2, use_var=[one, two], pipe_command=command, fs_name="")
    made.set_filelist([path])
    return made


def rows(text, command="cat"):
    open("rows.txt", "w").write(text)
    return [{name: array.tolist() for name, array in feed.items()} for feed in dataset("rows.txt", command).batches()]


def abandoned():
    batches = dataset("rows.txt", "yes '2 1 2 1 3'").batches()
    first = next(batches)
    batches.close()
    return first["one"].tolist()


one, two = paddle.static.data("one", [None, 2]), paddle.static.data("two", [None, 1], "int64")
loader = compat.from_generator(feed_list=[x, label], capacity=4)
fed = feeder.feed([([1, 2, 3, 4], 5), (np.ones((2, 2)), [6])])
print(json.dumps({
    "refused": {expression: refusal(expression) for expression in json.loads(sys.argv[1])},
    "fed by hand": exe.run(own, feed={"inside": np.ones((1, 2), "float32")}, fetch_list=[total])[0].item(),
    "fed inside": fetched_until_the_end(),
    "after the end": type(raised(lambda: exe.run(own, fetch_list=[total]))).__name__,
    "failed": str(failed()),
    "one input": isinstance(compat.read_file(compat.py_reader(2, [[-1, 1]], ["int64"])), paddle.pir.Value),
    "rows": rows("2 1 2 1 3\\n2 3 4 1 5\\n2 5 6 1 7\\n", "head -n 2"),
    "abandoned": abandoned(),
    "samples": shown(loader.set_sample_generator(lambda: samples(5), 2)),
    "all samples": shown(loader.set_sample_generator(lambda: samples(5), 2, drop_last=False)),
    "sample lists": shown(loader.set_sample_list_generator(paddle.batch(lambda: samples(3), 2))) * 2,
    "batches": shown(loader.set_batch_generator(lambda: [(np.ones((3, 2, 2)), np.ones((3, 1)))])()),
    "shared": [shared.name, shared.initializer is None],
    "clones": clones(),
    "fed": {name: [str(value.dtype), value.tolist()] for name, value in fed.items()},
    "group_norm": list(compat.group_norm(image, 3, param_attr=False, bias_attr=False).shape),
    "open": list(compat.flatten(paddle.static.data("o", [None, None, 3]), 2).shape),
}))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    printed = output_of(python("-c", _CASES, json.dumps(list(REFUSED))), cwd=tmp_path_factory.mktemp("cases"))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


@pytest.mark.parametrize("expression", REFUSED)
def test_what_cannot_be_done_is_refused_with_the_fix(expression: str, outcomes: dict[str, Any]) -> None:
    assert REFUSED[expression] in outcomes["refused"][expression]


def test_attributes_that_several_layers_are_given_stay_as_they_were(outcomes: dict[str, Any]) -> None:
    assert outcomes["shared"] == [None, True]


def test_a_clone_for_testing_has_what_was_there_without_what_learns(outcomes: dict[str, Any]) -> None:
    found = outcomes["clones"]
    assert "fetch_list[1]: the copy of the program does not have this value" in found["late"]
    assert "in a copy of a program, this computes with values of the program itself" in found["built on"]
    assert found["built on its own"] == 3.0
    assert "clone it before minimize" in found["flow"]
    assert found["learns"] == []
    assert found["same"][0] == found["same"][1] == found["own"]
    assert found["branch"][0] == found["branch"][1]


def test_feeder_gives_each_input_its_shape_and_dtype(outcomes: dict[str, Any]) -> None:
    assert outcomes["fed"] == {
        "x": ["float32", [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 1.0], [1.0, 1.0]]]],
        "label": ["int64", [[5], [6]]],
    }


def test_shapes_that_are_open_or_without_parameters_are_kept(outcomes: dict[str, Any]) -> None:
    assert outcomes["group_norm"] == [-1, 3, 8, 8]
    assert outcomes["open"] == [-1, 3]


def test_a_loader_inside_feeds_what_is_not_fed_by_hand_until_its_end(outcomes: dict[str, Any]) -> None:
    assert outcomes["fed by hand"] == 2.0
    assert outcomes["fed inside"] == [0.0, 2.0, 4.0, 6.0, 8.0] * 2
    assert outcomes["after the end"] == "EOFException"
    assert "integer division or modulo by zero" in outcomes["failed"]
    assert outcomes["one input"]


def test_dataset_makes_batches_of_lines(outcomes: dict[str, Any]) -> None:
    assert outcomes["rows"] == [{"one": [[1.0, 2.0], [3.0, 4.0]], "two": [[3], [5]]}]
    assert outcomes["abandoned"] == [[1.0, 2.0]] * 2, "a command that writes forever ends with its reader"


def test_loader_yields_a_list_with_one_feed_for_each_batch(outcomes: dict[str, Any]) -> None:
    def feed(samples: int) -> list[dict[str, list[int]]]:
        return [{"x": [samples, 2, 2], "label": [samples, 1]}]

    assert outcomes["samples"] == [feed(2), feed(2)]
    assert outcomes["all samples"] == [feed(2), feed(2), feed(1)]
    assert outcomes["sample lists"] == [feed(2), feed(1)] * 2
    assert outcomes["batches"] == [feed(3)]


_RUN_SNIPPETS = """
import json, sys
from pathlib import Path
import paddle
from tests.unit.port import fluid_numbers

paddle.enable_static()
figures = fluid_numbers.run_all(Path(sys.argv[1]).read_text())
Path(sys.argv[2]).write_text(json.dumps(figures))
"""


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The same figures from the ported snippets, of which nothing is left to do by hand; all in one process."""
    folder, ported = tmp_path_factory.mktemp("numbers"), port(fluid_numbers.module().encode(), "script.py")
    assert ported.marks == ()
    (folder / "script.py").write_bytes(ported.new)
    output_of(python("-c", _RUN_SNIPPETS, "script.py", "numbers.json"), cwd=folder)
    found: dict[str, Any] = json.loads((folder / "numbers.json").read_text())
    return found


def test_every_snippet_is_recorded() -> None:
    assert list(RECORDED) == sorted(name for name, _ in fluid_numbers.cases())


@pytest.mark.parametrize("name", sorted(RECORDED.keys() - fluid_numbers.RANDOM.keys() - fluid_numbers.NAMED.keys()))
def test_ported_snippet_gives_the_numbers_of_1_8(name: str, today: dict[str, Any]) -> None:
    now = today[name]
    assert not isinstance(now, str), now
    assert len(now) == len(RECORDED[name])
    for (shape, values), (old_shape, old_values) in zip(now, RECORDED[name], strict=True):
        assert shape == old_shape or (shape in SCALARS and old_shape in SCALARS)
        np.testing.assert_allclose(values, old_values, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", fluid_numbers.NAMED)
def test_parameters_have_the_names_of_1_8(name: str, today: dict[str, Any]) -> None:
    assert today[name] == RECORDED[name]


@pytest.mark.parametrize("name", fluid_numbers.RANDOM)
def test_ported_start_values_spread_as_in_1_8(name: str, today: dict[str, Any]) -> None:
    now = today[name]
    assert not isinstance(now, str), now
    for (spread, largest), (old_spread, old_largest) in zip(now, RECORDED[name], strict=True):
        assert spread == pytest.approx(old_spread, rel=0.08, abs=1e-7)
        assert largest == pytest.approx(old_largest, rel=0.25)
