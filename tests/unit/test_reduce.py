"""The exchange computes the canonical tree bit for bit, whatever the number of members."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_train.membership.group import WITNESS_WORD, DamagedError, Vote
from elastic_train.step.flat import Cut, Layout, add
from elastic_train.step.plan import Node, finish, fold, partials, run_of
from elastic_train.step.reduce import Exchange, Gather, Meeting

SIZES = (1003, 600)
"""The first is a prime: only the second can be cut evenly."""
SIZE = sum(SIZES)


def shard_values(num_shards: int) -> np.ndarray:
    """float32[num_shards, SIZE] whose sum depends on the order of additions, minus zeros included."""
    generator = np.random.default_rng(num_shards)
    values = generator.standard_normal((num_shards, SIZE)) * 10.0 ** generator.integers(-6, 7, (num_shards, SIZE))
    values[:, :10] = -0.0
    return values.astype(np.float32)


def subtree(values: np.ndarray, node: Node) -> np.ndarray:
    return fold(node, lambda shard: values[shard], np.add)


def stacked(rows: list, sharding) -> jax.Array:
    return jax.device_put(np.stack(rows), sharding)


def test_a_sum_of_16_bit_numbers_is_rounded_before_it_is_used():
    """Within one program, too: 256 + 1 is 256 there, and so is 256 + 1 + 1."""
    big, one = jnp.full(3, 256, jnp.bfloat16), jnp.ones(3, jnp.bfloat16)
    assert jax.jit(lambda x, y: add(add(x, y), y))(big, one).tolist() == [256, 256, 256]
    assert jax.jit(lambda x, y: add(x, add(y, y)))(big, one).tolist() == [258, 258, 258]


def test_the_smallest_numbers_of_16_bits_are_not_lost():
    for dtype in (jnp.float16, jnp.bfloat16):
        small = jnp.array([1e-5, 3e-5, 6e-8, 1.0], dtype)
        assert jax.jit(add)(small, small).tolist() == (np.asarray(small) * 2).tolist()


@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("large_bytes", [1, 40, 10**9])
def test_leaves_come_back_from_their_pieces(num_parts, large_bytes):
    leaves = (
        jnp.arange(12, dtype=jnp.float32).reshape(1, 12),
        jnp.full(1, 7, jnp.float32),
        jnp.arange(6, dtype=jnp.int32).reshape(1, 2, 3),
        jnp.arange(9, dtype=jnp.bfloat16).reshape(1, 9),
        jnp.zeros((1, 0, 4), jnp.int8),  # the only one of its dtype, without elements
    )
    layout = Layout([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves], [False, True, True, True, True])
    cut = Cut(layout, num_parts, large_bytes)
    pieces = cut.pieces(leaves)
    assert {piece.shape[0] for piece in pieces} == {num_parts}
    for found, leaf in zip(cut.leaves([piece.reshape(-1) for piece in pieces]), leaves, strict=True):
        assert found.dtype == leaf.dtype
        np.testing.assert_array_equal(found, leaf)


@pytest.mark.parametrize("large_bytes", [1, 10**9])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("num_members", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_shards", [5, 8])
def test_sum_over_members_equals_the_tree_on_one_member(num_members, num_shards, dtype, large_bytes):
    values = shard_values(num_shards).astype(dtype)
    meeting = Meeting(jax.devices()[:num_members], jax.devices()[0])
    plan = finish(num_shards, num_members)
    exchange = Exchange(meeting, plan, Layout([jax.ShapeDtypeStruct((1, size), dtype) for size in SIZES]), large_bytes)
    table = np.full((plan.slots_per_member, num_members, SIZE), np.nan, dtype)  # padding must never count
    for rank in range(num_members):
        run = run_of(num_shards, num_members, rank)
        for index, node in enumerate(partials(run.start, run.stop, num_shards)):
            table[index, rank] = subtree(values, node)
    votes = np.array([Vote(step=rank).pack() for rank in range(num_members)], np.int32)
    held = tuple(
        tuple(jax.device_put(leaf, meeting._split) for leaf in np.split(part, [SIZES[0]], axis=1)) for part in table
    )
    marks = np.arange(4 * num_members, dtype=np.int32).reshape(num_members, 4)
    total, rows = exchange._program(held, *(jax.device_put(array, meeting._split) for array in (votes, marks)))
    total = total or held[0]  # of one member it is what it brought
    expected = subtree(values, Node(0, num_shards))
    assert np.concatenate(total, axis=1)[0].tobytes() == expected.tobytes()
    votes[:, 4:8] = marks
    rows = np.array(rows)
    votes[:, WITNESS_WORD] = rows[0, WITNESS_WORD]  # the same in all of them
    np.testing.assert_array_equal(rows, votes)


@pytest.mark.parametrize(
    "dtypes",
    [
        ["float32", "bfloat16", "int32"],  # the smallest part of four bytes an element takes the rows along
        ["bfloat16", "int8"],  # none can
    ],
)
def test_control_vectors_arrive_whatever_the_sums_are_made_of(dtypes):
    num_members, sizes = 3, [7, 50, 6]
    meeting = Meeting(jax.devices()[:num_members], jax.devices()[0])
    leaves = [jax.ShapeDtypeStruct((1, size), dtype) for size, dtype in zip(sizes, dtypes, strict=False)]
    exchange = Exchange(meeting, finish(num_members, num_members), Layout(leaves), 10**9)
    rows = [jnp.arange(num_members * size).reshape(num_members, size) % 40 for size in sizes]
    held = tuple(
        jax.device_put(row.astype(leaf.dtype), meeting._split) for row, leaf in zip(rows, leaves, strict=False)
    )
    votes = np.array([Vote(step=2**30 + rank).pack() for rank in range(num_members)], np.int32)
    marks = np.iinfo(np.int32).min + np.arange(4 * num_members, dtype=np.int32).reshape(num_members, 4)
    total, told = exchange._program((held,), *(jax.device_put(array, meeting._split) for array in (votes, marks)))
    for found, row, leaf in zip(total, rows, leaves, strict=False):
        assert found.dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(found[0], np.int32), np.asarray(row.sum(0)))
    votes[:, 4:8] = marks
    first = [np.asarray(found)[0, 0] for found in total]
    bits = [int(value.view(f"uint{8 * value.itemsize}")) for value in first]
    carrier = min((i for i, value in enumerate(first) if value.itemsize == 4), key=lambda i: sizes[i], default=None)
    expected = [bit for i, bit in enumerate(bits) if i != carrier]
    votes[:, WITNESS_WORD] = np.bitwise_xor.reduce(np.array(expected, np.uint32)).view(np.int32)
    np.testing.assert_array_equal(np.asarray(told), votes)


def test_gather_of_one_member_returns_its_row():
    meeting = Meeting(jax.devices()[:1], jax.devices()[0])
    assert Gather(meeting, 4)([1, -2, 3, 2**31 - 1]).tolist() == [[1, -2, 3, 2**31 - 1]]


def test_what_a_gather_did_not_fill_is_not_taken_for_rows(monkeypatch):
    meeting = Meeting(jax.devices()[:1], jax.devices()[0])
    gather = Gather(meeting, 4)
    for rest in (0, 1, -1):
        monkeypatch.setattr(gather, "_program", lambda rows, rest=rest: jnp.full_like(rows, rest))
        with pytest.raises(DamagedError):
            gather([1, -2, 3, 2**31 - 1])
