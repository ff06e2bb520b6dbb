"""Options that several commands have, types of their values, and the completions of these."""

from __future__ import annotations

import functools
import math
import os
import re
import warnings
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from fleet_train.cluster.cluster import MOST_SECONDS

Items = list[CompletionItem[str]]


def files(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """The shell's own completion of files."""
    del context, parameter
    return [CompletionItem(incomplete, type="file")]


def folders(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    del context, parameter
    return [CompletionItem(incomplete, type="dir")]


def profiles(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Names of the catalogue; files if no name matches."""
    from fleet_train.profile import profile_names

    named = [CompletionItem(name) for name in profile_names() if name.startswith(incomplete)]
    return named or files(context, parameter, incomplete)


def knobs(context: click.Context, parameter: click.Parameter, incomplete: str) -> Items:
    """Names of knobs for ``--set``, and after ``=`` the values of a knob that has few."""
    del context, parameter
    from fleet_train.profile import KNOBS
    from fleet_train.profile.schema import DESCRIPTIVE, FLAG_KNOBS

    name, equals, _ = incomplete.partition("=")
    if not equals:
        names = [each for each in KNOBS if each not in DESCRIPTIVE and each not in FLAG_KNOBS]
        return [CompletionItem(each) for each in names if each.startswith(incomplete)]
    row = KNOBS.get(name)
    values = () if row is None else row.choices or (("true", "false") if row.kind is bool else row.words)
    return [CompletionItem(f"{name}={value}") for value in values if f"{name}={value}".startswith(incomplete)]


# Numbers in flags: decimal, finite, and written with the digits 0 to 9.
#
# Python's own int() and float() also read ``nan``, ``1e400`` (infinity), ``1_000`` and the digits of every script.


_WHOLE = re.compile(r"[-+]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")


class WholeNumber(click.types.IntParamType):
    """A whole number of up to 18 digits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_whole(value, param, ctx), param, ctx)


class WholeNumberRange(click.IntRange):
    """A whole number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_whole(value, param, ctx), param, ctx)


class Number(click.types.FloatParamType):
    """A finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_finite(value, param, ctx), param, ctx)


class NumberRange(click.FloatRange):
    """A finite number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_finite(value, param, ctx), param, ctx)


def _whole(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    if isinstance(value, str) and not _WHOLE.fullmatch(value):
        raise click.BadParameter(f"{shown(value)} is not a whole number of up to 18 digits.", ctx, param)
    return value


def _finite(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
    if isinstance(value, str) and not (_DECIMAL.fullmatch(value) and math.isfinite(float(value))):
        raise click.BadParameter(f"{shown(value)} is not a finite decimal number.", ctx, param)
    return value


def seconds(*, min: float = 0, min_open: bool = False) -> NumberRange:
    """A number of seconds that every clock and socket accepts."""
    return NumberRange(min=min, max=MOST_SECONDS, min_open=min_open)


def shown(value: str) -> str:
    """A given text for a message: its beginning, without control characters."""
    return repr(value if len(value) <= 60 else f"{value[:60]}...")


Command = TypeVar("Command", bound=Callable[..., Any])


def all_of(*options: Callable[[Any], Any]) -> Callable[[Command], Command]:
    """Several options as one decorator."""

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def gone_option(flag: str, instead: str, is_flag: bool = False) -> Callable[[Command], Command]:
    """An option that was here before, which is refused with what to use instead."""

    def refuse(context: click.Context, _: click.Parameter, value: Any) -> None:
        if value:
            raise click.UsageError(f"No such option '{flag}': {instead}.", context)

    return click.option(flag, is_flag=is_flag, hidden=True, expose_value=False, callback=refuse)


# ``--verbose`` of commands that import Paddle into this process: without it, Paddle's start-up lines are hidden.


# A process that sets these shows or keeps its ranks' output: a log must be complete.
_LAUNCHERS = ("FLEET_TRAIN_STORE", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_LOCAL_RANK")


def verbose_option(command: Command) -> Command:
    """Add the flag to a command."""
    return click.option(
        "--verbose",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=_quieten_unless_verbose,
        help="Also show Paddle's start-up messages. (Under launch: launch --verbose.)",
    )(command)


def _quieten_unless_verbose(context: click.Context, _: click.Parameter, verbose: bool) -> None:
    environ = context.find_root().obj  # given by `main`: this process is the command's own
    if environ is not None and not verbose and not context.resilient_parsing:
        quieten(environ)


def quieten(environ: MutableMapping[str, str]) -> None:
    """Silence known warnings, before Paddle is imported. The user's GLOG_minloglevel and ``python -W`` come first."""
    if any(name in environ for name in _LAUNCHERS):
        return
    from fleet_train.launch.terminal import WARNINGS

    environ.setdefault("GLOG_minloglevel", "2")  # errors only
    for message, module in WARNINGS.items():
        warnings.filterwarnings("ignore", message, UserWarning, module.replace(".", r"\."), append=True)


# Options of the commands that examine a whole cluster: which machines, from which port.


def where(ranks: str) -> Callable[[Command], Command]:
    """The fields of `fleet_train.launch.on_ranks.Where`. ``ranks``: the ranks of a machine without --nproc."""
    return all_of(
        click.option(
            "--nproc",
            "--nproc_per_node",
            type=WholeNumber(),
            metavar="N",
            help=f"Ranks per machine. [default: every GPU, or {ranks}]",
        ),
        click.option("--ips", "--cluster_node_ips", metavar="A,B:2", help="All machines, the same list on each."),
        click.option("--node_ip", "--host", metavar="A", help="This machine's address in the list, if it has several."),
        click.option(
            "--started_port", "--start_port", type=WholeNumber(), metavar="PORT", help="First port, as for launch."
        ),
    )


def recorded(folder: Path, what: str, as_json: str) -> Callable[[Command], Command]:
    """The options of a command whose ranks meet for where its results go; ``as_json``: the help of ``--json``."""
    return all_of(
        click.option(
            "--record",
            type=Path,
            default=folder,
            show_default=True,
            metavar="DIR",
            help=what,
            shell_complete=folders,
        ),
        click.option("--json", "as_json", is_flag=True, help=as_json),
        click.option(
            "--outcome", type=Path, hidden=True, help="File for the outcome of a rank that this command started."
        ),
    )


# What commands have in common: click's settings, ``--set``, the flags of a program that runs in this process.


HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
"""click's settings of a command."""
BEFORE_A_SCRIPT: dict[str, Any] = {**HELP, "allow_interspersed_args": False}
"""click's settings of a command whose own flags end where the script's begin."""
DASHES_ALLOWED: dict[str, Any] = {**BEFORE_A_SCRIPT, "token_normalize_func": lambda name: name.replace("-", "_")}
"""click's settings of such a command that takes ``--log-dir`` for ``--log_dir`` as well."""


def set_option(command: Command) -> Command:
    """Add the flag to a command, as ``settings``."""
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KNOB=VALUE",
        help="Set a knob, whatever profile and script set; may be repeated.",
        shell_complete=knobs,
    )(command)


def ask_here(strategy: str | None, settings: Sequence[str]) -> None:
    """Let the program that this process runs next train with these flags. Raises ProfileError for a bad ``--set``."""
    from fleet_train.cluster import environment

    if settings:
        from fleet_train.profile.catalogue import check_assignments

        check_assignments(settings)
    if sentence := environment.ask_here(os.environ, strategy, settings):
        click.echo(f"fleet_train: {sentence}", err=True)


# Options of the commands that look at a running job from outside.


def with_store_port(node: str, started_port: int) -> str:
    """A node with its number of ranks, ``10.0.0.2:2``, becomes its store, ``10.0.0.2:6172``."""
    from fleet_train.cluster.cluster import MOST_PROCESSES, is_number

    host, _, number = node.rpartition(":")
    is_count = bool(host) and is_number(number) and 1 <= int(number) <= MOST_PROCESSES
    return f"{host}:{started_port + int(number)}" if is_count else node


def of_a_job(command: Command) -> Command:
    """Add the flags to a command, as ``log_dir``, ``ips`` and ``port``, the port of the store."""
    from fleet_train.cluster.cluster import DEFAULT_STARTED_PORT
    from fleet_train.cluster.store.access import SECRET_FILE

    @functools.wraps(command)
    def with_port(nproc: int, started_port: int, job_secret_file: Path | None, **named: Any) -> Any:
        if named["log_dir"] is not None and named["ips"] is not None:
            raise click.UsageError("give --log_dir or --ips, not both")
        if job_secret_file is not None:
            os.environ[SECRET_FILE] = str(job_secret_file)
        if named["ips"] is not None:
            named["ips"] = ",".join(with_store_port(each.strip(), started_port) for each in named["ips"].split(","))
        return command(port=started_port + nproc, **named)

    options = all_of(
        click.option(
            "--log_dir",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="The job's log folder, of its first node.",
            shell_complete=folders,
        ),
        click.option(
            "--ips",
            "--cluster_node_ips",
            metavar="A,B:2",
            help="The job's machines, as for launch: the first that answers is asked. HOST:PORT names a store.",
        ),
        click.option(
            "--nproc",
            "--nproc_per_node",
            type=WholeNumberRange(1),
            default=1,
            show_default=True,
            help="With --ips: ranks per machine.",
        ),
        click.option(
            "--started_port",
            "--start_port",
            type=WholeNumber(),
            default=DEFAULT_STARTED_PORT,
            show_default=True,
            metavar="PORT",
            help="With --ips: first port, as for launch.",
        ),
        click.option(
            "--job_secret_file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="The job's secret, if it has one.",
            shell_complete=files,
        ),
    )
    return options(with_port)  # type: ignore[return-value]
