"""``--hosts``, ``--hosts_file`` and ``--ssh_config``: a command that is typed once runs on all of these hosts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from fleet_train.cli.options import Command, all_of, files
from fleet_train.errors import ClusterError

if TYPE_CHECKING:
    from fleet_train.hosts.job import Where

FLAGS = ("hosts", "hosts_file", "ssh_config")
FOUND_BY_HOSTS = {
    "cluster_node_ips": "the addresses are found on the hosts",
    "ips": "the addresses are found on the hosts",
    "node_ip": "each host's own address is found there",
    "use_paddlecloud": "the hosts are given",
    "engine": "the hosts are given",
}
"""Flags that --hosts replaces, with the reason."""

OF_HOSTS = dict.fromkeys(
    ("log_dir", "ips", "nproc", "started_port", "job_secret_file"), "each host is asked for its own ranks"
)
"""The same for commands that look at a running job."""
_NUMBERS = ("nproc", "nproc_per_node")


def on_hosts(run: Callable[..., int], refused: Mapping[str, str] = FOUND_BY_HOSTS) -> Callable[[Command], Command]:
    """Add the options to a command. With hosts, ``run(context, where, **flags)`` is called instead of it."""

    def add(command: Command) -> Command:
        @functools.wraps(command)
        @click.pass_context
        def either(
            context: click.Context, /, hosts: str | None, hosts_file: Path | None, ssh_config: Path | None, **flags: Any
        ) -> None:
            where = _where(hosts, hosts_file, ssh_config)
            if where is None:
                command(**flags)
                return
            for parameter in _given(context):
                if parameter.name in refused:
                    raise ClusterError(
                        f"{parameter.opts[0]} and --hosts do not go together: {refused[parameter.name]}; leave it out"
                    )
                if parameter.name in _NUMBERS and all(host.processes for host in where.hosts):
                    raise ClusterError(
                        f"{parameter.opts[0]} is for hosts without a number, and each has one in --hosts; leave it out"
                    )
            context.exit(run(context, where, **flags))

        return _OPTIONS(either)  # type: ignore[return-value]

    return add


def examine_on_hosts(name: str, leaves: str = "") -> Callable[..., int]:
    """``run`` of `on_hosts` for a command whose first rank reports."""

    def run(context: click.Context, where: Where, **flags: Any) -> int:
        from fleet_train.hosts.job import Command as OnHosts
        from fleet_train.hosts.job import examine

        shared = [each for each in (flags.get("script"), flags.get("strategy")) if each and Path(each).is_file()]
        return examine(OnHosts(name, words(context), tuple(shared)), where, leaves)

    return run


_OPTIONS = all_of(
    click.option(
        "--hosts",
        metavar="A,B:2",
        help="Run on these hosts, over OpenSSH, and bring the output here: the command is typed once, on any machine. "
        "B:2: two processes there.",
    ),
    click.option(
        "--hosts_file",
        type=Path,
        metavar="FILE",
        help="The same from a file, a host a line; pc2 slots=2 is pc2:2.",
        shell_complete=files,
    ),
    click.option("--ssh_config", type=Path, metavar="FILE", help="With --hosts: ssh -F FILE.", shell_complete=files),
)


def _where(hosts: str | None, hosts_file: Path | None, ssh_config: Path | None) -> Where | None:
    if hosts is None and hosts_file is None:
        if ssh_config is not None:
            raise ClusterError("--ssh_config is for --hosts, which is not given")
        return None
    from fleet_train.hosts.entries import read_hosts, read_hosts_file
    from fleet_train.hosts.job import Where

    if hosts is not None and hosts_file is not None:
        raise ClusterError("give --hosts or --hosts_file, not both")
    for flag, path in (("--hosts_file", hosts_file), ("--ssh_config", ssh_config)):
        if path is not None and not path.is_file():
            raise ClusterError(f"{flag}={path}: there is no such file")
    if hosts is not None:
        listed = read_hosts(hosts)
    else:
        assert hosts_file is not None
        listed = read_hosts_file(hosts_file.read_text(), str(hosts_file))
    return Where(listed, ssh_config)


def _given(context: click.Context) -> Iterator[click.Parameter]:
    for parameter in context.command.params:
        if parameter.name is not None and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE:
            yield parameter


def words(context: click.Context, without: Collection[str] = ()) -> tuple[str, ...]:
    """The flags and arguments that were typed, without these and those of ``on_hosts``."""
    flags: list[str] = []
    arguments: list[str] = []
    for parameter in _given(context):
        value = context.params[parameter.name or ""]
        if parameter.name in {*FLAGS, *without}:
            continue
        if isinstance(parameter, click.Argument):
            arguments += value
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            flags += [parameter.opts[0]] * bool(value)
        else:
            flags += [f"{parameter.opts[0]}={each}" for each in (value if parameter.multiple else [value])]
    ends = bool(arguments) and arguments[0].startswith("-")  # they are a script's
    return (*flags, *["--"] * ends, *arguments)
