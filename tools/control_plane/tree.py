"""The tree of relays as the launcher arranges it: each node's parent and the ranks below it."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_train.cluster.cluster import below, parent_of


@dataclass(frozen=True)
class Job:
    """A job of ``nodes`` nodes with the same number of ranks each."""

    nodes: int
    ranks_per_node: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def parent(self, node: int) -> int:
        return parent_of(node)

    def below(self, node: int) -> int:
        per_node = self.ranks_per_node
        return below(node, [range(each * per_node, (each + 1) * per_node) for each in range(self.nodes)])

    def children_of_root(self) -> int:
        return sum(self.parent(node) == 0 for node in range(1, self.nodes))
