"""Whatever is retried, whoever comes and goes, whatever the source raises: the batches are those of direct reads."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data.prefetch import Prefetcher, Shard
from elastic_train.data.sampler import Sampler
from elastic_train.data.source import ArraySource, read
from elastic_train.step.plan import run_of

LIMIT_S = 20.0


@dataclass(frozen=True)
class Attempt:
    """One attempt at a step: the members' number, this one's place, and how it ends."""

    members: int
    rank: int
    commits: bool
    num_asked: int  # how many of its shards it asks for before it is interrupted, if it does not commit
    catches_up: bool  # whether the reader has read everything before the attempt begins


@st.composite
def attempts(draw: st.DrawFn, num_shards: int) -> Attempt:
    members = draw(st.integers(1, num_shards))
    return Attempt(
        members,
        draw(st.integers(0, members - 1)),
        draw(st.booleans()),
        draw(st.integers(0, num_shards)),
        draw(st.booleans()),
    )


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Sampler, int, list[Attempt], set[int]]:
    num_shards = draw(st.integers(1, 6))
    sampler = Sampler(draw(st.integers(1, 30)), draw(st.integers(num_shards, 20)), num_shards, draw(st.integers(0, 99)))
    schedule = draw(st.lists(attempts(num_shards), max_size=25))
    return sampler, draw(st.integers(0, 4)), schedule, draw(st.sets(st.integers(0, 60), max_size=12))


@given(schedules())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_batches_equal_direct_reads(schedule: tuple[Sampler, int, list[Attempt], set[int]]) -> None:
    sampler, depth, todo, failing_reads = schedule
    source = ArraySource(x=np.arange(sampler.num_samples) * 10)
    num_reads = 0

    def direct(samples: int, shard: int) -> Shard:
        ids, weights = sampler.shard_ids(samples, shard)
        return read(source, ids), weights

    def flaky(samples: int, shard: int) -> Shard:
        nonlocal num_reads
        num_reads += 1
        if num_reads - 1 in failing_reads:
            raise OSError(f"{samples} {shard}")
        return direct(samples, shard)

    threads = set(threading.enumerate())
    prefetcher = Prefetcher(flaky, depth)
    position = 0
    for attempt in todo:
        run = run_of(sampler.num_shards, attempt.members, attempt.rank)
        prefetcher.expect((position + step * sampler.batch_size, run) for step in range(depth + 1))
        if attempt.catches_up:
            with prefetcher._changed:
                assert prefetcher._changed.wait_for(
                    lambda: depth == 0 or (prefetcher._next() is None and prefetcher._reading is None), LIMIT_S
                )
        failed = False
        for shard in run if attempt.commits else run[: attempt.num_asked]:
            assert prefetcher.num_held <= (depth + 1) * len(run)
            try:
                (batch, weights), (expected, expected_weights) = (
                    prefetcher.get(position, shard),
                    direct(position, shard),
                )
            except OSError as error:
                assert str(error) == f"{position} {shard}"  # of this read, and of no other
                failed = True
                break
            np.testing.assert_array_equal(batch["x"], expected["x"])
            np.testing.assert_array_equal(weights, expected_weights)
        if attempt.commits and not failed:
            position += sampler.batch_size
    assert len(set(threading.enumerate()) - threads) <= 1
    prefetcher.close()
    assert set(threading.enumerate()) <= threads
