"""What is priced, ruled out, printed and written, and how the measurements of ranks become one. Nothing is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fleet_train.cluster import Cluster
from fleet_train.plan import TensorSpec
from fleet_train.plan.price import ENQUEUED, TYPICAL, Link, Network
from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.recommend import report
from fleet_train.recommend.candidates import Measurements, consider, risk_of
from fleet_train.recommend.options import LOCAL_STEPS, LOSSY, NONE, ROUNDING, RecommendOptions
from fleet_train.recommend.report import describe, pick, profile_text, to_json
from fleet_train.recommend.supervisor import Results, Tried, read_computing, short, step_of

PAIR, LOCAL_GROUPS = Cluster.imagined(2, 1), Cluster.imagined(2, 2)
GRADIENTS = tuple(TensorSpec(f"w{i}", (640, 640), "float32") for i in range(8))
MEASURED = Measurements(GRADIENTS, GRADIENTS, (), 1, 0.02, Network(Link(2e-4, 1.2e8), Link(3e-5, 1e9)))


def results(**tried: Tried) -> Results:
    candidates, ruled_out = consider(MEASURED, PAIR)
    return Results(MEASURED, 1.1, 0.05, 2**30, tuple(candidates), tuple(ruled_out), tried, 60.0)


def name_of_pick(basis: Results, *allow: str) -> str | None:
    best = pick(basis, RecommendOptions("a/train.py", allow=allow))
    return None if best is None else best.name


def test_every_profile_is_priced_or_ruled_out_with_a_reason() -> None:
    candidates, ruled_out = consider(MEASURED, PAIR)
    assert (
        sorted([*(candidate.name for candidate in candidates), *(profile.name for profile in ruled_out)])
        == profile_names()
    )
    steps = [candidate.step for candidate in candidates]
    assert steps == sorted(steps)
    assert min(steps) >= MEASURED.compute_seconds
    reasons = {profile.name: profile.reason for profile in ruled_out}
    assert all(reasons.values())
    assert "form no hierarchy" in reasons["hierarchical"]
    assert "NCCL reads" in reasons["tcp_only"]
    assert "amp_level changes what a rank computes" in reasons["amp_bf16"]
    assert "hierarchical" in [candidate.name for candidate in consider(MEASURED, LOCAL_GROUPS)[0]]


def test_where_memory_is_short_a_sharded_optimizer_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "machine_bytes", lambda: 1000 * 2**20)
    candidates, _ = consider(MEASURED, PAIR)
    for name, megabytes, words in (
        ("multi_node", 600, []),
        (
            "multi_node",
            800,
            ["memory is short: a rank took 800 of 1000 MB; a sharded optimizer takes about 9 MB less"],
        ),
        ("local_sgd", 800, ["a sharded optimizer is no way out: sharding: does not go with LocalSGD"]),
    ):
        best = next(candidate for candidate in candidates if candidate.name == name)
        tried = {name: Tried(name, 10.0, memory_bytes=megabytes * 2**20)}
        basis = Results(MEASURED, 1.1, 0.05, 2**30, (best,), (), tried, 60.0)
        text = describe(basis, RecommendOptions("train.py", allow=(LOCAL_STEPS,)), PAIR)
        found = [line for line in text.splitlines() if line.startswith("memory is short")]
        assert len(found) == len(words)
        assert all(each in line for each, line in zip(words, found, strict=True))


def test_a_setting_is_every_candidates(tmp_path: Path) -> None:
    settings = ("nccl_comm_num=1", "local_sgd_steps=5")
    candidates, ruled_out = consider(MEASURED, PAIR, settings=settings[:1])
    assert {candidate.profile.nccl_comm_num for candidate in candidates} == {1}
    candidates, ruled_out = consider(MEASURED, PAIR, settings=settings)
    assert {candidate.profile.local_sgd_steps for candidate in candidates} == {5}
    reasons = {profile.name: profile.reason for profile in ruled_out}
    assert reasons["multi_node"].startswith("--set: local_sgd_steps: has no effect while use_local_sgd is false")
    best = candidates[0]
    tried = Results(MEASURED, 1.1, 0.05, 2**30, (best,), (), {best.name: Tried(best.name, 10.0)}, 60.0)
    options = RecommendOptions("train.py", allow=(LOCAL_STEPS,), settings=settings)
    path = tmp_path / "written.yaml"
    path.write_text(profile_text(tried, options, PAIR, "the command"))
    written = load_profile(str(path))
    assert (written.nccl_comm_num, written.local_sgd_steps) == (1, 5)


@pytest.mark.parametrize(("milliseconds", "picked"), [(103.0, "multi_node"), (106.0, "diloco")])
def test_of_steps_about_as_short_the_least_risk_is_picked(milliseconds: float, picked: str) -> None:
    basis = results(multi_node=Tried("multi_node", milliseconds), diloco=Tried("diloco", 100.0))
    assert name_of_pick(basis, LOCAL_STEPS) == picked


def test_risks_and_what_is_allowed() -> None:
    risks = {"multi_node": NONE, "bf16_compression": ROUNDING, "powersgd": LOSSY, "diloco": LOCAL_STEPS}
    assert {name: risk_of(load_profile(name)) for name in risks} == risks
    for allow, allowed in ((), [NONE]), ((LOSSY,), [NONE, ROUNDING, LOSSY]):
        options = RecommendOptions("train.py", allow=allow)
        assert [risk for risk in risks.values() if options.allows(risk)] == allowed


def test_a_trial_far_from_its_prediction_is_named_with_how_to_try_the_others() -> None:
    def told(share: float) -> str:
        candidates, _ = consider(MEASURED, PAIR)
        safe = [candidate for candidate in candidates if candidate.risk == NONE]
        found = results(**{each.name: Tried(each.name, 1e3 * share * each.step) for each in safe[:2]})
        lines = describe(found, RecommendOptions("train.py"), PAIR).splitlines()
        (line,) = [line for line in lines if line.startswith("measured and predicted")] or [""]
        assert to_json(found, RecommendOptions("train.py"), PAIR)["contradictions"] == [
            each.name for each in safe[:2] if line
        ]
        assert not line or line.endswith(
            f"one of the {len(safe) - 2} that were not tried may be better: --trials {len(safe)}"
        )
        assert not line or all(f"{each.name} {1e3 * share * each.step:.1f} ms for" in line for each in safe[:2])
        return line

    assert told(0.7) == told(1.0) == told(1.4) == ""
    assert told(0.5)
    assert told(1.6)


def test_costs_are_typical_and_where_collectives_are_enqueued_slow_no_computing() -> None:
    assert (MEASURED.costs, replace(MEASURED, is_gloo=False).costs) == (TYPICAL, ENQUEUED)


def test_the_pick_is_the_shortest_measured_step_of_those_allowed() -> None:
    basis = results(
        multi_node=Tried("multi_node", 110.0),
        two_communicators=Tried("two_communicators", failure="failed: rank 1 ended"),
        diloco=Tried("diloco", 21.0),
    )
    assert (name_of_pick(basis), name_of_pick(basis, LOCAL_STEPS)) == ("multi_node", "diloco")
    exact = RecommendOptions("a/train.py")
    text = describe(basis, exact, PAIR)
    assert "* multi_node" in text
    assert "two_communicators: failed: rank 1 ended" in text
    assert "with --allow " in text
    assert to_json(basis, exact, PAIR)["recommended"] == "multi_node"


def test_without_a_trial_that_ended_nothing_is_recommended() -> None:
    basis = results(multi_node=Tried("multi_node", failure="failed: it"))
    assert name_of_pick(basis) is None
    assert "no profile is recommended" in describe(basis, RecommendOptions("train.py"), PAIR)
    assert to_json(basis, RecommendOptions("train.py"), PAIR)["exit_code"] == 1


def test_the_written_profile_is_the_one_that_was_tried(tmp_path: Path) -> None:
    best = consider(MEASURED, PAIR)[0][0]
    basis = results(**{best.name: Tried(best.name, 10.0), "unfused": Tried("unfused", 130.0)})
    path = tmp_path / "recommended.yaml"
    options = RecommendOptions("a/train.py", allow=(LOSSY, LOCAL_STEPS))
    path.write_text(profile_text(basis, options, PAIR, "fleet_train recommend ..."))
    assert load_profile(str(path)).digest() == best.profile.digest()
    assert "10.0 ms per step measured" in " ".join(path.read_text().replace("#", " ").split())
    assert "unfused 130.0 ms" in path.read_text()


def test_a_trial_is_short_has_two_periods_and_counts_an_averaging_once_per_period() -> None:
    asked = Profile(use_local_sgd=True, local_sgd_steps=50, local_sgd_is_warm_steps=100, local_sgd_overlap_steps=10)
    tried = short(asked, 14)
    assert (tried.local_sgd_steps, tried.local_sgd_overlap_steps) == (4, 3)
    assert tried.local_sgd_is_warm_steps <= 2
    # Local steps of 10 ms, an averaging of 100 ms more in every fourth.
    steps = [1.0, 1.0, 1.0, *[0.01, 0.01, 0.01, 0.11] * 3]
    assert step_of(steps, tried, 50) == pytest.approx(0.01 + 0.1 / 50)
    assert step_of([1.0, 1.0, 1.0, 0.02, 0.03, 0.04], Profile(), 1) == pytest.approx(0.03)
    streaming = load_profile("streaming_diloco")
    for name in ("local_sgd_steps", "local_sgd_overlap_steps"):
        assert getattr(short(streaming, 100), name) == getattr(streaming, name)
    cut = short(streaming, 30)
    assert (cut.local_sgd_steps, cut.local_sgd_fragments, cut.local_sgd_overlap_steps) == (12, 3, 3)


@pytest.mark.parametrize(
    ("ranks", "seconds", "spread"),
    [
        ([[1.0, 2.0, 1.0, 2.0], [2.0, 1.0, 2.0, 1.0]], 2.0, 1.0),  # each step has a rank that takes 2 s
        ([[1.0, 1.0, 1.0, 1.0], [4.0, 4.0, 4.0, 4.0]], 4.0, 4.0),
        ([[3.0, 3.0, 3.0, 3.0], [1.0, 1.0, 1.0, 5.0]], 3.0, 3.0),
    ],
)
def test_reports_of_local_steps_become_what_is_priced_by_the_slowest_rank_of_each_step(
    ranks: list[list[float]], seconds: float, spread: float
) -> None:
    plan = next(each.plan for each in consider(MEASURED, PAIR)[0] if each.profile.use_local_sgd)
    assert plan.averaging is not None
    mean = TensorSpec("mean", (2,), "float32")
    averaging = replace(plan.averaging, state_values_per_parameter=2, statistics=(mean,))
    link = {"link": {"latency_seconds": 1e-4, "bytes_per_second": 1e8}, "error": 0.03}
    told = {"plan": replace(plan, averaging=averaging).to_json(), "links": {"between nodes": link}, "is_gloo": True}
    # The first steps compile.
    reports = {rank: told | {"steps": [9.0, 9.0, 9.0, *timed]} for rank, timed in enumerate(ranks)}
    measured, apart, error = read_computing(reports)
    assert (measured.compute_seconds, apart, measured.state_values, error) == (seconds, spread, 2, 0.03)
    assert (measured.gradients, measured.averaged) == (GRADIENTS, (*GRADIENTS, mean))
    assert (measured.network.between, measured.costs) == (Link(1e-4, 1e8), TYPICAL)
