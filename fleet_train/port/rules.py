"""What may become of an old name: the vocabulary of the tables (``table_*.py``), which are data and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

_TOKEN = re.compile(r"(?P<old>\w+)(?:>(?P<new>\w+))?(?:(?P<sign>[=\-])(?P<text>.*))?")


@dataclass(frozen=True)
class Parameter:
    """One parameter of an old function."""

    old: str
    new: str
    missing: str | None = None
    """Source text that is written where the argument is not given: today's default is another one."""
    dropped: tuple[str, ...] | None = None
    """The source texts with which a parameter that is gone today may go, () = any; None: it is there."""


@dataclass(frozen=True)
class To:
    """``new`` does the same. ``arguments`` lists the old parameters, by position, each as one word:

    ``x`` stays; ``dim>axis`` is renamed; ``alpha>slope=0.02`` is renamed and written out where it was not given;
    ``use_cudnn-`` is dropped; ``threshold-6.0|6`` is dropped if it has one of these values; ``+mode='x'`` is always
    written. Parameters in front of the word ``/`` may stay positional. None: arguments stay as they are, the two
    functions take the same.
    """

    new: str
    arguments: str | None = None
    act: str = ""
    """The parameter that names an activation, to be put around the call."""
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    """The source texts that a parameter may have, and what each becomes, by parameter."""
    choose: tuple[str, dict[str, str]] | None = None
    """A parameter that chooses between names: source text (``""`` = not given) -> new name. It is dropped."""
    ordered: bool = True
    """Whether the order of the parameters behind ``/`` was the same in all versions."""
    then: str = ""
    """An attribute of the result that does what the old result did."""
    otherwise: str = ""
    """What takes the old arguments as they are, where the direct way cannot be shown to mean the same."""
    remark: str = ""
    """What a TODO line says although the call is rewritten."""
    hand: str = ""
    """What to do by hand where the arguments do not allow the rewriting."""

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        return tuple(_parameter(word) for word in (self.arguments or "").split() if word[0] not in "/+")

    @cached_property
    def added(self) -> tuple[tuple[str, str], ...]:
        """Keyword and source text of what is always written."""
        words = [word[1:].partition("=") for word in (self.arguments or "").split() if word[0] == "+"]
        return tuple((keyword, text) for keyword, _, text in words)

    @cached_property
    def is_drop_in(self) -> bool:
        """Whether the new function can stand wherever the old one stood, also where it is not called."""
        return self.arguments is None or (
            self.positional == len(self.parameters)
            and not (self.added or self.act or self.choose or self.values or self.then)
            and all(parameter.old == parameter.new and parameter.missing is None for parameter in self.parameters)
        )

    @cached_property
    def positional(self) -> int:
        """How many leading parameters may stay positional."""
        words = (self.arguments or "").split()
        return words.index("/") if "/" in words else len(self.parameters)

    @property
    def targets(self) -> tuple[str, ...]:
        """Every name that a use of this row may become."""
        chosen = tuple(self.choose[1].values()) if self.choose else ()
        return tuple(name for name in (self.new, *chosen, self.otherwise) if name)


@dataclass(frozen=True)
class Todo:
    """No machine can decide this: ``do`` says what to use."""

    do: str


Rule = To | Todo


def _parameter(word: str) -> Parameter:
    match = _TOKEN.fullmatch(word)
    if match is None:
        raise ValueError(f"not a word for a parameter: {word!r}")
    old, sign, text = match["old"], match["sign"], match["text"]
    if sign == "-":
        return Parameter(old, "", dropped=tuple(text.split("|")) if text else ())
    return Parameter(old, match["new"] or old, missing=text if sign == "=" else None)
