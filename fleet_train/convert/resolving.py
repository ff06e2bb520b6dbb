"""Which profile a script trains with, and what of it acts on the process or depends on the device.

Flags of the command line win over the script, the script over a profile's file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paddle

from fleet_train.cluster.environment import asked_settings, asked_strategy
from fleet_train.collectives.engine import Engine
from fleet_train.convert import process
from fleet_train.convert.paddle_optimizers import Unwrapped
from fleet_train.convert.strategy import DistributedStrategy
from fleet_train.errors import ProfileError
from fleet_train.profile import Profile, check_flags, load_profile
from fleet_train.profile.catalogue import with_assignments
from fleet_train.profile.fleet_objects import asked_of_stock
from fleet_train.profile.knobs import AUTO, hidden, shown


def resolve(
    strategy: Any, by_init: Any, offered: Profile | None, wrappers: Unwrapped, node_num: int
) -> tuple[Profile, list[str]]:
    """The profile, and sentences for rank 0 about what was asked for in vain.

    ``strategy`` is that of ``distributed_optimizer``, ``by_init`` that of ``init``: the first one in which something
    was set is the script's, else ``offered``, that of ``spawn``. The launcher's ``--strategy`` replaces it, ``--set``
    changes single knobs of either. Raises ProfileError.
    """
    flag, settings = asked_strategy(os.environ), asked_settings(os.environ)
    given = [each for each in (strategy, by_init) if not _is_empty(each)]
    notices = []
    if len(given) == 2 and strategy is not by_init:
        notices.append("the strategy of fleet.distributed_optimizer is used, that of fleet.init is not")
    if given and offered is not None:
        notices.append(f"the function gives its own strategy; that of spawn is not used ({offered.name})")
    of_script = _profile_of(given[0]) if given else offered
    if flag is not None:
        profile = wrappers.under(load_profile(flag))
    else:
        profile = of_script or load_profile("multi_node" if node_num > 1 else "single_node")
        profile = wrappers.added_to(profile)
    if not given and (strategy is not None or by_init is not None):
        notices.append(f"nothing was set in the script's strategy: profile '{profile.name}' is used")
    profile = with_assignments(profile, settings)
    wrappers.refuse_steps_without_updates(profile)
    asked = {knob: getattr(of_script, knob) for knob in of_script.explicit} if of_script else {}
    asked |= {knob: value for knob, (value, _) in wrappers.settings.items()}
    flags = " and ".join([f"--strategy {flag}"] * (flag is not None) + ["--set"] * bool(settings))
    return profile, notices + _overruled(flags, profile, asked)


def _overruled(flags: str, used: Profile, asked: Mapping[str, Any]) -> list[str]:
    """The sentence about what the script asks for and does not get."""
    lost = [
        f"{knob} is {_in_words(knob, getattr(used, knob))}, not {_in_words(knob, value)}"
        for knob, value in sorted(asked.items())
        if getattr(used, knob) != value
    ]
    return [f"{flags} wins over the script: {'; '.join(lost)}"] if lost and flags else []


def _in_words(knob: str, value: Any) -> str:
    return shown(hidden(value) if knob == "environment" else value)


def _is_empty(strategy: Any) -> bool:
    """Whether a strategy of ours or of Paddle asks for nothing: no object, or one in which nothing was set."""
    if strategy is None or isinstance(strategy, (str, Path, Profile)):
        return strategy is None
    return strategy.is_empty() if isinstance(strategy, DistributedStrategy) else not asked_of_stock(strategy)


def _profile_of(strategy: Any) -> Profile:
    if isinstance(strategy, (str, Path)):
        return load_profile(str(strategy))
    if isinstance(strategy, Profile):
        return strategy
    if isinstance(strategy, DistributedStrategy):
        return strategy.to_profile()
    return DistributedStrategy.from_stock(strategy).to_profile()


def refuse_on_this_device(profile: Profile, place: Any) -> None:
    """Raise ProfileError for settings that the backend of ``place`` cannot carry out."""
    if profile.compression == "fp16" and isinstance(place, paddle.CPUPlace):
        raise ProfileError(
            "compression: fp16 is refused on Gloo: Paddle 3.3.1's Gloo returns inf for every sum of float16; use "
            "compression: bf16 (the same bytes, float32's range), or NCCL"
        )


def fitted_to(engine: Engine, profile: Profile) -> tuple[Profile, list[str]]:
    """The profile as ``engine`` carries it out, and rank 0's notes on the difference."""
    if engine.side_by_side or profile.nccl_comm_num in (1, AUTO):
        return profile, []
    said = (
        f"nccl_comm_num: {profile.nccl_comm_num} ({profile.origin('nccl_comm_num')}) is mapped to 1 on NCCL: "
        "kernels of several communicators over the same ranks may run in a different order on each device, which can "
        "deadlock; one communicator has several channels (NCCL_MIN_NCHANNELS)"
    )
    return profile.with_settings(profile.origin("nccl_comm_num"), nccl_comm_num=1), [said]


def apply_environment(profile: Profile) -> list[str]:
    """Set what can still be set; returns notes to the user.

    Paddle's flags take effect at run time; other variables are read at process start, which has passed. A variable that
    is already set in the environment is left unchanged. Raises ProfileError for unknown ``FLAGS_*``.
    """
    check_flags(profile, paddle.base.core.globals().keys())
    wanted = profile.worker_environment()
    kept = sorted(name for name, value in wanted.items() if os.environ.get(name, value) != value)
    missing = {name: value for name, value in wanted.items() if name not in os.environ}
    flags = {name: _typed(name, value) for name, value in missing.items() if name.startswith("FLAGS_")}
    late = sorted(missing.keys() - flags.keys())
    os.environ.update({name: missing[name] for name in late})
    if flags:
        process.set_flags(flags)
    notices = []
    if kept:
        notices.append(f"the environment's own {', '.join(kept)} overrides profile '{profile.name}'")
    if late:
        notices.append(
            f"profile '{profile.name}' sets {', '.join(late)} after this process started, too late for variables "
            "read at start: start with python -m fleet_train launch --strategy"
        )
    return notices


def _typed(name: str, text: str) -> Any:
    """``text`` converted to the type of this flag in Paddle; ``set_flags`` takes no other."""
    kind = type(paddle.get_flags(name)[name])
    try:
        return text.strip().lower() in ("1", "true") if kind is bool else kind(text)
    except ValueError:
        raise ProfileError(f"environment.{name}: its value is not of Paddle's type {kind.__name__}") from None
