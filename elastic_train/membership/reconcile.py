"""Who has the newest state and who receives it, at the beginning of an epoch. Pure.

Every member runs `agree` on the same all-gathered rows, so all draw the same conclusion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from elastic_train.membership.group import signed

STANDING_SIZE = 5
"""Length of a standing's part of a row, in int32, behind the control vector."""


class Standing(NamedTuple):
    """What one member says of its state.

    Attributes:
      step: its committed steps.
      samples: samples consumed.
      fingerprint: 64 bits over the state, as two words.
      layout: 64 bits over key paths, shapes, dtypes and settings, as two words.
      has_state: False on a joiner, whose state is only what the seed gives.
      owes: the evaluation of this step is due, and has not been made.
    """

    step: int
    samples: int
    fingerprint: tuple[int, int]
    layout: tuple[int, int]
    has_state: bool
    owes: bool = False


@dataclass(frozen=True)
class Agreement:
    """Ranks in the view's order.

    Attributes:
      donors: hold the state that counts.
      receivers: hold an older or another one, and receive it.
      refused: run another model, dtype or config; they must leave.
      fresh: nobody had any state; the donors hold what the seed gives.
      undecided: as many hold another state of that step as hold the donors'.
    """

    donors: tuple[int, ...]
    receivers: tuple[int, ...]
    refused: tuple[int, ...]
    fresh: bool
    undecided: bool


def agree(standings: Sequence[Standing]) -> Agreement:
    """Donors are those with the highest step and, among these, the fingerprint that most of them have.

    On a tie the lowest rank's fingerprint counts, and `undecided` says so; not if nobody had any state, since what the
    seed gives is as good on one as on another.
    """
    ranks = range(len(standings))
    holders = [rank for rank in ranks if standings[rank].has_state]
    fresh = not holders
    layout = _most_common([standings[rank].layout for rank in holders or ranks])
    refused = tuple(rank for rank in ranks if standings[rank].layout != layout)
    pool = [rank for rank in holders or ranks if rank not in refused]
    top = max(standings[rank].step for rank in pool)
    newest = [rank for rank in pool if standings[rank].step == top]
    content = [(standings[rank].samples, standings[rank].fingerprint) for rank in newest]
    chosen = _most_common(content)
    donors = tuple(rank for rank, held in zip(newest, content, strict=True) if held == chosen)
    same = {rank for rank in ranks if _content(standings[rank]) == (top, *chosen) and rank not in refused}
    receivers = tuple(rank for rank in ranks if rank not in same and rank not in refused)
    largest = Counter(content).most_common(2)
    undecided = len(largest) > 1 and largest[0][1] == largest[1][1] and not fresh
    return Agreement(donors, receivers, refused, fresh, undecided)


def differing(tables: np.ndarray, right: int, wrong: Sequence[int], paths: Sequence[str]) -> list[str]:
    """Key paths of the leaves in which some of the ranks `wrong` differ from the rank `right`.

    Args:
      tables: [members, leaves, 2], the fingerprints of every member's leaves.
      paths: one per leaf.
    """
    differs = np.any(tables[list(wrong)] != tables[right], axis=(0, 2))
    return [path for path, found in zip(paths, differs, strict=True) if found]


def name_some(paths: Sequence[str], limit: int = 4) -> str:
    """How a message names leaves."""
    if not paths:
        return "the position in the data"
    more = f" and {len(paths) - limit} more leaves" if len(paths) > limit else ""
    return ", ".join(paths[:limit]) + more


def _content(standing: Standing) -> tuple[object, ...]:
    return standing.step, standing.samples, standing.fingerprint


def _most_common(values: Sequence[tuple[object, ...]]) -> tuple[object, ...]:
    # Counter keeps the order of first appearance among equals, so a tie goes to the lowest rank.
    return Counter(values).most_common(1)[0][0]


def pack(standing: Standing) -> list[int]:
    """The part of a standing that a control vector (step, fingerprint) does not hold, as signed 32-bit integers."""
    words = (
        standing.samples,
        standing.samples >> 32,
        *standing.layout,
        int(standing.has_state) | int(standing.owes) << 1,
    )
    return [signed(word) for word in words]


def unpack(step: int, fingerprint: tuple[int, int], words: Sequence[int]) -> Standing:
    low, high, first, second, flags = (int(word) & 0xFFFFFFFF for word in words)
    return Standing(step, high << 32 | low, fingerprint, (first, second), bool(flags & 1), bool(flags & 2))
