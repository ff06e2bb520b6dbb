"""What is priced, what is ruled out, and what is printed and written; nothing is measured here."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from fleet_train.cluster import Cluster
from fleet_train.plan import TensorSpec
from fleet_train.plan.price import TYPICAL, Link, Network
from fleet_train.profile import Profile, load_profile, profile_names
from fleet_train.recommend.candidates import Measurements, consider, risk_of, thresholds
from fleet_train.recommend.options import LOCAL_STEPS, LOSSY, NONE, ROUNDING, Options
from fleet_train.recommend.report import describe, pick, profile_text, to_json
from fleet_train.recommend.supervisor import Results, Tried, read_computing, short, step_of

PAIR, LOCAL_GROUPS = Cluster.imagined(2, 1), Cluster.imagined(2, 2)
GRADIENTS = tuple(TensorSpec(f"w{i}", (640, 640), "float32") for i in range(8))
MEASURED = Measurements(GRADIENTS, GRADIENTS, (), 1, 0.02, Network(Link(2e-4, 1.2e8), Link(3e-5, 1e9)), TYPICAL)


def results(**tried: Tried) -> Results:
    candidates, ruled_out = consider(MEASURED, PAIR)
    return Results(MEASURED, 1.1, 0.05, 2**30, tuple(candidates), tuple(ruled_out), tried, 60.0)


def test_every_profile_is_priced_or_ruled_out_with_a_reason() -> None:
    candidates, ruled_out = consider(MEASURED, PAIR)
    shipped = [candidate.name for candidate in candidates if not candidate.changes]
    assert sorted([*shipped, *(profile.name for profile in ruled_out)]) == profile_names()
    assert all(profile.reason for profile in ruled_out)
    steps = [candidate.step for candidate in candidates]
    assert steps == sorted(steps)
    assert min(steps) >= MEASURED.compute_seconds


def test_what_does_not_fit_the_cluster_is_ruled_out() -> None:
    reasons = {profile.name: profile.reason for profile in consider(MEASURED, PAIR)[1]}
    assert "form no hierarchy" in reasons["hierarchical"]
    assert "NCCL reads" in reasons["tcp_only"]
    assert "amp_level changes what a rank computes" in reasons["amp_bf16"]
    assert "hierarchical" in [candidate.name for candidate in consider(MEASURED, LOCAL_GROUPS)[0]]


def test_knobs_of_local_steps_are_turned_where_that_pays() -> None:
    candidates, _ = consider(MEASURED, PAIR)
    steps = {candidate.name: candidate.step for candidate in candidates}
    turned = [candidate for candidate in candidates if candidate.changes]
    assert {candidate.extends for candidate in turned} >= {"local_sgd", "slowmo"}
    for candidate in turned:
        assert candidate.risk == LOCAL_STEPS
        assert candidate.step < 0.95 * steps[candidate.extends]
        for knob, value in candidate.changes.items():
            assert getattr(candidate.profile, knob) == value != getattr(load_profile(candidate.extends), knob)
    quick = replace(MEASURED, network=Network(Link(1e-5, 1e12), Link(1e-5, 1e12)), compute_seconds=10.0)
    assert not [candidate for candidate in consider(quick, PAIR)[0] if candidate.changes]


def test_a_turned_profile_is_written_as_it_was_tried(tmp_path: Path) -> None:
    turned = next(candidate for candidate in consider(MEASURED, PAIR)[0] if candidate.changes)
    basis = results(**{turned.name: Tried(turned.name, 20.0)})
    path = tmp_path / "recommended.yaml"
    path.write_text(profile_text(basis, Options("train.py", allow=(LOCAL_STEPS,)), PAIR, "recommend"))
    assert load_profile(str(path)).digest() == turned.profile.digest()


def test_a_setting_is_every_candidates_and_no_variant_changes_it(tmp_path: Path) -> None:
    settings = ("nccl_comm_num=1", "local_sgd_steps=5")
    candidates, ruled_out = consider(MEASURED, PAIR, settings=settings[:1])
    assert {candidate.profile.nccl_comm_num for candidate in candidates} == {1}
    candidates, ruled_out = consider(MEASURED, PAIR, settings=settings)
    assert {candidate.profile.local_sgd_steps for candidate in candidates} == {5}
    reasons = {profile.name: profile.reason for profile in ruled_out}
    assert reasons["multi_node"].startswith("--set: local_sgd_steps: has no effect while use_local_sgd is false")
    best = candidates[0]
    tried = Results(MEASURED, 1.1, 0.05, 2**30, (best,), (), {best.name: Tried(best.name, 10.0)}, 60.0)
    options = Options("train.py", allow=(LOCAL_STEPS,), settings=settings)
    path = tmp_path / "written.yaml"
    path.write_text(profile_text(tried, options, PAIR, "the command"))
    written = load_profile(str(path))
    assert (written.nccl_comm_num, written.local_sgd_steps) == (1, 5)


def test_of_steps_about_as_short_the_least_risk_is_picked() -> None:
    basis = results(multi_node=Tried("multi_node", 103.0), diloco=Tried("diloco", 100.0))
    allowed = Options("train.py", allow=(LOCAL_STEPS,))
    assert pick(basis, allowed).name == "multi_node"  # type: ignore[union-attr]
    basis = results(multi_node=Tried("multi_node", 106.0), diloco=Tried("diloco", 100.0))
    assert pick(basis, allowed).name == "diloco"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "risk"),
    [("multi_node", NONE), ("bf16_compression", ROUNDING), ("powersgd", LOSSY), ("diloco", LOCAL_STEPS)],
)
def test_risks(name: str, risk: str) -> None:
    assert risk_of(load_profile(name)) == risk


def test_what_is_allowed() -> None:
    exact, lossy = Options("train.py"), Options("train.py", allow=(LOSSY,))
    assert [exact.allows(risk) for risk in (NONE, ROUNDING, LOSSY, LOCAL_STEPS)] == [True, False, False, False]
    assert [lossy.allows(risk) for risk in (NONE, ROUNDING, LOSSY, LOCAL_STEPS)] == [True, True, True, False]


def test_the_choice_changes_with_the_link() -> None:
    candidates, _ = consider(MEASURED, PAIR)
    changes = thresholds(candidates, MEASURED, PAIR)
    assert len(changes) > 1
    rates = [rate for rate, _ in changes]
    assert rates == sorted(rates)
    risky = {candidate.name for candidate in candidates if candidate.risk in (LOSSY, LOCAL_STEPS)}
    assert changes[0][1] in risky  # 10 Mb/s


def test_the_pick_is_the_shortest_measured_step_of_those_allowed() -> None:
    basis = results(
        multi_node=Tried("multi_node", 110.0),
        two_communicators=Tried("two_communicators", failure="failed: rank 1 ended"),
        diloco=Tried("diloco", 21.0),
    )
    exact, all_of_it = Options("a/train.py"), Options("a/train.py", allow=(LOCAL_STEPS,))
    best = pick(basis, exact)
    assert best is not None
    assert best.name == "multi_node"
    allowed = pick(basis, all_of_it)
    assert allowed is not None
    assert allowed.name == "diloco"
    text = describe(basis, exact, PAIR)
    assert "* multi_node" in text
    assert "two_communicators: failed: rank 1 ended" in text
    assert "with --allow " in text
    assert to_json(basis, exact, PAIR)["recommended"] == "multi_node"


def test_without_a_trial_that_ended_nothing_is_recommended() -> None:
    basis = results(multi_node=Tried("multi_node", failure="failed: it"))
    assert pick(basis, Options("train.py")) is None
    assert "no profile is recommended" in describe(basis, Options("train.py"), PAIR)
    assert to_json(basis, Options("train.py"), PAIR)["exit_code"] == 1


def test_the_written_profile_is_the_one_that_was_tried(tmp_path: Path) -> None:
    basis = results(multi_node=Tried("multi_node", 110.0), one_communicator=Tried("one_communicator", 130.0))
    path = tmp_path / "recommended.yaml"
    path.write_text(profile_text(basis, Options("a/train.py"), PAIR, "python -m fleet_train recommend ..."))
    best = pick(basis, Options("a/train.py"))
    assert best is not None
    assert load_profile(str(path)).digest() == best.profile.digest()
    assert "110.0 ms per step measured" in " ".join(path.read_text().replace("#", " ").split())
    assert "one_communicator 130.0 ms" in path.read_text()


def test_a_trial_is_short_and_counts_an_averaging_once_per_period() -> None:
    asked = Profile(use_local_sgd=True, local_sgd_steps=50, local_sgd_is_warm_steps=100, local_sgd_overlap_steps=10)
    tried = short(asked, 14)
    assert (tried.local_sgd_steps, tried.local_sgd_overlap_steps) == (4, 3)
    assert tried.local_sgd_is_warm_steps <= 2
    # Local steps of 10 ms, an averaging of 100 ms more in every fourth.
    steps = [1.0, 1.0, 1.0, *[0.01, 0.01, 0.01, 0.11] * 3]
    assert step_of(steps, tried, 50) == pytest.approx(0.01 + 0.1 / 50)
    assert step_of([1.0, 1.0, 1.0, 0.02, 0.03, 0.04], Profile(), 1) == pytest.approx(0.03)


def test_a_trial_with_room_for_two_periods_has_the_profiles_own() -> None:
    streaming = load_profile("streaming_diloco")
    assert short(streaming, 100).local_sgd_steps == streaming.local_sgd_steps
    assert short(streaming, 100).local_sgd_overlap_steps == streaming.local_sgd_overlap_steps
    cut = short(streaming, 30)
    assert (cut.local_sgd_steps, cut.local_sgd_fragments, cut.local_sgd_overlap_steps) == (12, 3, 3)


def test_reports_of_local_steps_become_what_is_priced() -> None:
    candidates, _ = consider(MEASURED, PAIR)
    plan = next(candidate.plan for candidate in candidates if candidate.profile.use_local_sgd)
    assert plan.averaging is not None
    averaging = replace(plan.averaging, state_values_per_parameter=2)
    link = {"link": {"latency_seconds": 1e-4, "bytes_per_second": 1e8}, "error": 0.03}
    content = {"plan": replace(plan, averaging=averaging).to_json(), "links": {"between nodes": link}, "is_gloo": True}
    content["costs"] = asdict(TYPICAL)
    reports = {0: content | {"steps": [9.0, 9.0, 9.0, 0.02, 0.02]}, 1: content | {"steps": [9.0, 9.0, 9.0, 0.03, 0.03]}}
    measured, spread, error = read_computing(reports)
    assert [gradient.name for gradient in measured.gradients] == [gradient.name for gradient in GRADIENTS]
    assert (measured.compute_seconds, measured.state_values, error) == (0.03, 2, 0.03)
    assert spread == pytest.approx(1.5)
    assert measured.network.between == Link(1e-4, 1e8)
    assert measured.costs == TYPICAL
    # Now the one rank is slower, now the other: gradients wait for the slower one each time.
    reports[0]["steps"], reports[1]["steps"] = [9.0] * 3 + [0.02, 0.04, 0.03], [9.0] * 3 + [0.04, 0.02, 0.03]
    measured, spread, _ = read_computing(reports)
    assert (measured.compute_seconds, spread) == (0.04, 1.0)
