"""Batch policies: how large a step's batch is, and how it is cut into shards. Pure.

`fixed` (the default): `batch_size` samples a step, whoever takes part, cut into V fixed shards. The mathematics does
not notice who does the work, so nothing about the learning rate changes when members come and go.

`per_worker`: `batch_size` samples a step for every member; each member is one shard. The batch grows and shrinks with
the group, as in JAX's guide to fault tolerance, so what a run computes depends on who was a member when. A schedule by
step then advances at another rate per sample; `Trainer.learning_rate_scale` can make up for the size of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elastic_train.data.sampler import Sampler


class Batches(Protocol):
    """What a step needs to know about its batch."""

    @property
    def sampler(self) -> Sampler: ...
    @property
    def rows(self) -> int:
        """Samples of one shard, padding included."""
        ...

    def num_shards(self, members: int) -> int: ...
    def size(self, members: int) -> int:
        """Samples of one step."""
        ...

    def shard_ids(self, first_sample: int, shard: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids int64[rows] and weights float32[rows] of one shard of the batch at position `first_sample`."""
        ...


@dataclass(frozen=True)
class FixedBatches:
    """Policy `fixed`."""

    sampler: Sampler

    @property
    def rows(self) -> int:
        return self.sampler.rows

    def num_shards(self, members: int) -> int:
        return self.sampler.num_shards

    def size(self, members: int) -> int:
        return self.sampler.batch_size

    def shard_ids(self, first_sample: int, shard: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self.sampler.shard_ids(first_sample, shard)


@dataclass(frozen=True)
class PerWorkerBatches:
    """Policy `per_worker`; the sampler's batch is one member's, in one shard."""

    sampler: Sampler

    @property
    def rows(self) -> int:
        return self.sampler.batch_size

    def num_shards(self, members: int) -> int:
        return members

    def size(self, members: int) -> int:
        return members * self.sampler.batch_size

    def shard_ids(self, first_sample: int, shard: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        return self.sampler.shard_ids(first_sample + shard * self.sampler.batch_size, 0)


def batches(policy: str, num_samples: int, batch_size: int, num_shards: int, seed: int) -> Batches:
    """The policy named `policy` over a source of `num_samples` samples."""
    if policy == "per_worker":
        return PerWorkerBatches(Sampler(num_samples, batch_size, 1, seed))
    return FixedBatches(Sampler(num_samples, batch_size, num_shards, seed))
