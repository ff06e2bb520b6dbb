"""Names, sizes and variables as Kubernetes accepts them; errors say what was given, the rule and the fix."""

from __future__ import annotations

from decimal import Decimal

import pytest

from fleet_train.errors import ClusterError
from fleet_train.manifest import Training
from fleet_train.manifest.checks import (
    check_cpu,
    check_environment,
    check_memory,
    check_name,
    check_subdomain,
    quantity,
)
from fleet_train.manifest.kubernetes import Volume, backoff_limit


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", "8"),
        (".5", "0.5"),
        ("2.", "2"),
        ("500m", "0.5"),
        ("64Gi", str(64 << 30)),
        ("1k", "1000"),
        ("2E", "2000000000000000000"),
        ("1E3", "1000"),
        ("5e-1", "0.5"),
        ("100n", "1E-7"),
    ],
)
def test_quantities(text: str, value: str) -> None:
    assert quantity("--cpu", text) == Decimal(value)


@pytest.mark.parametrize(
    "text",
    ["", "8 Gi", "8gi", "8GB", "8K", "Gi", "-1", "+1", "1,5", "0x8", "1e", "\u0661", "nan", "1_000", "8\n", "9" * 50],
)
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ClusterError, match=r"--memory=.* is not a Kubernetes quantity: .* as in --memory=32Gi"):
        quantity("--memory", text)


def test_processors_are_counted_in_thousandths() -> None:
    assert check_cpu("0.125") == "0.125"
    for text, words in (("0", "give more than 0"), ("0.0001", "Kubernetes counts in thousandths")):
        with pytest.raises(ClusterError, match=f"--cpu={text}: {words}"):
            check_cpu(text)


@pytest.mark.parametrize(("text", "shown"), [("400m", "0.4"), ("512", "512"), ("1.00001k", "1000.01")])
def test_absurd_memory_sizes_are_refused(text: str, shown: str) -> None:
    with pytest.raises(ClusterError, match=rf"--memory={text} is {shown} bytes; .* did you mean [\d.]+Gi"):
        check_memory("--memory", text)


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("Digits", "use for example digits"),
        ("my_job.v2", "use for example my-job-v2"),
        ("a-", "use for example a"),
        ("2digits", "use for example digits"),
        ("", "use for example my-training"),
        ("a\n", "use for example a"),
        ("x" * 64, "use for example xxx"),
    ],
)
def test_what_is_no_name(name: str, fix: str) -> None:
    with pytest.raises(ClusterError, match=f"RFC 1123.*RFC 1035.*{fix}"):
        check_name("--name", name)


def test_the_last_pods_name_counts() -> None:
    for name in ("a", "digits", "a-1", "x" * 61):
        assert check_name("--name", name, "-9") == name
    with pytest.raises(ClusterError, match=r"has 62 characters, .* called x+-10: .* at most 63 .*; shorten it to 60"):
        check_name("--name", "x" * 62, "-10")


def test_names_of_objects_may_have_dots() -> None:
    assert check_subdomain("--volume", "team.data-1") == "team.data-1"
    for wrong in ("a..b", "A", "a_b", ".a", "a." * 130 + "a"):
        with pytest.raises(ClusterError, match="is not an object's name"):
            check_subdomain("--volume", wrong)


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["A"], "--env='A' is not NAME=VALUE"),
        (["=secret"], "--env=''=... is not NAME=VALUE"),
        (["1A=secret"], "does not begin with a digit"),
        (["A=secret", "A=secret"], "--env A=... is given twice"),
        (["A=secret\0"], "has a NUL in its value"),
    ],
)
def test_what_is_no_variable_and_no_value_is_in_an_error(pairs: list[str], said: str) -> None:
    with pytest.raises(ClusterError) as caught:
        check_environment(pairs)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)
    assert check_environment(["A=1", "B=", "C=x=y", "_d=$"]) == {"A": "1", "B": "", "C": "x=y", "_d": "$"}


@pytest.mark.parametrize(
    "text", ["runs", "runs:", ":/runs", "runs:/runs:rw", "runs:runs", "runs:/a/../b", "Runs:/runs"]
)
def test_what_is_no_volume(text: str) -> None:
    with pytest.raises(ClusterError, match="--volume"):
        Volume.read(text)
    assert Volume.read("runs:/runs") == Volume("runs", "/runs")
    assert Volume.read("team.data:/a/b:ro") == Volume("team.data", "/a/b", read_only=True)


@pytest.mark.parametrize(
    ("program", "is_module", "name"),
    [
        (("train.py",), False, "train"),
        (("src/My_Training.v2.py", "--a"), False, "my-training-v2"),
        (("2020.py",), False, "train-2020"),
        (("my.package.train_it",), True, "train-it"),
        (("x" * 80 + ".py",), False, "x" * 40),
    ],
)
def test_a_name_is_made_from_the_scripts(program: tuple[str, ...], is_module: bool, name: str) -> None:
    made = Training(program, 2, is_module=is_module).default_name()
    assert (made, check_name("--name", made)) == (name, name)


def test_a_paddlejobs_limit_counts_containers() -> None:
    """training-operator ``PastBackoffLimit``: the sum of all containers' restarts *reaches* the limit."""
    for nodes, retries in ((1, 0), (4, 0), (4, 6)):
        limit = backoff_limit(nodes, retries)
        assert nodes * retries < limit <= nodes * retries + 1
