"""Run as ranks: each case of the table with its knob and without it, and what this rank observes in both."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import threading
from typing import Any
from unittest import mock

import paddle

from fleet_train import fleet, role_maker
from fleet_train.convert import optimizer
from fleet_train.profile import Profile
from tests.parallel.knob_effects_case import Case
from tests.parallel.knob_effects_runs import RUNS
from tests.parallel.knob_effects_seen import Ran
from tests.parallel.knob_effects_table import CASES
from tests.parallel.knob_effects_watch import Watch, variables
from tests.support.worker import report


def run(case: Case, settings: dict[str, Any], environment: dict[str, str], watch: Watch) -> dict[str, Any]:
    text = io.StringIO()
    watch.begin(case.holds)
    with variables(environment), contextlib.redirect_stderr(text):
        for _ in range(2 if _is_said(case) else 1):
            watch.step = 0
            ran = RUNS[case.run](watch, Profile(**settings), **case.options)
            watch.events = []
        told = _sentences(text.getvalue())
        ran.facts |= {"told": told, "said": _said(case, told), "environ": dict(os.environ)}
        ran.facts["script's thread"] = threading.get_ident()
        return {look.__name__: _plain(look, ran) for look in case.sees}


def _plain(look: Any, ran: Ran) -> Any:
    try:
        return look(ran)
    except Exception as error:  # the test shows it beside what should have been seen
        return f"{type(error).__name__}: {error}"


def _is_said(case: Case) -> bool:
    """Whether a sentence is due: it must be said once however often the optimizer is wrapped."""
    return any(look.__name__ == "said" for look in case.sees)


def _sentences(text: str) -> list[str]:
    return [line.removeprefix("fleet_train: ") for line in text.splitlines() if line.startswith("fleet_train: ")]


def _said(case: Case, told: list[str]) -> list[str]:
    """Those of the case's knob, up to the reason of a mapping."""
    return [
        line.partition(" is mapped")[0] + " is mapped" * (" is mapped" in line) for line in told if case.knob in line
    ]


def main() -> None:
    paddle.enable_static()
    fleet.init(role_maker.PaddleCloudRoleMaker(is_collective=True))
    watch, seen = Watch(), {}
    chosen = [
        case for case in CASES.values() if case.ranks == fleet.worker_num() and case.name in json.loads(sys.argv[1])
    ]
    # What this backend refuses is tried all the same: float16 is summed in float32 by the watch.
    with mock.patch.object(optimizer, "refuse_on_this_device"):
        for case in chosen:
            # First without: flags of Paddle stay as the last case has left them.
            without = run(case, case.without_the_knob(), {}, watch)
            seen[case.name] = {"without": without, "with": run(case, case.settings, case.variables, watch)}
    report(fleet.worker_index(), seen=seen)


if __name__ == "__main__":
    main()
