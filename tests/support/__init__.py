"""Helpers of several tests: ranks and launchers as real processes, free ports, network namespaces."""
