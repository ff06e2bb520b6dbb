"""``selftest --ladder``: what the first hour on GPUs should find out.

Steps from the cheapest on, each with its own processes. The first one that fails is the last one that runs; it says
what to do, and which setting goes around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fleet_train import timeouts
from fleet_train.launch.on_ranks import SubjectEnd, first_to_fail
from fleet_train.selftest.options import FAIL, MEMORY_OF, SKIP, Result, failed
from fleet_train.selftest.supervisor import SelftestSupervisor, judge_ends


@dataclass(frozen=True)
class LadderStep:
    """``name`` is that of its job, too."""

    name: str
    advice: str


_LINK = (
    "do not train here yet; NCCL_P2P_DISABLE: 1 or NCCL_IB_DISABLE: 1 in the profile's environment show whether a link "
    "is at fault"
)
_LOST = (
    "a rank that is lost here may hold up the others: a lower collective_timeout_seconds bounds that; if it does not, "
    "end such a job yourself"
)
_MEMORY = "nothing is computed wrongly; collective_stream: calc needs no second stream"
STEPS = (
    LadderStep("devices", "give each rank a GPU of its own: --selected_gpus of launch, or CUDA_VISIBLE_DEVICES"),
    LadderStep("dtypes", _LINK),
    LadderStep("calc", f"{_LINK}, and amp_level: O0 whether a precision is"),
    LadderStep("own", "set collective_stream: calc"),
    LadderStep("is killed in the probe", f"{_LOST}; link_gigabits and link_latency_ms replace the probe"),
    LadderStep("is killed in a step", _LOST),
    LadderStep("is killed in a save", _LOST),
    LadderStep(f"{MEMORY_OF}own", _MEMORY),
)


class Ladder(SelftestSupervisor):
    """A rank's supervisor for the steps."""

    _advice = ""

    def run_jobs(self) -> None:
        steps: Sequence[LadderStep] = STEPS if self.cluster.world_size > 1 else STEPS[:1]
        why = "one rank has no peer"
        for number, step in enumerate(steps, 1):
            if not self._passes(step):
                steps, why = steps[:number], f"not run: '{step.name}' has failed"
                break
        self.add(Result("ladder", step.name, SKIP, why) for step in STEPS[len(steps) :])

    def add(self, results: Iterable[Result]) -> None:
        super().add(advised(result, self._advice) for result in results)

    def _passes(self, step: LadderStep) -> bool:
        """Run it; whether it has passed on rank 0, which has all results."""
        number, self._advice = len(self.results), step.advice
        ends = (self.run_fault if step.name.startswith("is killed") else self._run_checks)(step.name)
        found = self.results[number:]
        if not found and self.cluster.rank == 0:
            self.add([Result("ladder", step.name, FAIL, "its ranks ended without a result")])
        passes: bool = self.peers.gather(f"outcome of {step.name}", not failed(self.results[number:]))[0]
        if not passes:
            for line in lines_of_nccl(ends):
                self.peers.show(f"      {line}")
        return passes

    def _run_checks(self, name: str) -> dict[int, SubjectEnd]:
        limit = timeouts.SELFTEST_STEP_SECONDS + timeouts.SELFTEST_SECONDS_PER_RANK * self.cluster.world_size
        ends, subjects = self.run_job(name, limit)
        self.add(replace(result, name=name) for result in judge_ends(subjects, ends))
        return ends


def advised(result: Result, advice: str) -> Result:
    """With what to do, if it has failed."""
    return replace(result, words=f"{result.words}; what to do: {advice}") if result.status == FAIL else result


def lines_of_nccl(ends: Mapping[int, SubjectEnd]) -> tuple[str, ...]:
    """Of the rank that failed first, or of rank 0 if only a result is wrong."""
    rank = first_to_fail(ends)
    return ends[rank or 0].lines_of_nccl if ends else ()
