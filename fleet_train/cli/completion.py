"""``python -m fleet_train completion``: the script that makes a shell complete our commands, and its answers."""

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

from fleet_train.cli.options.completing import Items

NAME = "fleet_train"
VARIABLE = "_FLEET_TRAIN_COMPLETE"
"""By which a shell asks, as click has it."""
_MAIN = Path(__file__).resolve().parents[1] / "__main__.py"

_EPILOG = """\b
bash, into ~/.bashrc:
  eval "$(python -m fleet_train completion bash)"
\b
zsh, into ~/.zshrc, behind compinit:
  eval "$(python -m fleet_train completion zsh)"
\b
fish, once:
  python -m fleet_train completion fish > ~/.config/fish/conf.d/fleet_train.fish
\b
Completed is the command fleet_train, which is the same as python -m fleet_train. Where it is not
installed the script makes it: a function that runs this Python with this package. What is typed as
python -m fleet_train is not completed: that completion is Python's own.
\b
Commands, flags and values are completed: profiles for --strategy, engines for --engine, networks
for --model, files and folders where a path is meant.
"""


class _Runs(ShellComplete):
    """Asks this Python and this package, whether or not a program ``fleet_train`` is installed."""

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
        """bash makes three words of ``--strategy=multi``."""
        words, incomplete = super().get_completion_args()
        return [word for word in words if word != "="], incomplete


class _ReplacesWords(_Runs):
    """zsh and fish put what they are offered in the place of the whole word ``--strategy=multi``."""

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
    """Before click looks at the variable by which a shell asks."""
    for name, each in SHELLS.items():
        add_completion_class(each, name)


@click.command(
    name="completion",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the script that makes a shell complete our commands at TAB."""
    nothing: dict[str, Any] = {}
    click.echo(SHELLS[shell](context.find_root().command, nothing, NAME, VARIABLE).source(), nl=False)


def completions(commands: click.Command, *words: str) -> Items:
    """What may stand in place of the last of these words, which begin behind ``fleet_train``."""
    return ShellComplete(commands, {}, NAME, VARIABLE).get_completions(list(words[:-1]), words[-1])
