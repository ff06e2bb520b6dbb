"""``fleet_train profiles``: the catalogue, or one profile with the fate of each knob."""

from __future__ import annotations

import json
import shutil

import click

from fleet_train.cli.options import profiles


@click.command(name="profiles")
@click.argument("profile", metavar="[NAME|FILE]", required=False, shell_complete=profiles)
@click.option("--all", "everything", is_flag=True, help="List every profile, not only those for nearly all cases.")
@click.option("--compatibility", is_flag=True, help="Show which strategies go together in one profile, and why.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs instead of text for people.")
def command(profile: str | None, everything: bool, compatibility: bool, as_json: bool) -> None:
    """List the strategy profiles, or show one with each knob's fate.

    Without an argument: the profiles for nearly all cases, with --all the whole catalogue, with the reason for each.
    With a profile's name or file: every knob with its value, where that was set, its default, its meaning and its
    fate, and what was measured with it.

    \b
    A knob is one of
      carried out   it does what it says
      mapped        what it asked for is done differently today (reported once on rank 0)
      refused       an error unless it has its default; the message says what to use instead

    \b
    Examples:
      fleet_train profiles
      fleet_train profiles --all
      fleet_train profiles multi_node
      fleet_train profiles ./my_profile.yaml --json
      fleet_train profiles --compatibility

    Your own profile is a YAML file that begins with `extends: multi_node` and sets the knobs that differ.
    Use it with `fleet_train launch --strategy NAME|FILE ...`, or in a script with
    DistributedStrategy.from_profile(...).
    """
    if compatibility and profile is not None:
        raise click.UsageError(f"--compatibility is one table for all profiles; leave out {profile!r}")
    if everything and (compatibility or profile is not None):
        raise click.UsageError("--all lists all profiles: give it without a profile and without --compatibility")
    from fleet_train.cli import profile_tables as tables

    if compatibility:
        click.echo(json.dumps(tables.pairs(), indent=2) if as_json else tables.compatibility_table(_width()))
    elif profile is None:
        shown = json.dumps(tables.catalogue(), indent=2) if as_json else tables.catalogue_table(_width(), everything)
        click.echo(shown)
    else:
        from fleet_train.profile import load_profile

        loaded = load_profile(profile)
        click.echo(json.dumps(tables.details(loaded), indent=2) if as_json else tables.knob_table(loaded, _width()))


def _width() -> int:
    return min(shutil.get_terminal_size((120, 24)).columns, 140)
