"""What hosts have answered, judged: who can take part, at which address, with which variables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fleet_train.cluster.network import is_loopback

# Variables of this machine or session; all others go with the command.
_OF_THIS_MACHINE = frozenset(
    """
    _ DISPLAY HOME HOST HOSTNAME INVOCATION_ID JOURNAL_STREAM LOGNAME MAIL OLDPWD PWD SHELL SHLVL TEMP TERM TMP TMPDIR
    USER WAYLAND_DISPLAY WINDOWID XAUTHORITY FLEET_TRAIN_REPORT_TO
    """.split()
)
_OF_THIS_SESSION = ("DBUS_", "GPG_", "SSH_", "SUDO_", "TMUX", "XDG_")


def passed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that every host gets."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _OF_THIS_MACHINE and not name.startswith(_OF_THIS_SESSION)
    }


def problems_of(found: Mapping[str, Any], mine: Mapping[str, Any], host: str) -> list[str]:
    """What differs on a host from here, each with the rule and the fix. ``mine``: folder, interpreter, python, version,
    and the digests of files."""
    folder, python = mine["folder"], mine["interpreter"]
    if found["folder"]:
        return [
            f"the folder {folder} cannot be entered there ({found['folder']}); every host works in the folder in which "
            f"the command was typed: rsync -a {folder}/ {host}:{folder}/"
        ]
    if found["python"] != mine["python"]:
        return [f"{python} is Python {found['python']} there and {mine['python']} here; install the same version"]
    if not found["works"]:
        return [f"{python} -m fleet_train fails there: {found['version']}; install the same packages as here"]
    if found["version"] != mine["version"]:
        return [f"other versions there: {found['version']}; here: {mine['version']}; install the same"]
    return [
        f"{name} {'is another file' if found['files'].get(name) else 'does not exist'} there; every host has the same "
        f"files: rsync -a {folder}/ {host}:{folder}/"
        for name, digest in mine["files"].items()
        if digest and found["files"].get(name) != digest
    ]


def reachable(address: str) -> str:
    """The IPv4 address at which ssh has reached a host, if other hosts can use it; else empty."""
    address = address.removeprefix("::ffff:")
    return "" if ":" in address or not address or is_loopback(address) else address


def own_address(reached: str, towards: Sequence[str]) -> str:
    """A host's address in the job: that at which ssh has reached it if it is on the route to another host, or the one
    on most of the routes. Empty: there is none."""
    routes = [each for each in towards if each and not is_loopback(each)]
    if reached in routes or not routes:
        return reached
    return Counter(routes).most_common(1)[0][0]


def problems_of_addresses(names: Sequence[str], addresses: Sequence[str]) -> dict[int, list[str]]:
    """By host, why it has no address of its own."""
    problems = {}
    for index, address in enumerate(addresses):
        same = [name for other, name in enumerate(names) if addresses[other] == address and other != index]
        if not address:
            problems[index] = ["has no IPv4 address on a route to the other hosts; the hosts of a job need one each"]
        elif same:
            problems[index] = [
                f"has the address {address}, as {', '.join(same)} has: are they one machine? List it once"
            ]
    return problems


def exit_code(codes: Sequence[int], needed: int) -> int:
    """That of the job, from those of its commands in the order of their ends: the first failure, unless as many as are
    needed have succeeded."""
    failures = [code if code > 0 else 128 - code for code in codes if code]
    return failures[0] if failures and len(codes) - len(failures) < max(1, needed) else 0
