"""fleet_train.compat: what it refuses, and how it feeds. Its numbers: test_numbers.py."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.support.processes import ROOT, clean_environ, python

_CASES = """
import json
import numpy as np
import paddle
from fleet_train import compat
from fleet_train.errors import ConversionError

paddle.enable_static()
x = paddle.static.data("x", [None, 2, 2])
label = paddle.static.data("label", [None, 1], "int64")
image = paddle.static.data("image", [None, 3, 8, 8])
feeder = compat.DataFeeder(feed_list=[x, label], place=None)


def refusal(function):
    try:
        function()
    except ConversionError as error:
        return str(error)


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
    "act": refusal(lambda: compat.conv2d(image, 4, 3, act="mish2")),
    "lod": refusal(lambda: compat.data("words", [1], lod_level=1)),
    "names": refusal(lambda: compat.DataFeeder(["x"])),
    "entries": refusal(lambda: feeder.feed([(1,)])),
    "size": refusal(lambda: feeder.feed([([1, 2, 3], 5)])),
    "last": refusal(lambda: compat.embedding(x, [4, 4])),
    "servers": refusal(lambda: compat.embedding_v2(label, [4, 4], is_distributed=True)),
    "range": refusal(lambda: compat.one_hot(label, 4, allow_out_of_range=True)),
    "seed": refusal(lambda: compat.dropout(x, 0.5, seed=7)),
    "implementation": refusal(lambda: compat.dropout(x, 0.5, dropout_implementation="both")),
    "pool": refusal(lambda: compat.pool2d(image, 2, "median")),
    "transpose": refusal(lambda: compat.conv2d_transpose(image, 4, output_size=16)),
    "outside": refusal(lambda: exe.run(own, fetch_list=[total])),
    "twice": refusal(lambda: (inside.set_batch_generator(lambda: []).start(), inside.start())),
    "fed by hand": exe.run(own, feed={"inside": np.ones((1, 2), "float32")}, fetch_list=[total])[0].item(),
    "fed inside": fetched_until_the_end(),
    "after the end": type(raised(lambda: exe.run(own, fetch_list=[total]))).__name__,
    "failed": str(failed()),
    "levels": refusal(lambda: compat.py_reader(2, [[-1, 1]], ["int64"], lod_levels=[1])),
    "one input": isinstance(compat.read_file(compat.py_reader(2, [[-1, 1]], ["int64"])), paddle.pir.Value),
    "line": refusal(lambda: rows("2 1 2 1\\n")),
    "words": refusal(lambda: rows("2 1 2 1 3 4\\n")),
    "letters": refusal(lambda: rows("2 1 a 1 3\\n")),
    "exit code": refusal(lambda: rows("", "cat; exit 3")),
    "no file": refusal(lambda: list(dataset("nowhere.txt").batches())),
    "rows": rows("2 1 2 1 3\\n2 3 4 1 5\\n2 5 6 1 7\\n", "head -n 2"),
    "abandoned": abandoned(),
    "hdfs": refusal(lambda: compat.QueueDataset().set_hdfs_config("hdfs://a", "b")),
    "setting": refusal(lambda: compat.InMemoryDataset().init(parse_ins_id=True)),
    "no setting": refusal(lambda: compat.InMemoryDataset().init(shuffle=True)),
    "shuffled": refusal(lambda: compat.QueueDataset().local_shuffle()),
    "unloaded": refusal(lambda: compat.InMemoryDataset().local_shuffle()),
    "kind": refusal(lambda: compat.DatasetFactory().create_dataset("Dataset")),
    "stock dataset": refusal(lambda: compat.train_from_dataset(exe, None, paddle.distributed.QueueDataset())),
    "period": refusal(lambda: compat.train_from_dataset(exe, own, dataset("rows.txt"), print_period=0)),
    "infos": refusal(lambda: compat.train_from_dataset(exe, own, dataset("rows.txt"), fetch_info=["loss"])),
    "handler": refusal(lambda: compat.infer_from_dataset(exe, None, compat.QueueDataset(), fetch_handler=print)),
    "list": refusal(lambda: compat.from_generator([x], return_list=True)),
    "unset": refusal(lambda: iter(compat.from_generator([x]))),
    "arrays": refusal(lambda: list(compat.from_generator([x, label]).set_batch_generator(lambda: [(1,)]))),
    "samples": shown(loader.set_sample_generator(lambda: samples(5), 2)),
    "all samples": shown(loader.set_sample_generator(lambda: samples(5), 2, drop_last=False)),
    "sample lists": shown(loader.set_sample_list_generator(paddle.batch(lambda: samples(3), 2))) * 2,
    "batches": shown(loader.set_batch_generator(lambda: [(np.ones((3, 2, 2)), np.ones((3, 1)))])()),
    "table": refusal(lambda: compat.embedding(label, [4, 4], param_attr=False)),
    "several": refusal(lambda: compat.embedding(label, [4, 4], param_attr=["a", "b"])),
    "weights": refusal(lambda: compat.fc([image, image], 3, param_attr=["a", "b", "c"])),
    "width": refusal(lambda: compat.fc(paddle.static.data("wide", [None, None]), 3)),
    "shared": [shared.name, shared.initializer is None],
    "clones": clones(),
    "fed": {name: [str(value.dtype), value.tolist()] for name, value in fed.items()},
    "group_norm": list(compat.group_norm(image, 3, param_attr=False, bias_attr=False).shape),
    "open": list(compat.flatten(paddle.static.data("o", [None, None, 3]), 2).shape),
}))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    environ = clean_environ({"PYTHONPATH": str(ROOT)})
    done = subprocess.run(
        python("-c", _CASES),
        cwd=tmp_path_factory.mktemp("cases"),
        env=environ,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("act", "act='mish2': not supported; use one of elu, exp, gelu"),
        ("lod", "lod_level=1: pad the sequences"),
        ("names", "give the input variables instead of their names ['x']"),
        ("entries", "a sample has 1 entries for 2 inputs"),
        ("outside", "exe.run: inside come from a loader: call its start() before"),
        ("twice", "the loader was started twice: call its reset()"),
        ("failed", "integer division or modulo by zero"),
        ("levels", "lod_levels=[1]: pad the sequences"),
        ("line", "rows.txt:1: not 2 slots of `count value ...` (float32, int64)"),
        ("words", "rows.txt:1: not 2 slots"),
        ("letters", "rows.txt:1: not 2 slots"),
        ("exit code", "rows.txt: pipe_command 'cat; exit 3' ended with exit code 3"),
        ("no file", "nowhere.txt: No such file or directory"),
        ("hdfs", "fs_name='hdfs://a': files are read from local or mounted folders"),
        ("setting", "InMemoryDataset: parse_ins_id=True: lines have no identifiers here"),
        ("no setting", "InMemoryDataset: unknown setting shuffle=True"),
        ("shuffled", "QueueDataset.local_shuffle: use an InMemoryDataset"),
        ("unloaded", "call load_into_memory() first"),
        ("kind", "create_dataset('Dataset'): use one of QueueDataset, InMemoryDataset"),
        ("stock dataset", "give a compat.QueueDataset or a compat.InMemoryDataset"),
        ("period", "a period of at least 1 batch"),
        ("infos", "fetch_info=['loss'] and print_period=100: give a name for each of the 0 values"),
        ("handler", "infer_from_dataset: fetch_handler is not supported"),
        ("list", "return_list=True is for dynamic mode"),
        ("unset", "set a generator first"),
        ("arrays", "a batch has 1 arrays for 2 inputs"),
        ("size", "a sample of 'x' has 3 values, its shape is [2, 2]"),
        ("last", "the last dimension of the indices must be 1, given [-1, 2, 2]"),
        ("servers", "is_distributed=True needs parameter servers"),
        ("range", "clip the indices first"),
        ("seed", "seed=7 for one layer no longer exists; use paddle.seed"),
        ("implementation", "use downgrade_in_infer or upscale_in_train"),
        ("pool", "pool_type='median'; use 'max' or 'avg'"),
        ("transpose", "give filter_size"),
        ("table", ": param_attr=False: it has no form without this parameter"),
        ("several", "2 attributes for one parameter; give one"),
        ("weights", "fc: param_attr lists 3 attributes for 2 inputs"),
        ("width", "the input [-1, -1] is open behind axis 1; fix its shape"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_fix(case: str, words: str, outcomes: dict[str, Any]) -> None:
    assert words in (outcomes[case] or "nothing was refused")


def test_attributes_that_several_layers_are_given_stay_as_they_were(outcomes: dict[str, Any]) -> None:
    assert outcomes["shared"] == [None, True]


def test_a_clone_for_testing_has_what_was_there_without_what_learns(outcomes: dict[str, Any]) -> None:
    found = outcomes["clones"]
    assert "fetch_list[1]: the test program does not have this value" in found["late"]
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
