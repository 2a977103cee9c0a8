"""Which member sums which shards, and in which order: the canonical reduction tree. Pure.

The shards 0 … V-1 of a batch are the leaves of one fixed binary tree: a node `(start, stop)` is split at the
largest power of two strictly below its size. Floating-point addition is not associative, so the sum depends
on the tree, but on nothing else: not on how many members there are, nor on who computed which shard.

A member sums the maximal subtrees inside its run of shards (its *partials*). The partials of all members are
exchanged, and each member does the additions that are left, for its slice of every array.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

Value = TypeVar("Value")


class Node(NamedTuple):
    """A subtree: the shards from `start` up to, but without, `stop`."""

    start: int
    stop: int


NOTHING_HELD: Mapping[Node, Any] = MappingProxyType({})


class Addition(NamedTuple):
    """Register `result` becomes register `left` plus register `right`, in this order."""

    left: int
    right: int
    result: int


@dataclass(frozen=True)
class Plan:
    """What is left to do once every member has summed its partials.

    Registers `0 … num_members * slots_per_member - 1` are the exchanged table, row by row: partial `index` of
    member `rank` is in register `rank * slots_per_member + index`. Each addition writes a register of its
    own, numbered on from there. Members with fewer partials than `slots_per_member` send padding; no
    addition reads it.

    Attributes:
      slots_per_member: the largest number of partials that a member has.
      owner: which member holds a partial, and at which index.
      additions: to be done in this order.
      root: the register that holds the sum in the end.
    """

    num_shards: int
    num_members: int
    slots_per_member: int
    owner: Mapping[Node, tuple[int, int]]
    additions: tuple[Addition, ...]
    root: int


def run_of(num_shards: int, num_members: int, rank: int) -> range:
    """The shards of one member: contiguous runs in the order of ranks, whose sizes differ by one at most.

    >>> [list(run_of(8, 3, rank)) for rank in range(3)]
    [[0, 1, 2], [3, 4, 5], [6, 7]]

    Raises:
      ValueError: if there are more members than shards, so that one would have nothing to do.
    """
    if not 0 < num_members <= num_shards:
        raise ValueError(
            f"{num_members} members cannot share {num_shards} shards, since each needs at least one: "
            "raise `shards` or start fewer workers"
        )
    if not 0 <= rank < num_members:
        raise ValueError(f"rank {rank} is not in 0 … {num_members - 1}")
    size, larger = divmod(num_shards, num_members)
    start = rank * size + min(rank, larger)
    return range(start, start + size + (rank < larger))


def split(node: Node) -> int | None:
    """Where a node is split into its two children; None for a leaf.

    >>> split(Node(0, 8)), split(Node(0, 7)), split(Node(4, 7)), split(Node(6, 7))
    (4, 4, 6, None)
    """
    size = node.stop - node.start
    return None if size == 1 else node.start + (1 << ((size - 1).bit_length() - 1))


def fold(
    node: Node,
    leaf: Callable[[int], Value],
    add: Callable[[Value, Value], Value],
    held: Mapping[Node, Value] = NOTHING_HELD,
) -> Value:
    """The canonical sum of a subtree.

    Asks for the leaves in ascending order, and for each as late as possible, so that no more than
    `log2(size) + 1` values are alive at a time.

    Args:
      held: sums of subtrees that are known already; nothing inside them is asked for. The bits are the same, since a
        subtree's sum depends on nothing outside it.
    """
    if node in held:
        return held[node]
    middle = split(node)
    if middle is None:
        return leaf(node.start)
    left = fold(Node(node.start, middle), leaf, add, held)
    return add(left, fold(Node(middle, node.stop), leaf, add, held))


def reusable(nodes: Iterable[Node], held: Collection[Node]) -> tuple[tuple[Node, ...], tuple[int, ...]]:
    """Which of the sums in `held` `fold` takes for the subtrees `nodes`, and which shards it asks for. Both ascending.

    >>> reusable(partials(0, 3, 8), {Node(0, 2), Node(0, 1), Node(4, 8)})
    ((Node(start=0, stop=2),), (2,))
    """
    taken: list[Node] = []
    missing: list[int] = []
    for node in nodes:
        middle = split(node)
        if node in held:
            taken.append(node)
        elif middle is None:
            missing.append(node.start)
        else:
            inner = reusable((Node(node.start, middle), Node(middle, node.stop)), held)
            taken += inner[0]
            missing += inner[1]
    return tuple(taken), tuple(missing)


def partials(start: int, stop: int, num_shards: int) -> tuple[Node, ...]:
    """The maximal subtrees of the tree on `num_shards` leaves that lie inside a run, in ascending order.

    >>> partials(3, 6, 8)
    (Node(start=3, stop=4), Node(start=4, stop=6))
    """
    return tuple(_inside(Node(0, num_shards), start, stop))


def _inside(node: Node, start: int, stop: int) -> list[Node]:
    if node.stop <= start or stop <= node.start:
        return []
    if start <= node.start and node.stop <= stop:
        return [node]
    middle = split(node)
    assert middle is not None  # a leaf is either inside the run or outside
    return _inside(Node(node.start, middle), start, stop) + _inside(Node(middle, node.stop), start, stop)


def finish(num_shards: int, num_members: int) -> Plan:
    """The plan for one number of members."""
    runs = [run_of(num_shards, num_members, rank) for rank in range(num_members)]
    held = [partials(run.start, run.stop, num_shards) for run in runs]
    slots_per_member = max(map(len, held))
    owner = {node: (rank, index) for rank, nodes in enumerate(held) for index, node in enumerate(nodes)}
    additions: list[Addition] = []

    def register(node: Node) -> int:
        if node in owner:
            rank, index = owner[node]
            return rank * slots_per_member + index
        middle = split(node)
        assert middle is not None  # every leaf is in some run, hence in or below a partial
        left, right = register(Node(node.start, middle)), register(Node(middle, node.stop))
        additions.append(Addition(left, right, num_members * slots_per_member + len(additions)))
        return additions[-1].result

    root = register(Node(0, num_shards))
    return Plan(num_shards, num_members, slots_per_member, owner, tuple(additions), root)
