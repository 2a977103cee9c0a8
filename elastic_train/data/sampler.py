"""Which samples a step trains on: a pure function of (seed, samples consumed). Pure: NumPy only.

Training reads an endless sequence of *positions* 0, 1, 2, …. Position `p` is in pass `p // num_samples`, and
each pass goes through all samples in an order of its own. A step takes the next `batch_size` positions,
wherever the last one stopped. So a batch may cross from one pass into the next: its first part ends the old
pass, its second part begins the new one, nothing is dropped or repeated to fill it up, and a sample may be
in it twice, once for each pass. If there are fewer samples than `batch_size`, every batch spans several
passes.

The order of a pass is computed, not stored: a Feistel network keyed by (seed, pass) permutes the numbers
below a power of two, and values that fall outside are sent through again until they are inside (cycle
walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). Any position can be looked up
alone, in constant memory.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 2**40
NUM_ROUNDS = 6
"""Rounds of the Feistel network. Four make a good permutation; two more keep small domains well mixed."""


class Span(NamedTuple):
    """A contiguous piece of a batch inside one pass, for the ledger."""

    pass_index: int
    first: int  # position in the pass
    count: int


@dataclass(frozen=True)
class Sampler:
    """Sample ids by position, and their division into shards.

    >>> sampler = Sampler(num_samples=10, batch_size=4, num_shards=2, seed=0, shuffle=False)
    >>> sampler.shard_ids(first_sample=8, shard=0)
    (array([8, 9]), array([1., 1.], dtype=float32))
    >>> sampler.spans(first_sample=8)
    [Span(pass_index=0, first=8, count=2), Span(pass_index=1, first=0, count=2)]

    Attributes:
      num_samples: size of the data set, at most 2**40.
      batch_size: samples of a step, over all shards.
      num_shards: slices of a batch.
      seed: start of the order, 0 … 2**64-1.
      shuffle: whether each pass has an order of its own; otherwise every pass is 0, 1, 2, ….
    """

    num_samples: int
    batch_size: int
    num_shards: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.num_samples <= MAX_SAMPLES:
            raise ValueError(f"num_samples = {self.num_samples}: must be from 1 to 2**40")
        if not 1 <= self.num_shards <= self.batch_size:
            raise ValueError(
                f"batch_size = {self.batch_size}, num_shards = {self.num_shards}: a batch needs at least one "
                "sample for each shard; raise batch_size or lower num_shards"
            )
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed = {self.seed}: must be from 0 to 2**64-1")

    @property
    def rows(self) -> int:
        """Rows of every shard, padding included: all shards have one shape, so one program serves all."""
        return -(-self.batch_size // self.num_shards)

    def shard_ids(self, first_sample: int, shard: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The samples of one shard, and how much each counts.

        Args:
          first_sample: samples consumed before this step.
          shard: 0 … num_shards-1. Shards are contiguous slices of the batch whose sizes differ by one at
          most.

        Returns:
          ids `int64[rows]` and weights `float32[rows]`. A shard with a row to spare repeats its last sample
          there, with weight 0.
        """
        if not 0 <= shard < self.num_shards:
            raise ValueError(f"shard {shard} is not in 0 … {self.num_shards - 1}")
        start = shard * self.batch_size // self.num_shards
        stop = (shard + 1) * self.batch_size // self.num_shards
        ids = _batch(self, first_sample)[start:stop]
        weights = np.zeros(self.rows, np.float32)
        weights[: ids.size] = 1
        return np.pad(ids, (0, self.rows - ids.size), mode="edge"), weights

    def sample_ids(self, first_sample: int, count: int) -> NDArray[np.int64]:
        """The samples at `count` positions from `first_sample` on: `int64[count]`."""
        spans = self.spans(first_sample, count)
        return np.concatenate([self._in_pass(span) for span in spans] or [np.zeros(0, np.int64)])

    def spans(self, first_sample: int, count: int | None = None) -> list[Span]:
        """Which pieces of which passes the batch (or `count` samples) at `first_sample` consists of, in order."""
        count = self.batch_size if count is None else count
        if first_sample < 0 or count < 0:
            raise ValueError(f"positions begin at 0; got first_sample = {first_sample}, count = {count}")
        spans = []
        while count > 0:
            pass_index, first = divmod(first_sample, self.num_samples)
            size = min(count, self.num_samples - first)
            spans.append(Span(pass_index, first, size))
            first_sample, count = first_sample + size, count - size
        return spans

    def _in_pass(self, span: Span) -> NDArray[np.int64]:
        places = np.arange(span.first, span.first + span.count, dtype=np.int64)
        if not self.shuffle or self.num_samples == 1:
            return places
        return permute(places.astype(np.uint64), self.num_samples, self.seed, span.pass_index).astype(np.int64)


@functools.lru_cache(maxsize=4)
def _batch(sampler: Sampler, first_sample: int) -> NDArray[np.int64]:
    """The whole batch: it costs hardly more than one shard of it, and the next call wants the next shard."""
    return sampler.sample_ids(first_sample, sampler.batch_size)


def permute(places: NDArray[np.uint64], size: int, seed: int, pass_index: int) -> NDArray[np.uint64]:
    """A permutation of 0 … size-1, chosen by (seed, pass_index), at some places. `size` is at least 2."""
    bits = max((size - 1).bit_length(), 2)
    digest = hashlib.blake2b(struct.pack("<QQ", seed, pass_index), digest_size=8 * NUM_ROUNDS).digest()
    keys = np.frombuffer(digest, "<u8").astype(np.uint64)
    result = _feistel(places, keys, bits)
    outside = np.flatnonzero(result >= size)
    while outside.size:  # ends: each cycle of the permutation returns to the place it came from, which is inside
        result[outside] = _feistel(result[outside], keys, bits)
        outside = outside[result[outside] >= size]
    return result


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
    """A permutation of the numbers below 2**bits. The halves may differ by one bit: they are not swapped, but
    changed in turn, each by a hash of the other."""
    low_bits = np.uint64(bits // 2)
    high_bits = np.uint64(bits - bits // 2)
    low = values & ((np.uint64(1) << low_bits) - np.uint64(1))
    high = values >> low_bits
    for i in range(0, NUM_ROUNDS, 2):
        low = low ^ (_hash(high, keys[i]) >> (np.uint64(64) - low_bits))
        high = high ^ (_hash(low, keys[i + 1]) >> (np.uint64(64) - high_bits))
    return (high << low_bits) | low


def _hash(values: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: every bit of the result depends on every bit of value and key."""
    mixed = values ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
