"""What a table of names cannot say: calls whose new form depends on more, methods of any object, flags, rank guards."""

from __future__ import annotations

import re
from collections.abc import Callable

import libcst as cst

from fleet_train.port import training
from fleet_train.port.calls import Undecided, as_keyword, dotted, keyword, keyword_of, positional, source
from fleet_train.port.facts import Kind, Transformer, is_block, parameter_arguments
from fleet_train.port.index import canonical

# Calls of functions.


def layers_data(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
    """Rewrite ``fluid.layers.data``: a shape in plain numbers tells whether a batch dimension comes in front."""
    del script
    names = ("name", "shape", "append_batch_size", "dtype", "lod_level", "type", "stop_gradient")
    given: dict[str, cst.Arg] = {}
    for index, (old, new) in enumerate(zip(original.args, updated.args, strict=True)):
        name = old.keyword.value if old.keyword else names[index] if index < len(names) else ""
        if old.star or name not in names:
            return None
        given[name] = new
    texts = {name: source(argument.value) for name, argument in given.items()}
    if texts.get("lod_level", "0") != "0":
        raise Undecided(f"lod_level={texts['lod_level']}: there are no sequences with levels of detail today")
    if not _is_plain(given.get("shape")) or texts.get("stop_gradient", "True") != "True" or "type" in texts:
        return None
    if texts.get("append_batch_size", "True") not in ("True", "False"):
        return None
    value = cst.ensure_type(given["shape"].value, cst.List)
    is_open = any(source(element.value).startswith(("-", "None")) for element in value.elements)
    if texts.get("append_batch_size", "True") == "True" and not is_open:
        first = cst.Element(cst.Name("None"), comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        value = value.with_changes(elements=[first, *value.elements])
    kept = [
        argument.with_changes(value=value) if name == "shape" else argument
        for name, argument in given.items()
        if name in ("name", "shape", "dtype")
    ]
    # Another parameter stands in front of dtype today: it may not stay positional.
    kept = [*kept[:2], *(entry if entry.keyword else as_keyword(entry, "dtype") for entry in kept[2:])]
    end = updated.args[-1]
    kept[-1] = kept[-1].with_changes(comma=end.comma, whitespace_after_arg=end.whitespace_after_arg)
    return updated.with_changes(func=dotted("paddle.static.data"), args=kept)


def static_data(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
    """Rewrite ``paddle.static.data`` of 2.x, which stays unless it has levels of detail."""
    del script
    for given in (keyword(original, "lod_level"), *positional(original)[3:4]):
        if given is not None and source(given.value) != "0":
            raise Undecided(f"lod_level={source(given.value)}: pad the sequences and feed their lengths")
    return updated


def _is_plain(shape: cst.Arg | None) -> bool:
    if shape is None or not isinstance(shape.value, cst.List):
        return False
    sizes = [source(element.value) for element in shape.value.elements]
    return all(size.lstrip("-").isdigit() or size == "None" for size in sizes)


def truncated_normal(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
    """Write 1.8's truncation at two deviations from the mean: today's default is -2 and 2 whatever the deviation."""
    del script
    given = dict(zip(("loc", "scale", "seed"), positional(original), strict=False))
    given |= {keyword_of(argument): argument for argument in original.args if argument.keyword is not None}
    if any(argument.star for argument in original.args) or not given.keys() <= {"loc", "scale", "seed"}:
        return None
    loc, scale = (source(given[name].value) if name in given else "" for name in ("loc", "scale"))
    if not scale or source(given["seed"].value if "seed" in given else cst.Integer("0")) != "0":
        return None
    if "(" in loc + scale:
        raise Undecided(f"`{loc or scale}` would be computed twice; a and b are its limits")
    mean, spread = loc or "0.0", scale if re.fullmatch(r"[\w.\-]+", scale) else f"({scale})"
    text = f"f(mean={mean}, std={scale}, a={mean} - 2 * {spread}, b={mean} + 2 * {spread})"
    if mean in ("0.0", "0"):
        text = f"f(mean={mean}, std={scale}, a=-2 * {spread}, b=2 * {spread})"
    call = cst.ensure_type(cst.parse_expression(text), cst.Call)
    return updated.with_changes(func=dotted("paddle.nn.initializer.TruncatedNormal"), args=call.args)


def cuda_place(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
    """Give every rank its own device in a fleet script, on CPUs too; else the place stays."""
    if not script.facts.is_fleet_script:
        return None
    mark_early_place(script, original)
    return updated.with_changes(func=dotted("fleet.place"), args=[])


def mark_early_place(script: Transformer, original: cst.Call) -> None:
    """A mark at ``fleet.place()`` in front of ``fleet.init``."""
    here, line = id(script.scope_of(original)), script.line_of(original)
    lines = [init for scope, init in script.facts.init_lines if scope == here]
    if lines and min(lines) > line:
        script.mark(original, "fleet.place() before fleet.init", "move fleet.init(...) above this line")


def compiled_program(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
    """Put the program itself in its place: there is one process per device, and the executor compiles what it runs."""
    if not updated.args or updated.args[0].star or updated.args[0].keyword is not None:
        raise Undecided("the program is not the first argument")
    outer = script.parent_of(original)
    call = script.parent_of(outer) if isinstance(outer, cst.Attribute) else None
    settings = [*original.args[1:], *(call.args if isinstance(call, cst.Call) else ())]
    named = [keyword_of(argument) or "a setting" for argument in settings]
    if lost := [name for name in named if name not in ("loss_name", "places")]:
        script.mark(original, f"CompiledProgram with {', '.join(lost)}", "settings belong to DistributedStrategy")
    return updated.args[0].value


Special = Callable[[Transformer, cst.Call, cst.Call], cst.BaseExpression | None]
"""A rewriting: (script, original call, updated call) -> the new call; None: as the table says. Raises Undecided."""
CALLS: dict[str, Special] = {
    "paddle.fluid.layers.data": layers_data,
    "paddle.static.data": static_data,
    "paddle.fluid.CUDAPlace": cuda_place,
    "paddle.fluid.initializer.TruncatedNormal": truncated_normal,
    "paddle.CUDAPlace": cuda_place,
    "paddle.fluid.CompiledProgram": compiled_program,
    "paddle.static.CompiledProgram": compiled_program,
}


# Method calls that are Paddle's for any object name: ``exe.run``, ``program.clone``, ``opt.minimize``.

_BY_HAND = {
    "all_parameters": "program.global_block().all_parameters()",
    "train_from_dataset": "compat.train_from_dataset(exe, program, dataset, ...), if this is an executor",
    "infer_from_dataset": "compat.infer_from_dataset(exe, program, dataset, ...), if this is an executor",
    "_global_learning_rate": "optimizer.get_lr(), a number to print",
    "with_data_parallel": "delete it: the program itself runs, one process per device",
}
_FROM_DATASET = ("train_from_dataset", "infer_from_dataset")
_DATASET_ARGUMENTS = set("program dataset scope thread debug fetch_list fetch_info print_period fetch_handler".split())
_CLONE = "compat.clone_for_test(program) for a program for testing, compat.clone(program) for one for training"
_BY_STRING: dict[Kind, tuple[str, str]] = {
    "fetch list": ("fetching", "fetch the Python variable: values have no names today"),
    "parameter list": (
        "the parameter",
        "the parameter itself: [p for p in program.global_block().all_parameters() if p.name in names]",
    ),
}
# What a block of today's programs does not have.
_OF_BLOCKS = {
    "var": "keep the Python variable; a parameter's value: paddle.static.global_scope().find_var(name).get_tensor()",
    "_var_recursive": "keep the Python variable",
    "has_var": "keep the Python variable",
    "vars": "program.list_vars()",
    "create_var": "paddle.static.data, or the function that computes the value",
    "create_parameter": "compat.create_parameter",
    "append_op": "the function of paddle that does it",
}


def of_any_object(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
    """``updated`` with what can be done; marks for the rest."""
    function = original.func
    if not isinstance(function, cst.Attribute):
        return updated
    method, meaning = function.attr.value, script.meaning_of(function)
    if meaning is not None and method in ("clone", "minimize", "backward") and _is_function(meaning.name):
        return updated
    if method == "with_data_parallel" and _was_compiled(script, function.value):
        return updated.func.value if isinstance(updated.func, cst.Attribute) else updated
    if method == "all_parameters" and source(function.value).endswith("global_block()"):
        return updated
    if method in _FROM_DATASET:
        if meaning is not None and meaning.name.startswith("fleet_train."):
            return updated
        if (call := _from_dataset(script, original, updated)) is not None:
            return call
    if method in _BY_HAND:
        script.mark(original, f"{source(function.value).strip()}.{method}", _BY_HAND[method])
    elif method == "clone":
        return _clone(script, original, updated)
    elif method == "run":
        return _fetching(script, original, updated, keyword(original, "fetch_list") or _third(original))
    elif method in ("minimize", "backward"):
        return training.minimize(script, original, updated)
    elif method == "append" and (
        script.holds("fetch list", function.value) or script.holds("parameter list", function.value)
    ):
        return updated.with_changes(
            args=[argument.with_changes(value=_value(argument.value)) for argument in updated.args]
        )
    return updated


def _is_function(name: str) -> bool:
    """Whether this is a function of a module: ours, Fleet's own ``minimize``, or one that is not of Paddle."""
    of_paddle = name.split(".")[0] in ("paddle", "fleetx", "fleet_train")
    return not of_paddle or name.startswith("fleet_train.compat.") or canonical(name).endswith("fleet.minimize")


def _from_dataset(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.Call | None:
    """Rewrite ``exe.train_from_dataset(...)`` as ``compat``'s function; None if it may be another object's."""
    named = {keyword_of(argument) for argument in original.args if argument.keyword is not None}
    if any(argument.star for argument in original.args) or not named <= _DATASET_ARGUMENTS:
        return None
    if "dataset" not in named and len(original.args) - len(named) < 2:
        return None
    if not script.may_write("compat", original):
        return None
    script.needed.add("compat")
    function = cst.ensure_type(updated.func, cst.Attribute)
    executor = cst.Arg(function.value, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
    call = updated.with_changes(func=dotted(f"compat.{function.attr.value}"), args=[executor, *updated.args])
    return _fetching(script, original, call, keyword(original, "fetch_list"), shift=1)


def without_array(node: cst.BaseExpression) -> cst.BaseExpression:
    """``x`` of ``np.array(x)``."""
    if isinstance(node, cst.Call) and len(node.args) == 1 and source(node.func) in _ARRAYS:
        return node.args[0].value
    return node


_ARRAYS = {f"{module}.{name}" for module in ("np", "numpy") for name in ("array", "asarray")}


def mark_block(script: Transformer, node: cst.Attribute) -> None:
    """A mark where a block is asked for what it no longer has."""
    name = node.attr.value
    if name in _OF_BLOCKS and (is_block(node.value) or script.holds("block", node.value)):
        script.mark(node, f"{source(node.value)}.{name}", _OF_BLOCKS[name])


def _clone(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
    """Rewrite ``main.clone()`` and ``main.clone(for_test=True)``."""
    text, function = _literal(original, "for_test"), updated.func
    if keyword(original, "for_test") is None and not script.clones_program(original):
        return updated
    if script.facts.is_dynamic and not text:
        return updated
    if text not in ("True", "False", "") or not isinstance(function, cst.Attribute):
        script.mark(original, f"clone(for_test={text})", _CLONE)
        return updated
    if not script.may_write("compat", original):
        script.mark(original, f"clone({text})", _CLONE)
        return updated
    script.needed.add("compat")
    name = "compat.clone_for_test" if text == "True" else "compat.clone"
    return updated.with_changes(func=dotted(name), args=[cst.Arg(function.value)])


def _was_compiled(script: Transformer, node: cst.BaseExpression) -> bool:
    meaning = script.meaning_of(node.func) if isinstance(node, cst.Call) else None
    return meaning is not None and meaning.name.endswith(".CompiledProgram")


def _literal(call: cst.Call, name: str) -> str:
    argument = keyword(call, name)
    if argument is None and name == "for_test" and len(call.args) == 1 and call.args[0].keyword is None:
        argument = call.args[0]
    return source(argument.value) if argument is not None else ""


def _third(call: cst.Call) -> cst.Arg | None:
    """The third argument, if it is given by position: the list to fetch of ``exe.run(program, feed, [loss.name])``."""
    plain = positional(call)
    return call.args[2] if len(plain) > 2 and plain[2] is call.args[2] else None


def _fetching(
    script: Transformer, original: cst.Call, updated: cst.Call, fetched: cst.Arg | None, shift: int = 0
) -> cst.Call:
    if fetched is None:
        return updated
    mark_names(script, original, fetched.value, "fetch list")
    return _without_names(original, updated, [fetched], shift)


def with_parameters(script: Transformer, original: cst.Call, updated: cst.Call, name: str) -> cst.Call:
    """``parameters=[p.name]`` as ``[p]`` in calls of ``minimize`` and of what Paddle has under ``name``."""
    arguments = parameter_arguments(original, name)
    for argument in arguments:
        mark_names(script, original, argument.value, "parameter list")
    return _without_names(original, updated, arguments)


def mark_names(script: Transformer, node: cst.CSTNode, value: cst.BaseExpression, kind: Kind) -> None:
    """A mark for each name that is given as a string in a list: ``["mean_0.tmp_0"]``."""
    what, do = _BY_STRING[kind]
    for element in value.elements if isinstance(value, (cst.List, cst.Tuple, cst.Set)) else ():
        if isinstance(element.value, cst.SimpleString):
            script.mark(node, f"{what} {element.value.value}", do)


def _without_names(original: cst.Call, updated: cst.Call, arguments: list[cst.Arg], shift: int = 0) -> cst.Call:
    """The call with values instead of names in these arguments; ``updated`` has ``shift`` more arguments in front."""
    kept = [
        argument.with_changes(value=without_names(argument.value)) if old in arguments else argument
        for old, argument in zip(original.args, updated.args[shift:], strict=True)
    ]
    return updated.with_changes(args=[*updated.args[:shift], *kept])


# `fetch_list=[loss.name]` -> `fetch_list=[loss]`: Paddle 3 takes values, also of parameters, by no name.


def without_names(node: cst.BaseExpression) -> cst.BaseExpression:
    """A list display, tuple or comprehension of ``x.name`` as one of ``x``; other elements stay."""
    if isinstance(node, (cst.List, cst.Tuple, cst.Set)):
        elements = [element.with_changes(value=_value(element.value)) for element in node.elements]
        return node.with_changes(elements=elements)
    if isinstance(node, (cst.ListComp, cst.GeneratorExp, cst.SetComp)):
        return node.with_changes(elt=_value(node.elt))
    return node


def _value(node: cst.BaseExpression) -> cst.BaseExpression:
    if isinstance(node, cst.Attribute) and node.attr.value == "name":
        return node.value
    return node


# Paddle's flags. Without PIR nothing of this package works: what switched it off switches it on. What was set for speed
# and makes steps slower today is marked.
_FLAG = "FLAGS_enable_pir_api"
_SYNC = "FLAGS_sync_nccl_allreduce"
_ON = {
    "0": "1",
    "False": "True",
    **{f"{quote}{off}{quote}": f"{quote}1{quote}" for quote in "'\"" for off in ("0", "False", "false")},
}


def with_flags(script: Transformer, original: cst.Call, updated: cst.Call) -> cst.Call:
    """Rewrite ``os.environ.setdefault("FLAGS_enable_pir_api", "0")``,
    ``os.environ.update(FLAGS_enable_pir_api="0")``."""
    sets = (
        len(original.args) == 2
        and isinstance(original.func, cst.Attribute)
        and original.func.attr.value in ("setdefault", "putenv")
    )
    flag = source(original.args[0].value) if sets else ""
    arguments = [
        new.with_changes(value=flag_set(script, original, flag if sets else keyword_of(old) or "", new.value))
        if position == 1 or not sets
        else new
        for position, (old, new) in enumerate(zip(original.args, updated.args, strict=True))
    ]
    return updated.with_changes(args=arguments)


def flag_set(script: Transformer, node: cst.CSTNode, flag: str, value: cst.BaseExpression) -> cst.BaseExpression:
    """The value that a flag gets instead of this one; ``flag``: source text of its name, or of something else."""
    text, name = source(value), flag.strip("'\"")
    if name == _SYNC and text.strip("'\"").lower() not in ("0", "false"):
        script.mark(node, f"{_SYNC}={text}", "delete it: steps are slower with it today, as nothing overlaps")
    if name != _FLAG:
        return value
    if text in _ON:
        return cst.parse_expression(_ON[text])
    if text not in _ON.values() and text.strip("'\"").lower() != "true":
        script.mark(node, f"{_FLAG}={text}", "leave it on: programs of the old IR are not supported")
    return value


# `if fleet.worker_index() == 0:` around a save, which is a collective call in which only rank 0 writes.
_RANK = re.compile(
    r"(fleet\.(worker_index|rank)\(\)|(\w+\.)*(trainer_id|rank|worker_index|worker_id)(\(\))?"
    r"|int\(os\.(environ|getenv).*PADDLE_TRAINER_ID.*\))"
)
_ABOUT_RANKS = re.compile(r"\b(local_rank|rank|trainer_id|worker_index|worker_id|is_first_worker)\b|PADDLE_TRAINER_ID")
_FIRST = re.compile(r"(\w+\.)*is_first_worker\(\)")
_SAVES = ("save_persistables", "save_inference_model")
SAVE_BY_HAND = ("a save below a rank's condition", "move it out of the `if`: every rank must call it, rank 0 writes")


def _is_rank_test(node: cst.BaseExpression) -> bool:
    """Whether an expression asks if this is the first rank."""
    text = re.sub(r"\s", "", source(node))
    if _FIRST.fullmatch(text):
        return True
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        return bool(_RANK.fullmatch(re.sub(r"\s", "", source(node.expression))))
    rank = re.fullmatch(r"(?P<left>.+)==0|0==(?P<right>.+)", text)
    return bool(rank and _RANK.fullmatch(rank["left"] or rank["right"]))


def _without_rank(node: cst.BaseExpression) -> tuple[bool, cst.BaseExpression | None]:
    """Take the test of a rank out of a condition: (whether a rank was asked for, what is left; None = nothing)."""
    if _is_rank_test(node):
        return True, None
    if isinstance(node, cst.BooleanOperation) and isinstance(node.operator, cst.And):
        if _is_rank_test(node.left):
            return True, node.right
        left_asked, left = _without_rank(node.left)
        if _is_rank_test(node.right):
            return True, node.left
        if left_asked and left is not None:
            return True, node.with_changes(left=left)
    return False, node


def _is_save(node: cst.CSTNode) -> bool:
    """Whether a statement is one call of a collective save of fleet, after it was rewritten."""
    if not isinstance(node, cst.SimpleStatementLine) or len(node.body) != 1:
        return False
    expression = node.body[0]
    if not isinstance(expression, cst.Expr) or not isinstance(expression.value, cst.Call):
        return False
    return source(expression.value.func) in {f"fleet.{name}" for name in _SAVES}


def opened(node: cst.If) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | None:
    """The statements without the rank's condition; None if that would change more than the saves."""
    asked, rest = _without_rank(node.test)
    if not asked or node.orelse is not None or not isinstance(node.body, cst.IndentedBlock):
        return None
    if not node.body.body or not all(_is_save(statement) for statement in node.body.body):
        return None
    if rest is not None:
        return node.with_changes(test=rest)
    if any(line.comment for line in node.body.footer) or node.body.header.comment:
        return None
    first, *others = node.body.body
    if not isinstance(first, cst.SimpleStatementLine):
        return None
    first = first.with_changes(leading_lines=[*node.leading_lines, *first.leading_lines])
    return cst.FlattenSentinel(
        [first, *(statement for statement in others if isinstance(statement, cst.SimpleStatementLine))]
    )


def hides_a_save(node: cst.If) -> bool:
    """Whether a save is somewhere below a condition about ranks."""
    return bool(_ABOUT_RANKS.search(source(node.test))) and any(
        f"fleet.{name}(" in source(part) for name in _SAVES for part in (node.body, node.orelse) if part is not None
    )
