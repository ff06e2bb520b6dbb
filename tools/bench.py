"""Measure one thing, and keep a record of it: python tools/bench.py WHAT --help says what, and what it needs.

    python tools/bench.py control-plane --record docs/benchmarks
    sudo .venv/bin/python tools/bench.py strategies --quick
    sudo .venv/bin/python tools/bench.py strategies --task bytes --network 100mbit --record docs/benchmarks

Whatever is compared runs in turn within a round, and ratios are taken within a round: both sides have the same load
beside them. A page shows medians over the rounds. `--record FOLDER` writes FOLDER/DATE-WHAT.json, with every raw
figure, and a page for people beside it (.md); `quote` copies what such records say into profiles and pages.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Module, and its command if that is not ``main``. Imported when asked for: most import Paddle, which takes seconds.
MODULES = {
    "strategies": (
        "strategies",
        "Profiles beside PyTorch, Horovod, stock Paddle and nothing on an emulated network. Root.",
    ),
    "step": ("step", "Where the milliseconds of a float32 step are, beside PyTorch's. Root."),
    "prediction": ("labs:prediction", "What recommend predicts, beside what its trials take. Root."),
    "doctor": ("labs:doctor_alarms", "False alarms of the doctor on emulated machines without a fault. Root."),
    "control-plane": ("control_plane", "What gates, joining, strangers and lost relays cost, 32 to 10,000 ranks."),
    "restart": ("restart", "From kill -9 of a rank to the next new step, beside torchrun and Ray Train."),
    "sharding": (
        "sharding",
        "A sharded optimizer beside a whole one: memory, steps, bytes on an emulated network. Root.",
    ),
    "shares": ("shares", "Unlike machines together, by shares of the joint batch, over each alone. Root."),
    "streams": ("streams", "A model of several GPUs' streams: deadlocks under random interleavings."),
    "coding": ("coding", "What compressions cost a rank beside their bytes: the constants of their descriptions."),
    "embeddings": ("embeddings", "Touched rows of embeddings beside whole tables, PyTorch and Horovod. Root."),
    "figures": ("figures", "Write which record each figure of README and docs comes from: docs/figures.md."),
    "quote": ("quote", "Write what the records say into strategies/measured.json and docs/strategies.md."),
}


def taught(documented: object) -> str:
    """A docstring as click takes a help text whose lines stay as they are."""
    return "\b\n" + (inspect.getdoc(documented) or "").replace("\n\n", "\n\n\b\n")


class Benches(click.Group):
    """Each command is one of a module of tools/benchmarks."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in MODULES:
            return None
        name, _, attribute = MODULES[cmd_name][0].partition(":")
        module = importlib.import_module(f"tools.benchmarks.{name}")
        command: click.Command = getattr(module, attribute or "main")
        command.help = taught(command.callback if attribute else module)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("What"):
            formatter.write_dl([(name, words) for name, (_, words) in MODULES.items()])


@click.command(
    cls=Benches,
    help=taught(sys.modules[__name__]),
    subcommand_metavar="WHAT [OPTIONS]",
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
def main() -> None: ...


if __name__ == "__main__":
    main()
