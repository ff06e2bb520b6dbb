"""How programs of Paddle 1.x were fed and tested: loaders over a Python generator, inputs, ``clone(for_test=True)``.

The loaders are ``DataLoader.from_generator``, ``PyReader`` and ``py_reader``.

An iterable one yields feeds for ``exe.run(feed=...)``. The others feed the programs that have their inputs: between
``start()`` and ``reset()``, ``exe.run(program, fetch_list=[...])`` takes the next batch by itself.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import paddle
from paddle.base.libpaddle import pir

from fleet_train.collectives.host_ops import once_until_grown
from fleet_train.compat.parameters import dtype_of
from fleet_train.convert import process
from fleet_train.convert.foreign import refuse_foreign_fetches
from fleet_train.convert.passes.one_card import exchanges_values, read_own_values
from fleet_train.convert.passes.program import line_of
from fleet_train.data import Prefetcher
from fleet_train.errors import ConversionError

Feed = dict[str, np.ndarray[Any, Any]]


class GeneratorLoader:
    """Yields ``[{input name: array}]`` for each batch; every ``for`` starts the generator again.

    Batches are made in the loop's own thread. Faster loading: ``paddle.io.DataLoader`` over a dataset.
    """

    def __init__(self, feed_list: Sequence[Any]) -> None:
        self._names = [str(value.name) for value in feed_list]
        self._feeder = DataFeeder(feed_list)
        self._batches: Callable[[], Iterator[Feed]] | None = None

    def set_sample_generator(
        self, reader: Callable[[], Iterable[Any]], batch_size: int, drop_last: bool = True, places: Any = None
    ) -> GeneratorLoader:
        """Feed from a generator: ``reader()`` yields one sample at a time."""
        del places

        def batches() -> Iterator[list[Any]]:
            batch = list[Any]()
            for sample in reader():
                batch.append(sample)
                if len(batch) == batch_size:
                    yield batch
                    batch = []
            if batch and not drop_last:
                yield batch

        return self.set_sample_list_generator(batches)

    def set_sample_list_generator(
        self, reader: Callable[[], Iterable[Sequence[Any]]], places: Any = None
    ) -> GeneratorLoader:
        """Feed from a generator: ``reader()`` yields lists of samples, as ``paddle.batch`` does."""
        del places
        self._batches = lambda: (self._feeder.feed(batch) for batch in reader())
        return self

    def set_batch_generator(self, reader: Callable[[], Iterable[Any]], places: Any = None) -> GeneratorLoader:
        """Feed from a generator: ``reader()`` yields whole batches: one array for each input."""
        del places
        self._batches = lambda: (self._named(batch) for batch in reader())
        return self

    # Their names in PyReader and py_reader.
    decorate_sample_generator = set_sample_generator
    decorate_sample_list_generator = decorate_paddle_reader = set_sample_list_generator
    decorate_batch_generator = decorate_tensor_provider = set_batch_generator

    def __call__(self) -> Iterator[list[Feed]]:
        return iter(self)

    def __iter__(self) -> Iterator[list[Feed]]:
        return ([feed] for feed in self._feeds())

    def _feeds(self) -> Iterator[Feed]:
        if self._batches is None:
            raise ConversionError("from_generator: set a generator first: loader.set_batch_generator(reader)")
        return self._batches()

    def _named(self, batch: Any) -> Feed:
        arrays = batch if isinstance(batch, (list, tuple)) else [batch]
        if len(arrays) != len(self._names):
            raise ConversionError(f"from_generator: a batch has {len(arrays)} arrays for {len(self._names)} inputs")
        return {name: np.asarray(array) for name, array in zip(self._names, arrays, strict=True)}


class ProgramLoader(GeneratorLoader):
    """Feeds the program that has its inputs, up to ``capacity`` batches ahead on a thread.

    ``start()`` begins a pass. At its end ``exe.run`` raises ``fluid.core.EOFException``
    (``paddle.base.core.EOFException``), and ``reset()`` makes the loader ready for the next ``start()``.
    """

    def __init__(self, feed_list: Sequence[Any], capacity: int) -> None:
        super().__init__(feed_list)
        self.inputs = list(feed_list)
        self._capacity = capacity
        self._ready: Prefetcher[Feed] | None = None
        self._program = paddle.static.default_main_program()  # kept: a value does not keep its program alive
        _LOADERS.add(self)
        process.before_each_run(_feed_by_loaders)

    @property
    def is_started(self) -> bool:
        """Whether a pass has begun and was not reset."""
        return self._ready is not None

    def start(self) -> None:
        """Begin a pass over the generator."""
        if self._ready is not None:
            raise ConversionError("the loader was started twice: call its reset() before the next start()")
        self._ready = Prefetcher(self._feeds(), depth=self._capacity)

    def reset(self) -> None:
        """End the pass, also before its last batch."""
        if self._ready is not None:
            self._ready.close()
            self._ready = None

    def completed(self, block: Any, feed: Any) -> Any:
        """The feed of a run of the program with this block, with the next batch if the program needs one."""
        given = feed or {}
        if self.inputs[0].block != block or not isinstance(given, dict) or not given.keys().isdisjoint(self._names):
            return feed
        if self._ready is None:
            raise ConversionError(f"exe.run: {', '.join(self._names)} come from a loader: call its start() before")
        for batch in self._ready:
            return {**given, **batch}
        raise paddle.base.core.EOFException("the loader has no batch left: call its reset(), then start()")


_LOADERS = weakref.WeakSet[ProgramLoader]()


def _feed_by_loaders(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
    """A hook before each run: ask the loaders of the program for what is not fed by hand."""
    main = program or paddle.static.default_main_program()
    block = main.global_block() if isinstance(main, paddle.static.Program) else None
    for loader in sorted(_LOADERS, key=lambda each: not each.is_started):
        feed = loader.completed(block, feed)
    return feed, fetch_list


def from_generator(
    feed_list: Sequence[Any] | None = None,
    capacity: int | None = None,
    use_double_buffer: bool = True,
    iterable: bool = True,
    return_list: bool = False,
    use_multiprocess: bool = False,
    drop_last: bool = True,
) -> GeneratorLoader:
    """A loader for the inputs of a program; ``iterable=False``: one that feeds the program, see ``ProgramLoader``.

    ``capacity`` (batches prepared in advance) is that of loaders that feed a program. The buffers chose a speed, and
    ``drop_last`` was about several devices of one process; they are not looked at. ``fluid.io.PyReader`` takes the
    same arguments. Raises ConversionError for ``return_list=True``.
    """
    del use_double_buffer, use_multiprocess, drop_last
    if return_list:
        raise ConversionError(
            "from_generator: return_list=True is for dynamic mode; leave it out and feed what the loader yields"
        )
    if not feed_list:
        raise ConversionError("from_generator: give feed_list, the inputs of the program")
    return GeneratorLoader(feed_list) if iterable else ProgramLoader(feed_list, capacity or 2)


def py_reader(
    capacity: int,
    shapes: Sequence[Sequence[int | None]],
    dtypes: Sequence[str],
    lod_levels: Sequence[int] | None = None,
    name: str | None = None,
    use_double_buffer: bool = True,
) -> ProgramLoader:
    """``fluid.layers.py_reader``: a loader with inputs of its own, which ``read_file`` returns.

    ``shapes`` include the batch dimension. Sequences with levels of detail are refused.
    """
    del use_double_buffer
    if any(lod_levels or ()):
        raise ConversionError(f"py_reader: lod_levels={list(lod_levels or ())}: pad the sequences, feed their lengths")
    prefix = name or paddle.utils.unique_name.generate("py_reader")
    described = enumerate(zip(shapes, dtypes, strict=True))
    inputs = [paddle.static.data(f"{prefix}_{index}", list(shape), dtype) for index, (shape, dtype) in described]
    return ProgramLoader(inputs, capacity)


def create_py_reader_by_data(
    capacity: int, feed_list: Sequence[Any], name: str | None = None, use_double_buffer: bool = True
) -> ProgramLoader:
    """``fluid.layers.create_py_reader_by_data``: a loader for inputs that the program has."""
    del name, use_double_buffer
    return ProgramLoader(feed_list, capacity)


def read_file(reader: ProgramLoader) -> Any:
    """``fluid.layers.read_file``: the inputs of a ``py_reader``, a single one without a list."""
    return reader.inputs[0] if len(reader.inputs) == 1 else list(reader.inputs)


# Inputs of a program as Paddle 1.8 declared and fed them.


def data(
    name: str,
    shape: Sequence[int | None],
    append_batch_size: bool = True,
    dtype: str = "float32",
    lod_level: int = 0,
    type: Any = None,
    stop_gradient: bool = True,
) -> Any:
    """``fluid.layers.data``: a batch dimension is put in front, unless ``shape`` has an open dimension already.

    Sequences with levels of detail (``lod_level``) do not exist any more and are refused.
    """
    del type
    if lod_level:
        raise ConversionError(f"data({name!r}): lod_level={lod_level}: pad the sequences and feed their lengths")
    sizes = [-1 if size is None else int(size) for size in shape]
    if append_batch_size and all(size >= 0 for size in sizes):
        sizes = [-1, *sizes]
    value = paddle.static.data(name, sizes, dtype)
    value.stop_gradient = stop_gradient
    return value


class DataFeeder:
    """Turns lists of samples into the ``feed`` of ``Executor.run``: one tuple per sample, one entry per input."""

    def __init__(self, feed_list: Sequence[Any], place: Any = None, program: Any = None) -> None:
        del place, program
        if names := [value for value in feed_list if isinstance(value, str)]:
            raise ConversionError(f"DataFeeder: give the input variables instead of their names {names}")
        self._inputs = [(str(value.name), [int(size) for size in value.shape], dtype_of(value)) for value in feed_list]

    def feed(self, iterable: Iterable[Sequence[Any]]) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays by input name, in the input's dtype; flat samples take the input's shape."""
        columns: list[list[Any]] = [[] for _ in self._inputs]
        for sample in iterable:
            if len(sample) != len(columns):
                raise ConversionError(f"DataFeeder: a sample has {len(sample)} entries for {len(columns)} inputs")
            for column, entry in zip(columns, sample, strict=True):
                column.append(entry)
        fed = {}
        for (name, sizes, dtype), column in zip(self._inputs, columns, strict=True):
            samples = [_sample(entry, name, sizes[1:], dtype) for entry in column]
            if len({array.shape for array in samples}) > 1:
                raise ConversionError(f"DataFeeder: samples of {name!r} differ in shape; pad them to one shape")
            fed[name] = np.stack(samples)
        return fed


def _sample(entry: Any, name: str, sizes: Sequence[int], dtype: str) -> np.ndarray[Any, Any]:
    sample = np.asarray(entry, dtype)
    if any(size < 0 for size in sizes):
        return sample
    if sample.size != math.prod(sizes):
        raise ConversionError(f"DataFeeder: a sample of {name!r} has {sample.size} values, its shape is {list(sizes)}")
    return sample.reshape(sizes)


# ``program.clone()``, of which a script fetches the values of the original; and ``program.clone(for_test=True)``.

_VALUES = "_fleet_train_values"
_COPIES = "_fleet_train_copies"
# What learning adds to a program without taking a gradient: state that it stores, values that loops keep for it.
_OF_LEARNING = ("builtin.set_parameter", "builtin.shadow_output", "cf.")


def clone(program: Any) -> Any:
    """A copy of ``program`` as it is now, gradients and updates included.

    As in Paddle 1.8, ``exe.run(copy, fetch_list=[loss])`` is given the values of ``program`` and fetches those of the
    copy.
    """
    return _copied(program, lambda _: False)


def clone_for_test(program: Any) -> Any:
    """A copy of ``program`` that tests: dropout and batch norm in test mode, no gradients, the same parameters.

    As in Paddle 1.8, ``exe.run(copy, fetch_list=[loss])`` is given the values of ``program`` and fetches those of the
    copy. Operators that ``program`` gets later are not in the copy. Raises ConversionError where the learning
    operators cannot be told from the others: clone before ``minimize`` then.
    """
    learning = set[int]()
    copy = _copied(program, lambda operator: _learns(operator, learning) or exchanges_values(operator))
    block = copy.global_block()
    if learning and any(operator.name().startswith(_OF_LEARNING) for operator in block.ops):
        raise ConversionError(
            "clone_for_test: the program has control flow or stores values, of which it cannot be told what only "
            "training needs; clone it before minimize"
        )
    for operator in _all_below(block.ops):
        if operator.has_attr("is_test"):
            operator.set_bool_attr("is_test", True)
    return copy


def _copied(program: Any, is_left_out: Callable[[Any], bool]) -> Any:
    values = _Values(program, is_left_out)
    setattr(values.copy, _VALUES, values)
    # Kept: a script may list the parameters of a copy that it does not keep itself.
    vars(program).setdefault(_COPIES, []).append(values.copy)
    process.before_each_run(_translate_fetches)
    process.before_each_run(refuse_foreign_fetches, is_last=True)
    return values.copy


class _Values:
    """A program, its copy without some operators, and which value became which."""

    def __init__(self, program: Any, is_left_out: Callable[[Any], bool]) -> None:
        self._program, self._mapping = program, pir.IrMapping()  # the mapping does not keep the program alive
        self.copy = program.clone(self._mapping)
        operators, block = program.global_block().ops, self.copy.global_block()
        self._left_out = {operator.id() for operator in operators if is_left_out(operator)}
        for old, new in reversed(list(zip(operators, block.ops, strict=True))):
            if old.id() in self._left_out:
                read_own_values(new)
                block.remove_op(new)

    def refuse_foreign_operands(self) -> None:
        """Raise ConversionError where the script has built on, in the copy, with values of the program: Paddle ends in
        an internal error, or aborts the process."""
        foreign = [
            (operator, index, value)
            for operator in self.copy.global_block().ops
            for index, value in enumerate(operator.operands_source())
            if value.get_defining_op() and value.get_defining_op().get_parent_block().program != self.copy
        ]
        for operator, index, value in foreign:  # or else Paddle aborts the process when it frees the two programs
            if self._mapping.has(value):
                operator.operand(index).set_source(self._mapping.look_up(value))
        if foreign:
            raise ConversionError(
                f"{line_of(foreign[0][0]) or foreign[0][0].name()}: in a copy of a program, this computes with values "
                "of the program itself, so that nothing before it would be trained; in Paddle 1.8 both were "
                "one by name. Build what the copy shall have before the clone, or build the network again under "
                "paddle.utils.unique_name.guard() instead of cloning it"
            )

    def translated(self, fetch_list: Any) -> Any:
        """``fetch_list`` with the copy's values. Raises ConversionError for one that the copy does not have."""
        if not isinstance(fetch_list, (list, tuple)):
            return self._translated(fetch_list, "fetch_list")
        return [self._translated(value, f"fetch_list[{index}]") for index, value in enumerate(fetch_list)]

    def _translated(self, value: Any, where: str) -> Any:
        if not isinstance(value, pir.Value) or value.get_defining_op().get_parent_block().program == self.copy:
            return value
        if not self._mapping.has(value) or value.get_defining_op().id() in self._left_out:
            raise ConversionError(
                f"{where}: the copy of the program does not have this value; it has what came before the clone, one "
                "for testing no gradients: clone behind the operator that makes the value"
            )
        return self._mapping.look_up(value)


def _learns(operator: Any, learning: set[int]) -> bool:
    """Whether an operator computes a gradient, talks to other ranks about one, or takes what those in ``learning``
    made. It is then added to these."""
    learns = any(
        inner.name().endswith("_grad")
        or (inner.name().startswith("py_op.fleet_train") and not exchanges_values(inner))
        or any(
            source.get_defining_op() is not None and source.get_defining_op().id() in learning
            for source in inner.operands_source()[int(exchanges_values(inner)) :]  # not the token
        )
        for inner in _all_below([operator])
    )
    learning |= {operator.id()} if learns else set()
    return learns


def _all_below(operators: list[Any]) -> Iterator[Any]:
    """The operators and those of their blocks."""
    for operator in operators:
        yield operator
        for block in operator.blocks():
            yield from _all_below(block.ops)


def _translate_fetches(program: Any, feed: Any, fetch_list: Any) -> tuple[Any, Any]:
    """A hook before each run: fetch from a copy what the script knows as a value of the program.

    A value of another program that is fetched, or computed with, ends the process.
    """
    values = getattr(program, _VALUES, None)
    if values is not None:
        _look_at_operands(program)
    return feed, fetch_list if values is None or fetch_list is None else values.translated(fetch_list)


@once_until_grown
def _look_at_operands(copy: Any) -> None:
    getattr(copy, _VALUES).refuse_foreign_operands()
