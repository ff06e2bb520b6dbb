"""Another name of `fleet_train.train.metrics.prometheus.sink`, for scripts."""

from fleet_train.train.metrics.prometheus.sink import DEFAULT_HOST, PrometheusSink, open_prometheus

__all__ = ["DEFAULT_HOST", "PrometheusSink", "open_prometheus"]
