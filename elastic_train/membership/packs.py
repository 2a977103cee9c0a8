"""What of a state is sent together: leaves in packs, and leaves larger than a pack in pieces. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PACK_BYTES = 256 << 20
"""The most that one pack holds. Places within a pack are int32 on the device, so it must stay below 2 GiB."""


class Piece(NamedTuple):
    """Elements `start` to `stop` of the leaf number `leaf`, in C order."""

    leaf: int
    start: int
    stop: int


def packs(leaves: Sequence[tuple[int, int]], limit: int = PACK_BYTES) -> list[list[Piece]]:
    """Deals the elements of all leaves out to packs, in order; leaves without elements are in none.

    Args:
      leaves: number of elements and bytes of one element, of each leaf.
      limit: the most bytes of one pack.

    Raises:
      ValueError: an element is larger than a pack.
    """
    dealt: list[list[Piece]] = []
    filled = 0
    for leaf, (count, itemsize) in enumerate(leaves):
        if itemsize > limit:
            raise ValueError(f"leaf {leaf}: an element of {itemsize} bytes does not fit into a pack of {limit}")
        most = limit // itemsize
        for start in range(0, count, most):
            stop = min(start + most, count)
            size = (stop - start) * itemsize
            if not dealt or filled + size > limit:
                dealt.append([])
                filled = 0
            dealt[-1].append(Piece(leaf, start, stop))
            filled += size
    return dealt
