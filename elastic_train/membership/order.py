"""What must come before what, and whether that is possible. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable

Edge = tuple[int, int]
"""The first node comes before the second one."""


class Order:
    """A graph of nodes 0, 1, 2, …; they can be put in order exactly if it has no cycle."""

    def __init__(self) -> None:
        self._after: list[list[int]] = []

    def node(self) -> int:
        """A new node."""
        self._after.append([])
        return len(self._after) - 1

    def add(self, edges: Iterable[Edge]) -> None:
        for node, following in edges:
            self._after[node].append(following)

    def remove(self, edges: Iterable[Edge]) -> None:
        """Takes back the edges that were added last."""
        for node, following in reversed(list(edges)):
            last = self._after[node].pop()
            assert last == following, "edges are taken back in the reverse order"

    def find_cycle(self, origins: Collection[int]) -> list[int]:
        """The nodes of a cycle, in order; empty if there is none.

        Args:
          origins: nodes, in ascending order, of which each cycle has one. The cycle is one through the first of them
            that is in any, as short as there is, and begins with it.
        """
        left = self._not_in_order()
        cycles = (self._way_back(node, left) for node in origins if node in left)
        return next((cycle for cycle in cycles if cycle), [])

    def _not_in_order(self) -> set[int]:
        """Nodes that are on a cycle or come after one."""
        num_before = [0] * len(self._after)
        for following in itertools.chain.from_iterable(self._after):
            num_before[following] += 1
        free = deque(node for node, number in enumerate(num_before) if not number)
        while free:
            for following in self._after[free.popleft()]:
                num_before[following] -= 1
                if not num_before[following]:
                    free.append(following)
        return {node for node, number in enumerate(num_before) if number}

    def _way_back(self, origin: int, among: set[int]) -> list[int]:
        """The shortest way from a node to itself."""
        came_from: dict[int, int] = {}
        waiting = deque([origin])
        while waiting:
            node = waiting.popleft()
            for following in self._after[node]:
                if following == origin:
                    way = [node]
                    while way[-1] != origin:
                        way.append(came_from[way[-1]])
                    return way[::-1]
                if following in among and following not in came_from:
                    came_from[following] = node
                    waiting.append(following)
        return []
