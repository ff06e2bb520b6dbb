"""What several tests need: ranks and launchers as real processes, free ports, network namespaces."""
