"""What the engine of a job cannot carry out of a profile is mapped, and reported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from fleet_train.collectives.engines import StreamEngine, ThreadEngine
from fleet_train.convert.planning import fitted_to
from fleet_train.profile import Profile, load_profile


@dataclass(frozen=True)
class Engine:
    """What a profile is fitted to."""

    side_by_side: bool


THREADS: Any = Engine(ThreadEngine.side_by_side)
STREAMS: Any = Engine(StreamEngine.side_by_side)


def test_threads_work_side_by_side_and_streams_do_not() -> None:
    assert (THREADS.side_by_side, STREAMS.side_by_side) == (True, False)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_threads_carry_out_any_number_of_communicators(number: int) -> None:
    profile = Profile(nccl_comm_num=number)
    assert fitted_to(THREADS, profile) == (profile, [])


def test_one_communicator_needs_no_message() -> None:
    profile = Profile()
    fitted, said = fitted_to(STREAMS, profile)
    assert fitted is profile
    assert said == []


@pytest.mark.parametrize("number", [2, 3, 8])
def test_streams_have_one_communicator_and_say_why(number: int) -> None:
    profile = Profile(nccl_comm_num=number, fuse_parameter_groups_size=3, accumulate_steps=2)
    fitted, said = fitted_to(STREAMS, profile)
    assert fitted.nccl_comm_num == 1
    assert fitted.settings() | {"nccl_comm_num": number} == profile.settings() | {"nccl_comm_num": number}
    (told,) = said
    assert told.startswith(f"nccl_comm_num: {number} (")
    assert "is mapped to 1 on NCCL" in told
    assert "NCCL_MIN_NCHANNELS" in told
    assert profile.nccl_comm_num == number


def test_messages_name_the_profile_that_asked() -> None:
    asked = load_profile("multi_node").with_settings("my script", nccl_comm_num=4)
    fitted, said = fitted_to(STREAMS, asked)
    assert asked.origin("nccl_comm_num") in said[0]
    assert fitted.origin("nccl_comm_num") == asked.origin("nccl_comm_num")
    assert fitted.explicit == asked.explicit
