"""Partial sums that outlive an attempt at a step, so that survivors of a death need not compute them again.

A subtree's sum depends on the state, the step and its shards alone. So when the same step is tried again from the same
state, with other members, it is still the sum of that subtree.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from elastic_train.membership.group import MARKS_START, NUM_BAD_WORD
from elastic_train.state import TrainState
from elastic_train.step.flat import Layout, Sums
from elastic_train.step.plan import NOTHING_HELD, Node, reusable

MAX_SHARD_BYTES = 256 * 2**20
"""How much memory the gradients of single shards may take, besides the partial sums that the exchange needs anyway."""


class Kept:
    """What one attempt at a step has computed, for the next one."""

    def __init__(self) -> None:
        self._state: weakref.ref[TrainState] | None = None
        self._sums: Mapping[Node, Sums] = NOTHING_HELD
        self._marks: jax.Array | None = None

    def has_room(self, num_shards: int, layout: Layout) -> bool:
        """Whether the gradients of so many single shards may be kept, too."""
        return num_shards * layout.num_bytes <= MAX_SHARD_BYTES

    def keep(self, state: TrainState, sums: Mapping[Node, Sums], marks: jax.Array) -> None:
        """Keeps sums of subtrees of the step after `state`, in place of what was kept before.

        Args:
          marks: int32[1, 4], of all shards in `sums`; see `group.MARKS_START`.
        """
        # Weak: whoever receives another state must not hold two of them because of this.
        self._state, self._sums, self._marks = weakref.ref(state), sums, marks

    def take(self, state: TrainState, nodes: Sequence[Node]) -> tuple[dict[Node, Sums], tuple[int, ...]]:
        """What is of use for the sums of the subtrees `nodes` in the step after `state`, and the shards that are
        missing. All else is let go.

        Nothing is of use unless it was computed from that very object, and all of it is finite: what was not is
        computed again, so that the vote can name the shard.
        """
        held = self._sums if self._state is not None and self._state() is state and self._is_finite() else NOTHING_HELD
        taken, missing = reusable(nodes, held.keys())
        self.drop()
        return {node: held[node] for node in taken}, missing

    def _is_finite(self) -> bool:
        return not np.asarray(self._marks)[0, NUM_BAD_WORD - MARKS_START]

    def drop(self) -> None:
        """Lets all of it go."""
        self._state, self._sums, self._marks = None, NOTHING_HELD, None
