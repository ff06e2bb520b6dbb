"""Files that are no profiles, or malicious ones: a ProfileError soon, in little memory, that quotes nothing."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path

import pytest

from fleet_train.cli import main
from fleet_train.errors import ProfileError
from fleet_train.profile import Profile, load_profile

SECRET_LINES = b"root:$y$j9T$canary/hash:19000:0:99999:7:::\nuser: *canary\nother: 'canary\n"


def refusal(name: str) -> str:
    """The message for a profile that must be refused, in less than 10 s of this process and 32 MB."""
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(ProfileError) as caught:
            load_profile(name)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < 10
    return str(caught.value)


@pytest.mark.parametrize("name", ["./shadow", "./shadow.yaml"])
@pytest.mark.parametrize(
    "content", [SECRET_LINES, b"canary\n", b"- canary\n", b"a: &canary 1\nb: &canary 2\n", b"a: !c!anary 1\n"]
)
def test_nothing_is_quoted_of_a_file_that_is_no_profile(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    (folder / "mine.yaml").write_text(f"extends: {name}\n")
    for asked in (name, "./mine.yaml"):
        message = refusal(asked)
        assert "canary" not in message
        assert "shadow" in message


def test_a_file_that_has_no_name_of_a_profile_is_not_read(folder: Path) -> None:
    (folder / "mine.yaml").write_text("extends: /etc/passwd\n")
    assert refusal("./mine.yaml") == (
        "mine.yaml:1: extends: /etc/passwd: is not a profile: its name must end in .yaml or .yml; rename it"
    )


def test_keys_that_are_no_names_are_not_quoted(folder: Path) -> None:
    (folder / "a.yaml").write_text("environment:\n  TOKEN=canary:\n'pass phrase canary': 1\n")
    assert refusal("./a.yaml").split("\n") == [
        "a.yaml:2: environment.?: is not a variable name; write NAME: value",
        "a.yaml:3: ?: is not a key of a profile; to build on another profile, use extends",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "environment: TOKEN=canary",
        "environment: [canary]",
        "environment:\n  TOKEN: [canary]",
        "environment:\n  TOKEN: {canary: canary}",
        'environment:\n  TOKEN: "canary\\e[31m"',
        "environment:\n  PADDLE_TOKEN: canary",
        "environment:\n  FLAGS_fuse_parameter_memory_size: canary",
        "environment:\n  FLAGS_enable_pir_api: canary",
        "environment:\n  TOKEN: !!bool canary",
    ],
)
def test_no_message_has_the_value_of_a_variable(folder: Path, text: str) -> None:
    (folder / "a.yaml").write_text(text)
    assert "canary" not in refusal("./a.yaml")


def test_no_message_of_python_settings_has_the_value_of_a_variable() -> None:
    for environment in ("canary", {"TOKEN": b"canary"}, {"TOKEN": ["canary"]}, {"FLAGS_sync_nccl_allreduce": "canary"}):
        with pytest.raises(ProfileError) as caught:
            Profile(environment=environment)
        assert "canary" not in str(caught.value)
    assert "canary" not in repr(Profile(environment={"TOKEN": "canary"}))


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(20)
)
HOSTILE = {
    "a number of 60,000 digits": "nccl_comm_num: " + "9" * 60_000,
    "a float in base 60": "outer_lr: 1" + ":59" * 20_000 + ".5",
    "a large exponent": "outer_lr: 1.0e+99999",
    "infinity": "use_local_sgd: true\nouter_optimizer: slowmo\nouter_lr: .inf",
    "a float by its tag only": "outer_lr: !!float '[1]'",
    "lists in lists": "[" * 60_000,
    "questions": "? " * 30_000,
    "a billion laughs": BOMB,
    "laughs in a list of names": "a: &a [x]\nrecompute_checkpoints: [" + ",".join(["*a"] * 10_000) + "]",
    "itself": "&a {b: *a}",
    "many keys": "".join(f"nccl_comm_nu{number}: 1\n" for number in range(3_000)),
    "many variables": "environment:\n" + "".join(f" A{number}: 1\n" for number in range(5_000)),
    "a long key": "a" * 60_000 + ": 1",
    "no character": 'description: "\\UFFFFFFFF"',
    "a large version": "%YAML 1." + "9" * 5_000 + "\n--- {a: 1}",
    "a NUL": 'description: "a\\0b"',
    "a control sequence": 'description: "\\e]0;title\\a\\e[2J"',
    "another direction": 'description: "\\u202Egnirts"',
    "a control sequence as a key": '"\\e[31m": 1',
    "an unknown tag": "nccl_comm_num: !<tag:\\e[31m> 1",
    "extends a NUL": 'extends: "./a\\0.yaml"',
    "extends itself": "extends: ./a.yaml",
    "extends a device": "extends: /dev/zero",
    "extends a folder": "extends: ./",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_profile_is_refused_in_bounded_time_and_memory(folder: Path, text: str) -> None:
    (folder / "a.yaml").write_text(text)
    message = refusal("./a.yaml")
    assert message.replace("\n", "").isprintable()
    assert len(message) < 20_000


def test_pipes_devices_and_huge_files_are_not_read(folder: Path) -> None:
    os.mkfifo(folder / "pipe.yaml")
    (folder / "zero.yaml").symlink_to("/dev/zero")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    with (folder / "huge.yaml").open("wb") as huge:
        huge.truncate(3 << 30)
    assert refusal("./pipe.yaml").startswith("pipe.yaml: is not a regular file;")
    assert refusal("./zero.yaml").startswith("zero.yaml: is not a regular file;")
    assert refusal("./loop.yaml").startswith("loop.yaml: no such file;")
    assert refusal("./huge.yaml") == (
        "huge.yaml: has 3221225472 bytes, at most 65536 are read. Is this the right file?"
    )


def test_the_command_ends_with_4_and_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "a.yaml").write_text('"\\e[31mred": 1\n')
    monkeypatch.setattr("sys.argv", ["fleet_train", "profiles", "./a.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 4
    assert capsys.readouterr().err.splitlines() == [
        "fleet_train: ProfileError: a.yaml:1: ?: is not a key of a profile; to build on another profile, use extends"
    ]
