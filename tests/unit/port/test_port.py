"""What `port` does beyond names: aliases, shadowing, guards, fetches, places, layout, a second run."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from fleet_train.errors import ConversionError
from fleet_train.port import Ported, port

FLEET = """\
import paddle.fluid as fluid
from paddle.fluid.incubate.fleet.collective import fleet
"""


def ported(text: str) -> Ported:
    return port(dedent(text).encode(), "train.py")


def new(text: str) -> str:
    return ported(text).new.decode()


def whats(text: str) -> list[str]:
    return [mark.what for mark in ported(text).marks]


@pytest.mark.parametrize(
    ("imported", "used"),
    [
        ("import paddle.fluid as fluid", "fluid.layers.relu"),
        ("import paddle.fluid", "paddle.fluid.layers.relu"),
        ("from paddle import fluid", "fluid.layers.relu"),
        ("from paddle import fluid as F", "F.layers.relu"),
        ("import paddle.fluid.layers as L", "L.relu"),
        ("from paddle.fluid import layers", "layers.relu"),
        ("from paddle.fluid.layers import relu as r", "r"),
        ("from paddle.fluid.layers.nn import relu", "relu"),
    ],
)
def test_an_alias_is_resolved(imported: str, used: str) -> None:
    assert new(f"{imported}\ny = {used}(x)\n") == "import paddle\ny = paddle.nn.functional.relu(x)\n"


def test_imports_that_are_not_paddles_keep_their_place_and_comments() -> None:
    text = """\
        # Copyright
        import os
        # the framework
        import paddle.fluid as fluid
        import numpy as np  # arrays

        y = fluid.layers.mean(np.ones(3))
    """
    expected = """\
        # Copyright
        import os
        # the framework
        import paddle
        import numpy as np  # arrays

        y = paddle.mean(np.ones(3))
    """
    assert new(text) == dedent(expected)


def test_layout_and_comments_inside_a_call_stay() -> None:
    text = """\
        import paddle.fluid as fluid
        y = fluid.layers.matmul(x=x,  # features
                            y = w,
                            transpose_y=True,
                            alpha=1.0,
                            )  # done
    """
    assert new(text).splitlines()[1:] == [
        "y = paddle.matmul(x=x,  # features",
        "                    y = w,",
        "                    transpose_y=True,",
        "                    )  # done",
    ]


def test_a_name_that_may_mean_something_else_is_marked() -> None:
    text = """\
        import paddle.fluid.layers as L
        if fast:
            L = my_layers
        y = L.relu(x)
    """
    result = ported(text)
    assert [mark.what for mark in result.marks] == ["an import of old Paddle", "fluid.layers.relu"]
    assert "y = L.relu(x)" in result.new.decode()


def test_a_parameter_of_that_name_is_not_paddle() -> None:
    text = "import paddle.fluid as fluid\n\n\ndef f(fluid):\n    return fluid.layers.relu(1)\n"
    assert "return fluid.layers.relu(1)" in new(text)
    assert whats(text) == []


def test_nothing_is_written_where_paddle_is_the_name_of_something_else() -> None:
    text = "import paddle.fluid as fluid\n\n\ndef f(paddle):\n    return fluid.layers.relu(paddle)\n"
    assert "return fluid.layers.relu(paddle)" in new(text)
    assert "rename that" in ported(text).marks[1].do


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
    result = ported(f"import paddle.fluid as fluid\ny = {line}\n")
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
        ("fluid.layers.data('x', shape)", "compat.data('x', shape)"),
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
        ("fluid.layers.fc(input=x, **options)", "compat.fc(input=x, **options)"),
        (
            "fluid.default_main_program().clone(for_test=True)",
            "compat.clone_for_test(paddle.static.default_main_program())",
        ),
        ("main.clone(True)", "compat.clone_for_test(main)"),
        ("main.clone(for_test=False)", "main.clone()"),
        ("main_model.clone(True)", "main_model.clone(True)"),
        ("main.clone()", "main.clone()"),
        ("fluid.layers.utils.map_structure(f, x)", "paddle.utils.layers_utils.map_structure(f, x)"),
        ("fluid.require_version('1.8')", "paddle.utils.require_version('1.8')"),
    ],
)
def test_a_call_becomes_what_keeps_its_meaning(old: str, now: str) -> None:
    assert new(f"import paddle.fluid as fluid\ny = {old}\n").splitlines()[-1] == f"y = {now}"


def test_a_marked_line_keeps_its_import_and_the_others_go() -> None:
    text = """\
        import paddle.fluid as fluid
        import paddle.fluid.layers as L
        reader = fluid.layers.double_buffer(reader)
        y = L.relu(x)
    """
    lines = new(text).splitlines()
    assert lines[1:3] == ["import paddle.fluid as fluid", "import paddle"]
    assert lines[3].startswith("# TODO(fleet_train): fluid.layers.double_buffer -> paddle.io.DataLoader")
    assert lines[4:] == ["reader = fluid.layers.double_buffer(reader)", "y = paddle.nn.functional.relu(x)"]


def test_marks_are_at_the_lines_of_the_ported_script() -> None:
    result = ported("import paddle.fluid as fluid\nx = 1\nif fluid.layers.Switch():\n    pass\n")
    line = result.new.decode().splitlines()[result.marks[-1].line - 1]
    assert line == "if fluid.layers.Switch():"


def test_a_star_import_is_marked() -> None:
    assert whats("from paddle.fluid.layers import *\ny = relu(x)\n") == ["from paddle.fluid.layers import *"]


def test_names_of_packages_below_a_marked_one_are_marked_alike() -> None:
    assert "dynamic mode" in ported("from paddle.fluid.dygraph.nn import Linear\nLinear(1)\n").marks[-1].do


def test_a_script_that_runs_programs_says_that_it_is_static() -> None:
    text = "import paddle.fluid as fluid\nimport mine\nexe = fluid.Executor(fluid.CPUPlace())\n"
    assert new(text) == (
        "import paddle\nimport mine\n\npaddle.enable_static()\nexe = paddle.static.Executor(paddle.CPUPlace())\n"
    )


def test_a_module_of_layers_and_a_dynamic_script_do_not() -> None:
    assert "enable_static" not in new("import paddle.fluid as fluid\n\n\ndef f(x):\n    return fluid.layers.relu(x)\n")
    dynamic = "import paddle.fluid as fluid\nwith fluid.dygraph.guard():\n    fluid.Executor()\n"
    assert "enable_static" not in new(dynamic)
    newer = "import paddle\nfrom paddle.distributed import fleet\nfleet.init()\nfleet.distributed_model(m)\n"
    assert "\npaddle.enable_static()\n" not in new(newer)
    assert whats(newer) == ["fleet.distributed_model"]


@pytest.mark.parametrize(
    ("condition", "rest"),
    [
        ("fleet.worker_index() == 0", ""),
        ("0 == fleet.worker_index()", ""),
        ("fleet.is_first_worker()", ""),
        ("trainer_id == 0", ""),
        ("not args.rank", ""),
        ('int(os.getenv("PADDLE_TRAINER_ID", "0")) == 0', ""),
        ("rank == 0 and step % 10 == 0", "step % 10 == 0"),
        ("step % 10 == 0 and fleet.worker_index() == 0", "step % 10 == 0"),
    ],
)
def test_a_save_loses_its_rank_guard(condition: str, rest: str) -> None:
    text = f"{FLEET}# save\nif {condition}:\n    fluid.io.save_persistables(exe, 'out')\n"
    save = "fleet.save_persistables(exe, 'out')"
    assert new(text).endswith(f"# save\nif {rest}:\n    {save}\n" if rest else f"# save\n{save}\n")


@pytest.mark.parametrize(
    "text",
    [
        "if rank == 0:\n    os.makedirs('out')\n    fluid.io.save_persistables(exe, 'out')\n",
        "if rank == 0:\n    fluid.io.save_persistables(exe, 'out')\nelse:\n    wait()\n",
        "if local_rank == 0:\n    fluid.io.save_persistables(exe, 'out')\n",
        "if rank == 1:\n    fluid.io.save_persistables(exe, 'out')\n",
        "if rank == 0 or last:\n    fluid.io.save_persistables(exe, 'out')\n",
    ],
)
def test_a_guard_around_more_than_saves_stays_and_is_marked(text: str) -> None:
    result = ported(FLEET + text)
    assert text.splitlines()[0] in result.new.decode()
    assert [mark.what for mark in result.marks] == ["a save below a rank's condition"]


def test_another_condition_stays() -> None:
    text = f"{FLEET}if epoch == 0:\n    fluid.io.save_persistables(exe, 'out')\n"
    assert "if epoch == 0:" in new(text)
    assert whats(text) == []


def test_outside_of_fleet_scripts_a_save_and_a_place_stay_what_they_are() -> None:
    text = "import paddle.fluid as fluid\nif rank == 0:\n    fluid.io.save_params(exe)\np = fluid.CUDAPlace(0)\n"
    assert "if rank == 0:" in new(text)
    assert "paddle.CUDAPlace(0)" in new(text)


def test_fetching_by_name_becomes_fetching_the_value() -> None:
    text = """\
        import paddle.fluid as fluid
        fetches = [loss.name, "mean_0.tmp_0"]
        fetches.append(acc.name)
        others.append(acc.name)
        exe.run(program, fetch_list=fetches)
        exe.run(program, fetch_list=[loss.name, lr])
        exe.run(program, feed, [loss.name])
        exe.run(program, fetch_list=[one.name for one in values])
    """
    lines = [line for line in new(text).splitlines() if "TODO" not in line]
    assert lines == [
        'fetches = [loss, "mean_0.tmp_0"]',
        "fetches.append(acc)",
        "others.append(acc.name)",
        "exe.run(program, fetch_list=fetches)",
        "exe.run(program, fetch_list=[loss, lr])",
        "exe.run(program, feed, [loss])",
        "exe.run(program, fetch_list=[one for one in values])",
    ]
    assert whats(text) == ['fetching "mean_0.tmp_0"']


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("loss[0]", "np.atleast_1d(loss)[0]"),
        ("np.array(acc)[0]", "np.atleast_1d(np.array(acc))[0]"),
        ("ret[1][0]", "np.atleast_1d(ret[1])[0]"),
        ("np.array(ret[0])[0]", "np.atleast_1d(np.array(ret[0]))[0]"),
        ("one[0]", "np.atleast_1d(one)[0]"),
        ("exe.run(p, feed, [a])[0][0]", "np.atleast_1d(exe.run(p, feed, [a])[0])[0]"),
    ],
)
def test_the_first_element_of_a_fetched_value_is_that_of_1_8_for_scalars_too(old: str, now: str) -> None:
    text = """\
        import numpy as np
        import paddle
        loss, acc = exe.run(program, fetch_list=[a, b])
        ret = exe.run(program, fetch_list=[a, b])
        one = ret[1]
    """
    once = ported(dedent(text) + f"print({old})\n")
    assert once.new.decode().splitlines()[-1] == f"print({now})"
    assert not port(once.new, "train.py").changed


@pytest.mark.parametrize("used", ["ret[0]", "other[0]", "other[0][0]", "loss[1]", "rows[0][0]", "ret[i][0]"])
def test_other_first_elements_stay(used: str) -> None:
    text = f"""\
        import numpy as np
        import paddle
        loss, acc = exe.run(program, fetch_list=[a, b])
        ret = exe.run(program, fetch_list=[a, b])
        rows = table.run(program)
        loss[0] = {used}
    """
    assert not ported(text).changed


def test_without_numpy_the_first_element_of_a_fetched_value_is_marked() -> None:
    text = "import paddle\n(loss,) = exe.run(program, fetch_list=[a])\nprint(loss[0], loss.item())\n"
    assert whats(text) == ["`loss[0]` of a fetched value"]


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ('os.environ["FLAGS_enable_pir_api"] = "0"', 'os.environ["FLAGS_enable_pir_api"] = "1"'),
        ("os.environ.setdefault('FLAGS_enable_pir_api', '0')", "os.environ.setdefault('FLAGS_enable_pir_api', '1')"),
        ('os.environ.update(FLAGS_enable_pir_api="False")', 'os.environ.update(FLAGS_enable_pir_api="1")'),
        (
            'paddle.set_flags({"FLAGS_enable_pir_api": 0, "x": 0})',
            'paddle.set_flags({"FLAGS_enable_pir_api": 1, "x": 0})',
        ),
        ("flags = {'FLAGS_enable_pir_api': False}", "flags = {'FLAGS_enable_pir_api': True}"),
    ],
)
def test_the_old_ir_is_not_switched_on(old: str, now: str) -> None:
    assert new(f"import os\nimport paddle\n{old}\n").splitlines()[-1] == now
    assert whats(f"import os\nimport paddle\n{old}\n") == []


def test_a_switch_of_the_ir_that_cannot_be_read_is_marked_and_reading_it_is_not() -> None:
    text = """\
        import paddle
        os.environ["FLAGS_enable_pir_api"] = chosen
        os.environ["FLAGS_enable_pir_api"] = "1"
        os.environ["FLAGS_other"] = "0"
        old = os.environ.get("FLAGS_enable_pir_api", "0")
        paddle.get_flags(["FLAGS_enable_pir_api"])
    """
    assert whats(text) == ["FLAGS_enable_pir_api=chosen"]


def test_what_a_block_no_longer_has_is_marked() -> None:
    text = """\
        import paddle
        block = main.global_block()
        v = block.var("x"), main.global_block().var("y"), program.block(0).has_var("z")
        w = paddle.static.global_scope().var("w"), x.var(), np.var(x), scope.var("x"), block.ops, table.block(0).vars
        for one in fluid_program.current_block().vars:
            main.global_block().all_parameters()
    """
    assert whats(text) == [
        "block.var",
        "main.global_block().var",
        "program.block(0).has_var",
        "fluid_program.current_block().vars",
    ]


def test_parameters_are_given_themselves_and_not_by_name() -> None:
    text = """\
        import paddle.fluid as fluid
        trained = [p.name for p in parameters if p.trainable]
        trained.append(w.name)
        printed = [p.name for p in parameters]
        opt.minimize(loss, parameter_list=trained)
        opt.minimize(loss, startup, [w.name], {"b"})
        fluid.append_backward(loss, parameter_list=[w.name], no_grad_set=set())
        opt = paddle.optimizer.SGD(0.1, parameters=net.parameters())
        draw(parameters=["w"], names=[w.name])
    """
    assert [line for line in new("import paddle\n" + dedent(text)).splitlines()[1:] if "TODO" not in line] == [
        "trained = [p for p in parameters if p.trainable]",
        "trained.append(w)",
        "printed = [p.name for p in parameters]",
        "opt.minimize(loss, parameters=trained)",
        'opt.minimize(loss, startup, [w], {"b"})',
        "paddle.static.append_backward(loss, parameter_list=[w], no_grad_set=set())",
        "opt = paddle.optimizer.SGD(0.1, parameters=net.parameters())",
        'draw(parameters=["w"], names=[w.name])',
    ]
    assert whats(text) == ['the parameter "b"']


def test_fields_that_a_build_strategy_no_longer_has_are_marked() -> None:
    text = """\
        import paddle.fluid as fluid
        build = fluid.BuildStrategy()
        build.remove_unnecessary_lock = True
        build.memory_optimize = True
        other.remove_unnecessary_lock = True
    """
    assert whats(text) == ["BuildStrategy.remove_unnecessary_lock"]
    assert whats(FLEET + dedent(text)) == [], "ours takes the fields of 1.8"


@pytest.mark.parametrize(
    ("imported", "used", "now"),
    [
        ("from paddle.incubate.distributed.fleet.collective import fleet", "fleet.init(r)", "fleet.init(r)"),
        ("import paddle.incubate.distributed.fleet.collective as c", "c.fleet.init(r)", "fleet.init(r)"),
        (
            "from paddle.incubate.distributed.fleet import role_maker",
            "role_maker.PaddleCloudRoleMaker(is_collective=True)",
            "role_maker.PaddleCloudRoleMaker(is_collective=True)",
        ),
    ],
)
def test_fleet_below_incubate_is_ours(imported: str, used: str, now: str) -> None:
    head = now.partition(".")[0]
    assert new(f"{imported}\nx = {used}\n").splitlines()[-2:] == [f"from fleet_train import {head}", f"x = {now}"]


def test_what_paddle_3_still_has_below_incubate_stays() -> None:
    text = "from paddle.incubate.distributed.fleet import recompute_hybrid\ny = recompute_hybrid(c, f, x)\n"
    assert not ported(text).changed


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("paddle.static.nn.fc(x, 3, weight_attr=w)", "compat.fc(x, 3, param_attr=w)"),
        ("paddle.static.nn.fc(x=x, size=3, activation='relu')", "compat.fc(input=x, size=3, act='relu')"),
        ("paddle.create_parameter([3], 'float32')", "compat.create_parameter([3], 'float32')"),
    ],
)
def test_layers_of_2_x_count_their_names_anew_under_a_guard(old: str, now: str) -> None:
    assert new(f"import paddle\ny = {old}\n") == f"import paddle\nfrom fleet_train import compat\ny = {now}\n"


def test_auc_of_2_x_is_marked_and_the_metric_is_not() -> None:
    assert whats("import paddle\nx = paddle.static.auc(p, y)\nm = paddle.metric.Auc()\n") == ["paddle.static.auc"]


def test_a_compiled_program_is_the_program() -> None:
    text = "import paddle.fluid as fluid\np = fluid.CompiledProgram(main).with_data_parallel(loss_name=loss.name)\n"
    assert new(text).splitlines()[-1] == "p = main"
    assert whats(text) == []
    settings = text.replace("loss_name=loss.name", "build_strategy=b")
    assert whats(settings) == ["CompiledProgram with build_strategy"]


def test_a_place_before_init_is_marked() -> None:
    early = f"{FLEET}place = fluid.CUDAPlace(0)\nfleet.init(role)\n"
    late = f"{FLEET}fleet.init(role)\nplace = fluid.CUDAPlace(0)\n"
    assert whats(early) == ["fleet.place() before fleet.init"]
    assert whats(late) == []
    assert "place = fleet.place()" in new(late)


def test_fleet_of_2_x_is_ours_by_the_same_names() -> None:
    text = """\
        from paddle.distributed import fleet
        strategy = fleet.DistributedStrategy()
        fleet.init(is_collective=True, strategy=strategy)
        fleet.util.barrier()
        opt = fleet.distributed_optimizer(opt)
        fleet.stop_worker()
    """
    assert new(text).splitlines() == [
        "from fleet_train import DistributedStrategy, fleet",
        "strategy = DistributedStrategy()",
        "fleet.init(is_collective=True, strategy=strategy)",
        "fleet.util.barrier()",
        "opt = fleet.distributed_optimizer(opt)",
        "fleet.stop_worker()",
    ]


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
    assert len(whats(f"import paddle\n{line}\n")) == 1
    assert whats(line + "\n") == [], "a script without Paddle is not looked at"


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("exe.train_from_dataset(main, dataset)", "compat.train_from_dataset(exe, main, dataset)"),
        (
            "self._exe.infer_from_dataset(dataset=d, fetch_list=[loss.name])",
            "compat.infer_from_dataset(self._exe, dataset=d, fetch_list=[loss])",
        ),
    ],
)
def test_training_from_a_dataset_is_handed_to_compat(old: str, now: str) -> None:
    once = ported(f"import paddle\n{old}\n")
    assert sorted(once.new.decode().splitlines()) == sorted(["import paddle", "from fleet_train import compat", now])
    assert once.marks == ()
    assert not port(once.new, "train.py").changed


@pytest.mark.parametrize(
    ("imported", "used"),
    [
        ("from paddle.distributed.fleet import metrics", "metrics.auc"),
        ("import paddle.distributed.fleet.metrics.metric as m", "m.auc"),
        ("import paddle.distributed.fleet as fleet", "fleet.metrics.auc"),
    ],
)
def test_metrics_of_fleet_are_ours(imported: str, used: str) -> None:
    text = f"{imported}\nvalue = {used}(positive, negative)\n"
    assert new(text) == "from fleet_train import fleet\nvalue = fleet.metrics.auc(positive, negative)\n"


def test_training_from_a_dataset_is_marked_where_compat_is_another_thing() -> None:
    assert len(whats("import paddle\nimport compat\nexe.train_from_dataset(main, dataset)\n")) == 1


def test_a_second_run_changes_nothing() -> None:
    text = f"""{FLEET}
place = fluid.CUDAPlace(0)
fleet.init(role)
reader = fluid.layers.double_buffer(reader)
test = fluid.default_main_program().clone(for_test=True)
(loss,) = exe.run(feed=f, fetch_list=[loss.name])
print(loss[0])
if rank == 0:
    print('saving')
    fluid.io.save_persistables(exe, 'out')
"""
    once = ported(text)
    twice = port(once.new, "train.py")
    assert once.changed
    assert not twice.changed
    assert twice.marks == once.marks
    assert len(once.marks) == 5


def test_marks_are_placed_above_any_kind_of_statement() -> None:
    text = """\
        import paddle.fluid as fluid
        if a: fluid.layers.While(1)
        elif fluid.layers.While(2):
            pass
        else: fluid.layers.While(3)
        try:
            pass
        except fluid.layers.Stop:
            pass
        @fluid.dygraph.no_grad
        def f(x=fluid.layers.split): return [fluid.layers.While(i) for i in x]
        class A(fluid.dygraph.Layer):
            y = 1; z = fluid.layers.While(4)
        del fluid
    """
    once = ported(text)
    ast.parse(once.new)
    assert [mark.what for mark in once.marks] == [
        "an import of old Paddle",
        "fluid.layers.While",
        "fluid.layers.While",
        "fluid.layers.While",
        "fluid.layers.Stop",
        "fluid.dygraph.no_grad",
        "fluid.layers.split",
        "fluid.layers.While",
        "fluid.dygraph.Layer",
        "fluid.layers.While",
        "paddle.fluid",
    ]
    assert not port(once.new, "train.py").changed


def test_an_import_inside_a_function_goes_with_its_last_use() -> None:
    text = "def f():\n    from paddle.fluid import optimizer\n    return optimizer.SGD(0.1)\n"
    assert new(text) == "import paddle\ndef f():\n    return paddle.optimizer.SGD(0.1)\n"


def test_a_todo_line_on_the_first_statement_is_not_repeated() -> None:
    once = ported("# mine\n\nimport paddle.fluid as fluid\nfluid.layers.double_buffer()\n")
    assert not port(once.new, "train.py").changed


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_bytes_outside_of_what_changes_stay(newline: str) -> None:
    text = newline.join(
        ["# -*- coding: utf-8 -*-", "import paddle.fluid as fluid", "y = fluid.layers.mean('中')  # é", ""]
    )
    expected = text.replace("paddle.fluid as fluid", "paddle").replace("fluid.layers", "paddle")
    assert port(text.encode(), "train.py").new == expected.encode()


def test_a_script_without_paddle_is_left_alone() -> None:
    text = b"def run( x ):\n  return x . name\n"
    assert port(text, "other.py").new == text


@pytest.mark.parametrize(
    ("text", "line"), [("x = 1\ny = (\n", 2), ("import paddle\nprint 'loss'\n", 2), ("# coding: nonsense\n", 1)]
)
def test_what_is_not_python_3_is_named_with_file_and_line(text: str, line: int) -> None:
    with pytest.raises(ConversionError, match=rf"^train\.py:{line}: not ") as error:
        port(text.encode(), "train.py")
    assert "\n" not in str(error.value)
    assert ("2to3" in str(error.value)) == ("print" in text)
