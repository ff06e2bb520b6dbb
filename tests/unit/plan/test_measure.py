from __future__ import annotations

import pytest

from fleet_train.errors import ClusterError
from fleet_train.plan.choose import MeasuredLink, Sample, coarse, describe, fit, plan_command
from fleet_train.plan.price import Link


def samples(latency: float, rate: float, ranks: int, noise: float = 0.0) -> list[Sample]:
    signs = (1, -1, 1, -1)
    return [
        Sample(
            nbytes,
            (2 * (ranks - 1) * latency + 2 * (ranks - 1) / ranks * nbytes / rate) * (1 + noise * signs[index]),
        )
        for index, nbytes in enumerate((4096, 65536, 1048576, 4194304))
    ]


@pytest.mark.parametrize("ranks", [2, 4])
def test_exact_times_give_latency_and_bandwidth_back(ranks: int) -> None:
    found = fit(samples(1e-4, 125e6, ranks), ranks)
    assert found.link.latency_seconds == pytest.approx(1e-4)
    assert found.link.bytes_per_second == pytest.approx(125e6)
    assert found.error == pytest.approx(0, abs=1e-9)


def test_noise_stays_noise() -> None:
    found = fit(samples(1e-4, 125e6, 2, noise=0.05), 2)
    assert found.link.bytes_per_second == pytest.approx(125e6, rel=0.1)
    assert found.link.latency_seconds == pytest.approx(1e-4, rel=0.1)
    assert found.error < 0.1


def test_one_disturbed_size_moves_neither_number() -> None:
    clean = samples(1e-4, 125e6, 2)
    middle = [Sample(16384, 1e-2), Sample(262144, 0.1), Sample(8192, 2e-4 + 8192 / 125e6)]
    found = fit([*clean, *middle], 2)
    assert found.link.latency_seconds == pytest.approx(1e-4, rel=0.01)
    assert found.link.bytes_per_second == pytest.approx(125e6, rel=0.01)


def test_neither_number_is_ever_negative() -> None:
    shrinking = fit([Sample(4096, 2e-3), Sample(65536, 1e-3), Sample(1048576, 1e-3)], 2).link
    steep = fit([Sample(4096, 1e-6), Sample(1048576, 1e-2), Sample(4194304, 1e-1)], 2).link
    assert all(link.latency_seconds >= 0 and link.bytes_per_second > 0 for link in (shrinking, steep))


def test_one_size_is_too_few() -> None:
    with pytest.raises(ClusterError, match="1 buffer size measured: latency and bandwidth need two at least"):
        fit([Sample(4096, 1e-3)], 2)


def test_command_says_what_was_measured() -> None:
    between = MeasuredLink(2, (), Link(85e-6, 117.5e6), 0.02)
    inside = MeasuredLink(2, (), Link(20e-6, 1e9), 0.02)
    assert plan_command(2, 2, between, inside, ["--strategy=multi_node", "--model=mlp"]) == (
        "python -m fleet_train plan --nodes=2 --ranks_per_node=2 --latency_us=85.0 --bandwidth_mbps=940.0 "
        "--inside_latency_us=20.0 --inside_bandwidth_mbps=8000.0 --strategy=multi_node --model=mlp"
    )


def test_description_has_each_size_and_the_two_numbers() -> None:
    lines = describe("between nodes", fit(samples(1e-4, 125e6, 2), 2)).splitlines()
    assert lines[0] == "between nodes: allreduce over 2 ranks"
    assert lines[-2].split() == ["4096", "33.754", "33.754"]
    assert lines[-1] == "latency 100.0 us per message, bandwidth 1000.0 Mb/s; median error of the fit 0%"


def test_a_measured_link_is_put_on_a_grid_of_doubled_latencies_and_bandwidths_a_quarter_apart() -> None:
    found = coarse(Link(1e-4, 1e8))
    # 1 / 8192 s is the power of two nearest to 0.1 ms; 1.25 ** 82.5 is 1e8, and 83 the whole number next to it.
    assert found.latency_seconds == 1 / 8192
    assert found.bytes_per_second == pytest.approx(1.25**83)
    assert coarse(Link(1.2e-4, 1.05e8)) == found == coarse(found)
    assert coarse(Link(2e-4, 1e8)).latency_seconds == 1 / 4096
