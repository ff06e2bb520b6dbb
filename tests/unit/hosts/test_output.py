"""Lines of hosts with their names, and log files that come in pieces."""

from __future__ import annotations

import base64
from pathlib import Path

from fleet_train.hosts.output import Lines, LogFiles


def test_whole_lines_are_shown_after_the_hosts_name() -> None:
    shown: list[bytes] = []
    lines = Lines(b"pc1: ", shown.append)
    for piece in (b"one\ntw", b"o\n", b"10%\r20%\r", b"end"):
        lines.feed(piece)
    lines.close()
    assert shown == [b"pc1: one\n", b"pc1: two\n", b"pc1: 10%\rpc1: 20%\r", b"pc1: end\n"]


def test_pieces_of_a_file_are_put_together_and_a_new_one_replaces_it(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path / "pc2")
    for at, text in ((0, b"old and long"), (0, b"one"), (3, b"two")):
        logs.write("workerlog.0", at, base64.b64encode(text).decode())
    assert (tmp_path / "pc2" / "workerlog.0").read_bytes() == b"onetwo"


def test_a_host_writes_into_its_own_folder_only(tmp_path: Path) -> None:
    logs = LogFiles(tmp_path / "pc2")
    for name in ("../evil", "/tmp/evil", ".lock"):
        logs.write(name, 0, "")
    assert list(tmp_path.iterdir()) == []
