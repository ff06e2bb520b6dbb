"""`Profile` as a value: defaults, digests, copies, `--set`, Paddle 1.8's flags, and which strategies go together."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from fleet_train.errors import ProfileError
from fleet_train.profile import Profile, load_profile
from fleet_train.profile.catalogue import check_assignments, laid_over, shown_assignments, with_assignments
from tests.support.processes import ROOT


def test_importing_profiles_imports_none_of_the_large_libraries() -> None:
    code = "import sys, fleet_train.profile; print({'paddle', 'numpy', 'visualdl', 'sklearn'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def refusal(**settings: Any) -> str:
    with pytest.raises(ProfileError) as caught:
        Profile(**settings)
    return str(caught.value)


def test_profiles_with_equal_values_are_equal_wherever_they_were_written_and_cannot_be_changed() -> None:
    assert Profile().explicit == frozenset()
    assert Profile(name="x", nccl_comm_num=1).explicit == {"nccl_comm_num"}
    assert Profile(nccl_comm_num="auto") == Profile()
    assert hash(Profile(nccl_comm_num="auto")) == hash(Profile())
    assert Profile(nccl_comm_num=2) != Profile()
    with pytest.raises(ValidationError, match="frozen"):
        Profile().nccl_comm_num = 2  # type: ignore[misc]


def test_the_digest_is_of_what_changes_training() -> None:
    same, other = Profile(name="other", description="text", nccl_comm_num="auto"), Profile(nccl_comm_num=2)
    assert Profile().digest() == same.digest() != other.digest()
    assert Profile().digest() != Profile(environment={"NCCL_ALGO": "Tree"}).digest()
    assert Profile(environment={"A": "1", "B": "2"}).digest() == Profile(environment={"B": "2", "A": "1"}).digest()
    assert int(Profile().digest(), 16) >= 0


def test_wrong_settings_are_reported_all_at_once() -> None:
    wrong = {"nccl_comm_num": "2", "fetch_frequenzy": 1, "fuse_all_reduce_ops": 1, "environment": {"A": 1}}
    assert sorted(refusal(**wrong).split("\n")) == [
        "environment.A: given a whole number; allowed: text",
        "fetch_frequenzy: unknown key; did you mean 'fetch_frequency'?",
        "fuse_all_reduce_ops: given 1 (a whole number); allowed: true or false",
        "nccl_comm_num: given '2' (text); allowed: a whole number, 1 to 16, or auto",
    ]


SHARES = "allowed: a list of numbers, one for each rank"
CHOICES = "allowed: one of constant, doubling, adaptive"
SCALED = {"amp_level": "O2", "amp_dtype": "float16"}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        *(({"nccl_comm_num": value}, "nccl_comm_num: given ") for value in (True, 2.0, "2", [2], 0, 17)),
        ({"nccl_comm_num": None}, "nccl_comm_num: given no value"),
        *(
            ({"use_local_sgd": True, "local_sgd_schedule": value}, f"local_sgd_schedule: given {shown}")
            for value, shown in (
                ("Adaptive", f"'Adaptive'; {CHOICES}; did you mean 'adaptive'?"),
                (2, f"2 (a whole number); {CHOICES}"),
                (None, f"no value; {CHOICES}"),
            )
        ),
        ({"amp_level": "O3"}, "amp_level: given 'O3': Apex's pure half precision also keeps parameters"),
        (
            {"recompute_every_blocks": 1, "recompute_checkpoints": ["w"]},
            "recompute_checkpoints: sets where recompute splits, as recompute_every_blocks",
        ),
        ({"batch_shares": [1, 0]}, "batch_shares: given [1, 0]; allowed: numbers above 0, one for each rank"),
        ({"batch_shares": []}, "batch_shares: given []; allowed: numbers above 0, one for each rank"),
        ({"batch_shares": [3, "1"]}, f"batch_shares: given '1' (text); {SHARES}, equal, or auto"),
        ({"batch_shares": 3}, f"batch_shares: given 3 (a whole number); {SHARES}, equal, or auto"),
        (
            {"batch_shares": "auto", "max_share": [1, 1.5]},
            "max_share: given [1, 1.5]; allowed: numbers above 0 and up to 1, one for each rank",
        ),
        ({"max_share": 0.5}, "max_share: has no effect while batch_shares is equal; set batch_shares: auto, or remove"),
        (
            {"batch_shares": [3, 1], "average_over": "ranks"},
            "batch_shares: unlike batches would count alike with average_over: ranks; use average_over: samples",
        ),
        (
            {"batch_shares": "auto", "use_local_sgd": True},
            "batch_shares: LocalSGD averages parameters of ranks alike, whatever number of samples they have seen",
        ),
        (
            {"accumulate_steps": 2, **SCALED},
            "accumulate_steps: 2 does not go with amp_dtype: float16: skipping by the loss scale",
        ),
        (
            {"use_local_sgd": True, **SCALED},
            "use_local_sgd: does not go with amp_dtype: float16: ranks that average no gradients would skip",
        ),
        (
            {"accumulate_steps": 2, "amp_dtype": "float16"},
            "amp_dtype: has no effect while amp_level is O0; set amp_level: O1 or O2, or remove amp_dtype",
        ),
        (
            {"fuse_grad_size_in_MB": 4, "environment": {"FLAGS_fuse_parameter_memory_size": "8"}},
            "environment.FLAGS_fuse_parameter_memory_size: means fuse_grad_size_in_MB: 8, but fuse_grad_size_in_MB",
        ),
        *(
            (
                {"environment": {f"FLAGS_fuse_parameter_{flag}": text}},
                f"environment.FLAGS_fuse_parameter_{flag}: {said}",
            )
            for flag, text, said in (
                ("memory_size", "lots", "given an invalid text; allowed: a number, more than 0 and up to 4096"),
                ("groups_size", "2.5", "given an invalid text; allowed: a whole number, 1 to 100000"),
            )
        ),
    ],
)
def test_one_wrong_setting_is_refused_once_with_the_rule_and_the_way_out(settings: dict[str, Any], said: str) -> None:
    message = refusal(**settings)
    assert message.startswith(said)
    assert "\n" not in message


def test_values_are_those_of_yaml() -> None:
    noted = with_assignments(Profile().with_notes(["a note"]), ["FLAGS_fuse_parameter_memory_size=8"])
    assert (noted.fuse_grad_size_in_MB, noted.notes) == (8, ("a note",))
    shares = with_assignments(Profile(), ["batch_shares=auto", "max_share=[0.5, 1]"])
    assert (shares.batch_shares, shares.max_share) == ("auto", [0.5, 1.0])
    assert with_assignments(Profile(), ["batch_shares=[3, 1.5]"]).batch_shares == [3.0, 1.5]
    texts = ["nccl_comm_num=2", "outer_lr=0.5", "use_local_sgd=true", "recompute_checkpoints=[a, b]"]
    read = {"nccl_comm_num": 2, "outer_lr": 0.5, "use_local_sgd": True, "recompute_checkpoints": ["a", "b"]}
    assert check_assignments([*texts, "fuse_grad_size_in_MB=auto"]) == read | {"fuse_grad_size_in_MB": "auto"}
    assert check_assignments(["environment.A=1", "environment.B=x=y"]) == {"environment": {"A": "1", "B": "x=y"}}
    assert check_assignments([]) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nccl_com_num=2", "--set: nccl_com_num: unknown key; did you mean 'nccl_comm_num'?"),
        ("nccl_comm_num", "--set: 'nccl_comm_num' is not KNOB=VALUE; write for example --set nccl_comm_num=2"),
        ("compression=", "--set: compression: has no value; allowed: one of none, bf16, "),
        ("compression=[a", "--set: compression:1: is not YAML: "),
        ("extends=multi_node", "--set: extends: is a line of a file; give --strategy"),
        ("environment.NCCL_DEBUG=no", "--set: environment.NCCL_DEBUG: is read as a boolean by YAML"),
        ("environment.PADDLE_X=1", "--set: environment.PADDLE_X: the launcher sets this"),
    ],
)
def test_messages_are_those_of_a_file_and_name_the_flag(text: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        check_assignments([text])
    assert message in str(caught.value)


def test_every_problem_is_reported_and_a_second_value_is_one() -> None:
    with pytest.raises(ProfileError) as caught:
        check_assignments(["a=1", "nccl_comm_num=1", "nccl_comm_num=2"])
    assert str(caught.value).split("\n") == [
        "--set: a: unknown key",
        "--set: nccl_comm_num: is set again; keep one of the two",
    ]


def test_a_switch_takes_what_tunes_it_with_it_and_the_rest_stays() -> None:
    before = load_profile("powersgd")
    changed = with_assignments(before, ["compression=none", "environment.A=1"])
    assert changed.explicit == (before.explicit - {"powersgd_rank", "powersgd_start_step"}) | {"environment"}
    assert (changed.name, changed.description, changed.environment) == ("powersgd", before.description, {"A": "1"})
    assert (changed.origin("compression"), changed.origin("environment.A")) == ("--set", "--set")
    assert "multi_node.yaml:" in changed.origin("fetch_frequency")
    assert with_assignments(before, []) is before


def test_a_profile_over_another() -> None:
    below = Profile(amp_level="O1", amp_dtype="float16", amp_init_loss_scaling=8.0, fetch_frequency=2)
    with pytest.raises(ProfileError, match="accumulate_steps"):
        laid_over(below, Profile(accumulate_steps=2))
    over = laid_over(below, Profile(name="above", amp_dtype="bfloat16", amp_level="O2"))
    assert over.explicit == {"amp_level", "amp_dtype", "fetch_frequency"}
    assert over.name == "above"


def test_values_of_variables_are_not_shown() -> None:
    shown = shown_assignments(["nccl_comm_num=2", "environment.TOKEN=secret"])
    assert shown.startswith("environment.TOKEN=(digest ")
    assert shown.endswith(" nccl_comm_num=2")
    assert "secret" not in shown
    assert shown != shown_assignments(["nccl_comm_num=2", "environment.TOKEN=other"])
