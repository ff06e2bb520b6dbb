"""``python -m fleet_train completion``: the shell completion script of our commands, and its answers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
    add_completion_class,
)

from fleet_train.cli.options import HELP, Items

NAME = "fleet_train"
VARIABLE = "_FLEET_TRAIN_COMPLETE"
"""The variable by which a shell asks for completions, as in click."""
_MAIN = Path(__file__).resolve().parents[1] / "__main__.py"

_EPILOG = """\b
bash, into ~/.bashrc:
  eval "$(python -m fleet_train completion bash)"
\b
zsh, into ~/.zshrc, after compinit:
  eval "$(python -m fleet_train completion zsh)"
\b
fish, once:
  python -m fleet_train completion fish > ~/.config/fish/conf.d/fleet_train.fish
\b
The completed command is fleet_train, which is the same as python -m fleet_train. If it is not
installed, the script defines it as a function that runs this Python with this package. A command
typed as python -m fleet_train is not completed: there Python's own completion applies.
\b
Commands, flags and values are completed: profiles for --strategy, engines for --engine, networks
for --model, files and folders where a path is expected.
"""


class _Runs(ShellComplete):
    """Calls this Python and this package, whether or not a program ``fleet_train`` is installed."""

    definition = ""

    def source(self) -> str:
        run = f"{shlex.quote(sys.executable)} {shlex.quote(str(_MAIN))}"
        asked = super().source().replace("_complete $1)", f"_complete {run})")  # bash
        asked = asked.replace(f"_complete {NAME})", f"_complete {run})")  # zsh
        asked = asked.replace(f"(commandline -t) {NAME});", f"(commandline -t) {run});")  # fish
        asked = asked.replace(f"    (( ! $+commands[{NAME}] )) && return 1\n", "")  # zsh: a function will do
        return f"{self.definition.format(name=NAME, run=run)}{asked}"


class _Bash(_Runs, BashComplete):
    definition = 'command -v {name} >/dev/null || {name}() {{ {run} "$@"; }}\n'

    def get_completion_args(self) -> tuple[list[str], str]:
        """bash splits ``--strategy=multi`` into three words."""
        words, incomplete = super().get_completion_args()
        return [word for word in words if word != "="], incomplete


class _ReplacesWords(_Runs):
    """zsh and fish replace the whole word ``--strategy=multi`` with a completion."""

    def get_completions(self, args: list[str], incomplete: str) -> Items:
        items = super().get_completions(args, incomplete)
        flag, equals, _ = incomplete.partition("=")
        if not (equals and flag.startswith("--")):
            return items
        return [CompletionItem(f"{flag}={item.value}", item.type, item.help) for item in items if item.type == "plain"]


class _Zsh(_ReplacesWords, ZshComplete):
    definition = _Bash.definition


class _Fish(_ReplacesWords, FishComplete):
    definition = "type -q {name}; or function {name}; {run} $argv; end\n"


SHELLS: dict[str, type[ShellComplete]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def register() -> None:
    """Answers a shell's request before click reads the variable."""
    for name, each in SHELLS.items():
        add_completion_class(each, name)


@click.command(
    name="completion",
    epilog=_EPILOG,
    context_settings=HELP,
)
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that makes a shell complete these commands on TAB."""
    nothing: dict[str, Any] = {}
    click.echo(SHELLS[shell](context.find_root().command, nothing, NAME, VARIABLE).source(), nl=False)


def completions(commands: click.Command, *words: str) -> Items:
    """The completions of the last of these words, which start after ``fleet_train``."""
    return ShellComplete(commands, {}, NAME, VARIABLE).get_completions(list(words[:-1]), words[-1])
