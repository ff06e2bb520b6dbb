"""Writes docs/programs.md from the catalogue: ``python -m tests.programs.page``. A test compares the two."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.programs.catalogue import SUBJECTS, programs
from tests.programs.catalogue.entry import TOLERANCE, Program
from tests.programs.catalogue.optimizers import NOT_STATIC
from tests.programs.strategies import ALWAYS, EXACT, LOSSY, Strategy

PAGE = Path(__file__).parents[2] / "docs/programs.md"

_TITLES = {
    "sharing": "Parameters, optimizers and names that are used more than once",
    "optimizers": "Optimizers, clips and decay",
    "settings": "Settings of single parameters",
    "layers": "Layers and networks",
    "sequences": "Sequences",
    "control": "Control flow, second derivatives, functions with a backward of their own",
    "loops": "Feeding, fetching, evaluating, saving",
    "values": "Shapes, sizes and dtypes",
    "schedules": "Schedules",
}

_HEAD = """# What kinds of programs are proven

Generated from `tests/programs/catalogue` by `python -m tests.programs.page`; do not edit.

Each program below is a typical static program. `make test` trains it in one process of plain Paddle with the joint
batch. On two ranks with half of the batch each, `make test` trains some programs and `make test-long` the others. Both
give the same parameters and losses ({tolerance:.0e} of their scale unless stated otherwise) and the same state of the
optimizer (to ten times that); the two ranks are bit-equal. In {noise}, parameters whose gradient is
zero but for rounding, such as the biases of attention keys, are compared absolutely. A job of one process gives the
same bits as plain Paddle where it does not rewrite the program. All runs use CPUs with Gloo. Every program runs with
these strategies, if they are exact for it:

{always}

and with some of these, so that each of them runs with many programs:

{others}

Programs marked *simulated* are also trained with strategies that are inexact on purpose, and compared with the numpy
simulation of all ranks. The {random} programs marked *random* draw different numbers on each rank: no process alone has
their result, and they are compared only with the simulation:

{lossy}

A program is one decorated function: to add yours to this list, add it to a module of that folder.
"""

_TAIL = """
## Refused by name

{refused}
{second}

## What Paddle 3.3.1 itself does not support in a static program on a CPU

{classes}
- `nn.ClipGradByValue`: NotImplementedError in today's programs; `ClipGradByNorm` and `ClipGradByGlobalNorm` work.
- `paddle.grad`, `autograd.PyLayer`: dynamic mode only; `paddle.static.gradients`, `static.nn.static_pylayer` work.
- `Optimizer.set_lr`: dynamic mode only; use a schedule, or set the variable of the learning rate in the scope.
- Groups of parameters (`parameters=[{{"params": ...}}]`): TypeError; make an optimizer per group, or `ParamAttr`.
- `Executor.run(use_prune=True)`: every input must still be fed; build a second program with the same names.
- `AdamW(lr_ratio=)`: not implemented on CPUs; `ParamAttr(learning_rate=)` works.

Paddle itself also has three pitfalls, with any number of processes:

- `F.kl_div(reduction="batchmean")` divides by -1 if the batch size is unknown (`None`): use
  `reduction="none"` and `.sum(axis=1).mean()`.
- `static.nn.fc` numbers its names per process, regardless of `unique_name.guard`: name its parameters
  (`ParamAttr(name=)`) if a second program shares them.
- If a parameter is used by name in several places, an optimizer of plain Paddle updates it once per use, which equals
  the update by the sum only for SGD. fleet_train updates it once, by the sum, with any number of processes.
"""


def page() -> str:
    everything = programs()
    head = _HEAD.format(
        tolerance=TOLERANCE,
        noise=" and ".join(f"`{one.name}`" for one in everything.values() if one.noise and not one.random),
        random=sum(one.random for one in everything.values()),
        always=_settings({name: EXACT[name] for name in ALWAYS}),
        others=_settings({name: one for name, one in EXACT.items() if name not in ALWAYS}),
        lossy=_settings(LOSSY),
    )
    sections = [_section(subject, list(everything.values())) for subject in SUBJECTS]
    refused = "\n".join(
        f"- `{one.name}` with *{strategy}*: `{text}`"
        for one in everything.values()
        for strategy, text in one.refused.items()
    )
    alone = ", ".join(f"*{name}*" for name, one in EXACT.items() if one.for_one_optimizer)
    second = (
        f"- A second optimizer or update in one program, with a setting that a program can have only once ({alone})."
    )
    classes = "\n".join(
        f"- `paddle.optimizer.{name}`: {why}." for name, why in NOT_STATIC.items() if name != "Optimizer"
    )
    return head + "".join(sections) + _TAIL.format(refused=refused, second=second, classes=classes)


def _section(subject: str, trained: list[Program]) -> str:
    mine = [one for one in trained if one.subject == subject]
    if subject == "schedules":
        lines = [", ".join(f"`{one.name}`" for one in mine) + f": with {', '.join(mine[0].only)}; {mine[0].reason}."]
    else:
        lines = [_line(one) for one in mine]
    return f"\n## {_TITLES[subject]}\n\n" + "\n".join(lines) + "\n"


def _settings(strategies: Mapping[str, Strategy]) -> str:
    rows = []
    for name, one in strategies.items():
        settings = ", ".join(f"`{knob}: {value}`" for knob, value in one.settings.items())
        rows.append(f"- *{name}*: {settings or 'the profile of that name'}")
    return "\n".join(rows)


def _line(one: Program) -> str:
    marks = [mark for mark, holds in (("simulated", one.simulated), ("random", one.random)) if holds]
    notes = [f"{name}: {why}" for name, why in one.without.items()]
    if one.only:
        notes.append(f"with {', '.join(one.only)}: {one.reason}")
    elif one.reason:
        notes.append(f"to {one.tolerance:.0e}: {one.reason}")
    tail = "".join([*(f" *{mark}*" for mark in marks), *(f" ({note})" for note in notes)])
    return f"- `{one.name}`: {one.sentence}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
