"""Which samples a step trains on."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.data.sampler import Sampler, permute

property_test = settings(derandomize=True, deadline=None, max_examples=150)
seeds = st.integers(0, 2**32 - 1)


def batch(sampler: Sampler, first_sample: int) -> np.ndarray:
    """The real samples of all shards, in order."""
    shards = [sampler.shard_ids(first_sample, shard) for shard in range(sampler.num_shards)]
    return np.concatenate([ids[weights > 0] for ids, weights in shards])


@given(st.integers(1, 3000), seeds, st.integers(0, 2**40))
@property_test
def test_each_pass_is_a_permutation(num_samples: int, seed: int, pass_index: int) -> None:
    sampler = Sampler(num_samples, 1, 1, seed)
    ids = sampler.sample_ids(pass_index * num_samples, num_samples)
    assert ids.dtype == np.int64
    np.testing.assert_array_equal(np.sort(ids), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 7, 8, 9])
def test_tiny_data_sets(num_samples: int) -> None:
    orders = set()
    for pass_index in range(64):
        ids = Sampler(num_samples, 1, 1, 7).sample_ids(pass_index * num_samples, num_samples)
        assert sorted(ids) == list(range(num_samples))
        orders.add(tuple(ids))
    assert len(orders) >= min(64 // 2, [1, 1, 2, 5, 10][min(num_samples, 4)])


@given(st.integers(30, 2**40), seeds, st.integers(0, 1000))
@property_test
def test_passes_and_seeds_differ(num_samples: int, seed: int, pass_index: int) -> None:
    places = np.arange(30, dtype=np.uint64)
    here = permute(places, num_samples, seed, pass_index)
    assert (here < num_samples).all()
    assert len(set(here.tolist())) == 30
    assert (here != permute(places, num_samples, seed, pass_index + 1)).any()
    assert (here != permute(places, num_samples, seed + 1, pass_index)).any()
    assert (here != places).any()


def test_the_order_is_well_mixed() -> None:
    """Each sample is as likely at each tenth of a pass, and neighbours are not kept together."""
    num_samples, num_passes = 100, 2000
    orders = np.stack(
        [Sampler(num_samples, 1, 1, 3).sample_ids(i * num_samples, num_samples) for i in range(num_passes)]
    )
    counts = np.array([np.bincount(orders[:, place], minlength=num_samples) for place in range(num_samples)])
    # Chi-squared with 99 * 99 degrees of freedom: 9801, standard deviation 140.
    chi_squared = ((counts - num_passes / num_samples) ** 2 / (num_passes / num_samples)).sum()
    assert abs(chi_squared - 9801) < 6 * 140
    ascending = (np.diff(orders, axis=1) == 1).mean()
    assert abs(ascending - 1 / num_samples) < 0.002


@given(
    st.integers(1, 500),
    st.integers(1, 200),
    st.integers(1, 20),
    st.integers(1, 20),
    seeds,
    st.integers(0, 10**6),
)
@property_test
def test_samples_of_a_batch_do_not_depend_on_the_shards(
    num_samples: int, batch_size: int, shards: int, other_shards: int, seed: int, first_sample: int
) -> None:
    whole = Sampler(num_samples, batch_size, 1, seed)
    expected = batch(whole, first_sample)
    assert expected.size == batch_size
    for num_shards in (min(shards, batch_size), min(other_shards, batch_size)):
        sampler = Sampler(num_samples, batch_size, num_shards, seed)
        np.testing.assert_array_equal(batch(sampler, first_sample), expected)


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 200), seeds)
@property_test
def test_batches_that_cross_passes_neither_lose_nor_repeat(
    num_samples: int, batch_size: int, other_batch_size: int, seed: int
) -> None:
    """Two passes in batches of one size, then of another: every sample came twice."""
    sampler, other = (
        Sampler(num_samples, batch_size, 1, seed),
        Sampler(num_samples, other_batch_size, 1, seed),
    )
    ids: list[np.ndarray] = []
    consumed = 0
    while consumed < 2 * num_samples:
        ids.append(batch(sampler if consumed < num_samples else other, consumed))
        consumed += ids[-1].size
    seen = np.concatenate(ids)
    for pass_index in range(2):
        one_pass = seen[pass_index * num_samples : (pass_index + 1) * num_samples]
        np.testing.assert_array_equal(np.sort(one_pass), np.arange(num_samples))


@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 200), seeds, st.integers(0, 10**9))
@property_test
def test_shards_have_one_shape_and_padding_has_no_weight(
    num_samples: int, batch_size: int, num_shards: int, seed: int, first_sample: int
) -> None:
    num_shards = min(num_shards, batch_size)
    sampler = Sampler(num_samples, batch_size, num_shards, seed)
    real = []
    for shard in range(num_shards):
        ids, weights = sampler.shard_ids(first_sample, shard)
        assert ids.shape == weights.shape == (-(-batch_size // num_shards),)
        assert (ids.dtype, weights.dtype) == (np.int64, np.float32)
        count = int(weights.sum())
        np.testing.assert_array_equal(weights, [1] * count + [0] * (ids.size - count))
        assert set(ids[count:]) <= set(ids[:count])
        real.append(count)
    assert sum(real) == batch_size
    assert max(real) - min(real) <= 1


@given(st.integers(1, 300), st.integers(1, 200), seeds, st.integers(0, 10**9))
@property_test
def test_spans_name_every_position(num_samples: int, batch_size: int, seed: int, first_sample: int) -> None:
    sampler = Sampler(num_samples, batch_size, 1, seed)
    positions = [
        span.pass_index * num_samples + span.first + i
        for span in sampler.spans(first_sample)
        for i in range(span.count)
    ]
    assert positions == list(range(first_sample, first_sample + batch_size))
    assert all(0 <= span.first < span.first + span.count <= num_samples for span in sampler.spans(first_sample))


def test_a_million_million_samples_take_no_memory() -> None:
    sampler = Sampler(10**12, 1024, 8, 5)
    tracemalloc.start()
    try:
        ids, _ = sampler.shard_ids(10**12 - 100, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert ids.max() > 2**32
    assert (ids < 10**12).all()


def test_without_shuffling_passes_are_in_order() -> None:
    assert Sampler(5, 4, 2, 0, shuffle=False).sample_ids(3, 9).tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_the_order_never_changes_between_versions() -> None:
    """A resumed run must read on where the old program stopped."""
    two_passes = [0, 7, 2, 5, 3, 8, 4, 1, 9, 6, 2, 9, 0, 1, 4, 3, 7, 6, 8, 5]
    assert Sampler(10, 10, 1, 42).sample_ids(0, 20).tolist() == two_passes


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="batch_size = 4, num_shards = 5"):
        Sampler(10, 4, 5, 0)
    with pytest.raises(ValueError, match="num_samples = 0"):
        Sampler(0, 4, 1, 0)
    with pytest.raises(ValueError, match="shard 2"):
        Sampler(10, 4, 2, 0).shard_ids(0, 2)
