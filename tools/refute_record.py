"""Mark a benchmark record as refuted, at its top. It is kept: raw times stay true, what was said of them does not.

    python tools/refute_record.py docs/benchmarks/2026-11-20-1gbit-2x1 --by "issue 10" --because "its commit is lost"

Name it in docs/benchmarks/README.md too, and take its figures away with `python tools/write_measured.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import click

from tools.benchmarks.records import mark


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("record", type=click.Path(path_type=Path))
@click.option("--by", required=True, help="What refutes it: an issue, a later record.")
@click.option("--because", required=True, help="What is wrong with it, in a sentence without its full stop.")
def main(record: Path, by: str, because: str) -> None:
    """RECORD is a path of docs/benchmarks without its ending."""
    try:
        mark(record, by, because)
    except (OSError, ValueError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"marked: {record}.json, {record}.md")


if __name__ == "__main__":
    main()
