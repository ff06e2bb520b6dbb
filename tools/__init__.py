"""Scripts over the public package: demo, trainer, network lab, benchmarks. A package so that tests can import them."""
