from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_train.cli import profile_tables
from fleet_train.errors import UNPRINTABLE, ProfileError
from fleet_train.profile import KNOBS, load_profile
from fleet_train.profile.catalogue import catalogue_folder
from fleet_train.profile.profile import comparable
from tests.unit.fuzz import check, fixed, mutated

CANARY = "canary7f3a"
VALUES = (
    "1", "0", "-1", "2.5", "1e-3", "1.0e+999", ".inf", "-.inf", ".nan", "0x1F", "0o7", "010", "1:30", "1_000",
    "9" * 5_000, "'9'", "yes", "no", "on", "true", "~", "null", "''", '""', "=", "<<", "2026-01-01", "none", "int4",
    "[]", "{}", "[1, 2]", "{a: 1}", "[" * 50, "&a [*a]", "*a", "&a 1", "!!int x", "!!float '[1]'", "!!bool 7",
    "!!binary ab", "!!set {a}", "!!python/name:os.system", "!x 1", "!!str 1", "!!null x", '"\\e[31m"',
    '"\\U00110000"', '"\\ud800"', "|\n    a\n    b", ">-\n    a", "? a", "- a", "%", "@", "`", "\t1", "\ufeff1",
    "\u2028", "\x85", "diloco", "powersgd", "doubling", "bfloat16", "O1", "16", "multi_node", "./a.yaml", "~nobody",
    "/etc/shadow",
)  # fmt: skip
NAMES = (*KNOBS, "extends", "name", "unknown", "nccl_com_num", "<<", "? x", "'q'", '"\\e"', "1", "-", "a.b", "PATH", "")
VARIABLES = ("NCCL_DEBUG", "FLAGS_sync_nccl_allreduce", "FLAGS_x", "PADDLE_X", "a-b", "A=B", "LD_PRELOAD", "''", "1")
lines = st.builds("{}: {}".format, st.sampled_from(NAMES), st.sampled_from(VALUES))
secret_lines = st.builds(
    "{}: {}{}".format,
    st.sampled_from(VARIABLES),
    st.sampled_from((CANARY, f"'{CANARY}'", f"[{CANARY}]", f"!!int {CANARY}")),
    st.just(""),
)
documents = st.builds(
    lambda knobs, variables: "\n".join([*knobs, "environment:", *(f"  {line}" for line in variables)]),
    st.lists(lines, max_size=8),
    st.lists(secret_lines | lines, max_size=4),
)
catalogue = st.sampled_from([path.read_bytes() for path in sorted(catalogue_folder().glob("*.yaml"))])
tokens = tuple(
    value.encode(errors="surrogatepass") for value in (*VALUES, "\n", ": ", "- ", "#", "---\n", "\x00", "&a ")
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "a.yaml"


def load(path: Path, content: bytes) -> None:
    """A profile that everything takes that shows profiles, or a ProfileError to be shown."""
    shown: list[str] = []

    def show() -> None:
        profile = load_profile(str(path))
        json.dumps([profile_tables.details(profile), comparable(profile)], allow_nan=False)
        shown.append(profile_tables.knob_table(profile, 100) + repr(profile))
        shown.append(json.dumps(profile_tables.details(profile)))

    path.write_bytes(content)
    told = check(show, ProfileError) + "".join(shown)
    assert UNPRINTABLE.search(told) is None
    assert CANARY not in told


@fixed(150)
@given(st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode(errors="surrogatepass")))
def test_any_bytes(path: Path, content: bytes) -> None:
    load(path, content)


@fixed(200)
@given(documents)
def test_lines_of_knobs_with_any_value(path: Path, text: str) -> None:
    load(path, text.encode())


@fixed(150)
@given(mutated(catalogue, tokens))
def test_profiles_of_the_catalogue_with_something_changed(path: Path, content: bytes) -> None:
    load(path, content)
