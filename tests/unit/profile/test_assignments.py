"""``--set knob=value``: read as a profile's YAML, laid over a profile."""

from __future__ import annotations

import pytest

from fleet_train.errors import ProfileError
from fleet_train.profile import Profile, load_profile
from fleet_train.profile.catalogue import check_assignments, laid_over, shown_assignments, with_assignments


def test_values_are_those_of_yaml() -> None:
    texts = [
        "nccl_comm_num=2",
        "outer_lr=0.5",
        "use_local_sgd=true",
        "recompute_checkpoints=[a, b]",
        "compression=int8",
    ]
    assert check_assignments(texts) == {
        "nccl_comm_num": 2,
        "outer_lr": 0.5,
        "use_local_sgd": True,
        "recompute_checkpoints": ["a", "b"],
        "compression": "int8",
    }
    assert check_assignments(["fuse_grad_size_in_MB=auto"]) == {"fuse_grad_size_in_MB": "auto"}
    assert check_assignments(["environment.A=1", "environment.B=x=y"]) == {"environment": {"A": "1", "B": "x=y"}}
    assert check_assignments([]) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nccl_com_num=2", "--set: nccl_com_num: unknown key; did you mean 'nccl_comm_num'?"),
        ("nccl_comm_num=99", "--set: nccl_comm_num: given 99; allowed: a whole number, 1 to 16, or auto"),
        ("nccl_comm_num=010", "--set: nccl_comm_num: 010 is read as 8 by YAML; write a plain decimal number"),
        ("nccl_comm_num", "--set: 'nccl_comm_num' is not KNOB=VALUE; write for example --set nccl_comm_num=2"),
        ("compression=", "--set: compression: has no value; allowed: one of none, bf16, "),
        ("compression=int9", "did you mean 'int8'?"),
        (
            "use_local_sgd=1",
            "--set: use_local_sgd: given 1 (a number); allowed: true or false; write true without quotes",
        ),
        ("compression=[a", "--set: compression:1: is not YAML: "),
        ("extends=multi_node", "--set: extends: is a line of a file; give --strategy"),
        ("NCCL_DEBUG=INFO", "an environment variable goes below 'environment:'"),
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


def test_contradictions_are_those_of_the_whole_profile() -> None:
    with pytest.raises(ProfileError, match=r"^--set: local_sgd_steps: has no effect while use_local_sgd is false"):
        with_assignments(load_profile("multi_node"), ["local_sgd_steps=4"])
    assert with_assignments(load_profile("local_sgd"), ["local_sgd_steps=6"]).local_sgd_steps == 6


def test_old_flags_and_notes_are_kept() -> None:
    noted = with_assignments(Profile().with_notes(["a note"]), ["FLAGS_fuse_parameter_memory_size=8"])
    assert noted.fuse_grad_size_in_MB == 8
    assert noted.notes == ("a note",)


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
