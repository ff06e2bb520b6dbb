"""A rank of a trial: ``python -m fleet_train.recommend.subject JOB REPORTS TASK``, started by a supervisor."""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import paddle

from fleet_train import fleet
from fleet_train.collectives.join import probe
from fleet_train.convert import process, session
from fleet_train.convert.rehearsal import before_training_alone, not_converted
from fleet_train.convert.session import current
from fleet_train.errors import FleetTrainError
from fleet_train.profile import Profile
from fleet_train.selftest.subject import write_report

COMPUTING = "computing"


def main(job: str, reports_path: str, task_text: str) -> None:
    task: dict[str, Any] = json.loads(task_text)
    reports = Path(reports_path)

    def tried(steps: list[float]) -> None:
        write_report(reports, steps=steps, exposed_ms=fleet.communication().exposed_ms, memory=memory_bytes())

    def computed(steps: list[float]) -> None:
        plan = fleet.plan()
        assert plan is not None
        links_by_place = probe(current().job, float(task["measure_seconds"]))
        links = {where: asdict(measured) for where, measured in links_by_place.items()}
        write_report(
            reports,
            steps=steps,
            plan=plan.to_json(),
            links=links,
            memory=memory_bytes(),
            is_gloo=isinstance(fleet.place(), paddle.CPUPlace),
        )

    steps = Steps(
        int(task["steps"]), float(task["longest_seconds"]), job != COMPUTING, computed if job == COMPUTING else tried
    )

    def refuse(error: FleetTrainError) -> NoReturn:
        """Ends the process: the script might catch an exception, and train."""
        write_report(reports, refused=str(error))
        os._exit(error.exit_code)

    write_report(reports, begins=job)
    run_script(Path(task["script"]), tuple(task["arguments"]), Profile(**task["profile"]), steps, refuse)


class Steps:
    """Counts the runs of the converted program; after the last one ``then`` reports, and the process ends.

    A step is the time from the start of one run to the start of the next: the script's work between them counts, as
    in training.
    """

    def __init__(
        self, number: int, longest_seconds: float, together: bool, then: Callable[[list[float]], None]
    ) -> None:
        self._number = number
        self._longest_seconds = longest_seconds
        self._together = together
        self._then = then
        self._starts: list[float] = []

    def watch(self) -> None:
        """Observe every executor of this process from now on."""
        original: Callable[..., Any]

        def run(executor: Any, program: Any = None, *arguments: Any, **named: Any) -> Any:
            has_converted = session.is_open() and session.current().main_program is not None
            if has_converted and self._is_converted(program):
                self._begins()
            return original(executor, program, *arguments, **named)

        original = process.replace(paddle.static.Executor, "run", run)

    def _is_converted(self, program: Any) -> bool:
        # Scripts may wrap it (CompiledProgram); None is the default main program.
        inner = getattr(program, "_program", program) or paddle.static.default_main_program()
        return inner is session.current().main_program

    def _begins(self) -> None:
        self._starts.append(time.perf_counter())
        elapsed = self._starts[-1] - self._starts[0]
        # Ranks that communicate in their steps must all end after the same one.
        is_over = (
            not self._together and not sends_statistics() and elapsed > self._longest_seconds and len(self._starts) > 3
        )
        if len(self._starts) > self._number or is_over:
            self.end()

    def end(self) -> None:
        """Report the counts and exit at once: the script must not save, evaluate or continue."""
        steps = [after - before for before, after in zip(self._starts, self._starts[1:], strict=False)]
        self._then(steps)
        fleet.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def sends_statistics() -> bool:
    """Whether a step communicates with any profile: the statistics of a script's own SyncBatchNorm."""
    plan = fleet.plan()
    return plan is not None and bool(plan.statistics)


def run_script(
    script: Path,
    arguments: tuple[str, ...],
    profile: Profile,
    steps: Steps,
    refuse: Callable[[FleetTrainError], NoReturn],
) -> None:
    """Run the script as its user would; it ends after ``steps``, or by itself."""
    session.prescribed_profile = profile
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    steps.watch()
    before_training_alone(refuse, "recommend")
    runpy.run_path(str(script), run_name="__main__")
    if not session.is_open():
        refuse(not_converted("the script has ended without fleet.init"))
    steps.end()


def memory_bytes() -> int:
    """The largest resident memory of this process so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main(*sys.argv[1:])
