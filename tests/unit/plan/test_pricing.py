from __future__ import annotations

import json

from fleet_train.cluster import Cluster
from fleet_train.plan import TensorSpec, build_plan
from fleet_train.plan.price import Compute, Link, Network
from fleet_train.plan.pricing import Conditions, Pricing, describe, price
from fleet_train.profile import Profile

NETWORK = Network(Link(1e-4, 125e6), Link(3e-5, 1.25e9))


def pricing_of(nodes_on_paper: tuple[int, ...] = (), **knobs: object) -> Pricing:
    cluster = Cluster.imagined(2, 2)
    plan = build_plan([TensorSpec("w", (2**20,), "float32")], cluster, Profile(**knobs))  # type: ignore[arg-type]
    conditions = Conditions(NETWORK, Compute.of(0.03), 32, ("--latency_us 100",))
    return price(plan, cluster, conditions, nodes_on_paper)


def test_text_says_traffic_conditions_and_prediction() -> None:
    assert describe(pricing_of()).splitlines() == [
        "steps between synchronisations: 1",
        "",
        "predicted traffic per step (payload; Gloo's and TCP's headers come on top):",
        "  sent by a rank: 6.000 MB",
        "  between nodes: 6.000 MB leave a node, and 1728 bytes of Gloo's headers",
        "  inside a node: 6.000 MB",
        "",
        "between nodes: 100 us, 1000 Mb/s; inside a node: 30 us, 10000 Mb/s; computing: 30 ms "
        "(assumed, not given: --latency_us 100)",
        "predicted step: 80.932 ms = 30.000 computing + 50.932 exposed of 50.932 communication; 1582 samples/s",
    ]


def test_local_sgd_has_a_line_for_its_warm_up() -> None:
    text = describe(pricing_of(use_local_sgd=True, local_sgd_steps=8, local_sgd_is_warm_steps=100))
    assert "steps between synchronisations: 8 (constant; 100 warm-up steps synchronise every step)" in text
    assert "predicted traffic per step, mean of a period of 8 (payload" in text
    assert "  sent by a rank: 0.750 MB\n" in text
    assert "predicted traffic per warm-up step (payload" in text
    assert "predicted warm-up step: 80.932 ms" in text


def test_local_sgd_without_a_warm_up_has_no_line_for_it() -> None:
    found = pricing_of(use_local_sgd=True, local_sgd_steps=8, local_sgd_is_warm_steps=0)
    assert (found.warm_up, found.warm_up_traffic) == (None, None)
    assert "predicted warm-up step" not in describe(found)
    assert "predicted traffic per warm-up step" not in describe(found)
    assert found.to_json()["warm_up_prediction"] is None
    assert pricing_of().warm_up is None


def test_every_size_on_paper_has_one_winner() -> None:
    rows = pricing_of((8, 64, 512)).paper
    assert [(row.nodes, row.ranks) for row in rows[::4]] == [(8, 16), (64, 128), (512, 1024)]
    assert [row.strategy for row in rows[:4]] == ["as planned", "flat", "hierarchical", "local_sgd (8 steps)"]
    assert [row.strategy for row in rows if row.wins] == ["local_sgd (8 steps)"] * 3
    marked = [line for line in describe(pricing_of((8, 64, 512))).splitlines() if line.endswith(" *")]
    assert [line.split()[:2] for line in marked] == [["8", "16"], ["64", "128"], ["512", "1024"]]


def test_json_has_everything_and_is_plain() -> None:
    content = json.loads(json.dumps(pricing_of((8,), use_local_sgd=True).to_json()))
    assert set(content) == {
        "steps_between_synchronisations",
        "conditions",
        "traffic_per_step",
        "prediction",
        "warm_up_traffic_per_step",
        "warm_up_prediction",
        "on_paper",
    }
    assert content["traffic_per_step"]["leaving"] == [content["traffic_per_step"]["sent"][0]] * 2
    assert set(content["on_paper"][0]["prediction"]) == {
        "compute",
        "communication",
        "exposed",
        "step",
        "samples_per_second",
    }
