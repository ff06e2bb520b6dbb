"""tools/examples/cluster/Dockerfile, and the commands that it and its page print."""

from __future__ import annotations

import re
import shlex

from fleet_train.cli import launch as cli
from fleet_train.cli.on_hosts import FLAGS
from tests.support.commands import shell_commands
from tests.support.processes import ROOT

DOCKERFILE = (ROOT / "tools/examples/cluster/Dockerfile").read_text()
PAGE = (ROOT / "docs/engines.md").read_text()


def commands(text: str) -> list[str]:
    return [each for each in shell_commands(text) if "docker" in each]


def test_the_file_and_the_page_print_the_same_commands() -> None:
    comment = re.sub(r"^# ?", "", DOCKERFILE.partition("FROM")[0], flags=re.MULTILINE).replace("\\\n", " ")
    comment = re.sub(r"\s+", " ", comment)
    for command in commands(PAGE):
        assert command in comment


def test_what_the_container_is_given_is_a_launch() -> None:
    run = shlex.split(next(each for each in commands(PAGE) if each.startswith("docker run")))
    entry, *arguments = run[run.index("my-training", run.index("-v")) + 1 :]
    assert entry == "launch"
    context = cli.command.make_context("launch", arguments)
    asked = {name: value for name, value in context.params.items() if name not in {"dry_run", *FLAGS}}
    request = cli.read_request(**asked)
    assert (request.hosts, request.command) == (("192.168.1.2", "192.168.1.3"), ("train.py",))
    assert (
        int(next(each for each in run if "stop-timeout" in each).partition("=")[2]) >= 2 * request.faults.grace_seconds
    )


def test_the_files_that_it_installs_are_in_the_checkout() -> None:
    assert re.findall(r"requirements\S*\.txt", DOCKERFILE)
    for name in set(re.findall(r"requirements[\w-]*\.txt", DOCKERFILE)):
        assert (ROOT / name).is_file()
