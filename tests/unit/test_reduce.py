"""The exchange computes the canonical tree bit for bit, whatever the number of members."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_train.membership.group import VOTE_SIZE, Identity, Vote
from elastic_train.step.flat import Cut, Layout, add
from elastic_train.step.plan import Node, finish, fold, partials, run_of
from elastic_train.step.reduce import DamagedError, Exchange, Gather, Meeting

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
    votes = np.array([[*Vote(step=rank).pack(), rank] for rank in range(num_members)], np.int32)
    held = tuple(
        tuple(jax.device_put(leaf, meeting._split) for leaf in np.split(part, [SIZES[0]], axis=1)) for part in table
    )
    marks = np.arange(4 * num_members, dtype=np.int32).reshape(num_members, 4)
    total, rows = exchange._program(held, *(jax.device_put(array, meeting._split) for array in (votes, marks)))
    total = total or held[0]  # of one member it is what it brought
    expected = subtree(values, Node(0, num_shards))
    assert np.concatenate(total, axis=1)[0].tobytes() == expected.tobytes()
    votes[:, 4:8] = marks
    np.testing.assert_array_equal(np.asarray(rows)[:, : VOTE_SIZE + 1], votes)


@pytest.mark.parametrize(
    "dtypes",
    [
        ["float32", "bfloat16", "int32"],  # the smallest part of four bytes an element takes the rows along
        ["bfloat16", "int8"],  # none can
        ["float32", "bool", "float16"],
        pytest.param(
            ["int4"],
            marks=pytest.mark.skipif(
                jax.__version_info__ < (0, 11), reason="compiled programs refuse arrays of 4 bits there (tried: 0.10.2)"
            ),
        ),
    ],
)
@pytest.mark.parametrize("rides", [True, False])
def test_control_vectors_arrive_whatever_the_sums_are_made_of(dtypes, rides):
    num_members, sizes = 3, [7, 50, 6]
    meeting = Meeting(jax.devices()[:num_members], jax.devices()[0])
    leaves = [jax.ShapeDtypeStruct((1, size), dtype) for size, dtype in zip(sizes, dtypes, strict=False)]
    exchange = Exchange(meeting, finish(num_members, num_members), Layout(leaves), 10**9, rides)
    rows = [np.arange(num_members * size).reshape(num_members, size) % 40 for size in sizes]
    for row, dtype in zip(rows, dtypes, strict=False):
        if dtype in ("bool", "int4"):  # as model state has them: shard 0's values, and zeros
            row[:] = row[0] % 2
            row[1:] = 0
    held = tuple(
        jax.device_put(jnp.asarray(row).astype(leaf.dtype), meeting._split)
        for row, leaf in zip(rows, leaves, strict=False)
    )
    votes = np.array([[*Vote(step=2**30 + rank).pack(), -rank] for rank in range(num_members)], np.int32)
    marks = np.iinfo(np.int32).min + np.arange(4 * num_members, dtype=np.int32).reshape(num_members, 4)
    total, told = exchange._program((held,), *(jax.device_put(array, meeting._split) for array in (votes, marks)))
    for found, row, leaf in zip(total, rows, leaves, strict=False):
        assert found.dtype == leaf.dtype
        np.testing.assert_array_equal(np.asarray(found[0].astype(jnp.int32)), row.sum(0))
    votes[:, 4:8] = marks
    np.testing.assert_array_equal(np.asarray(told)[:, : VOTE_SIZE + 1], votes)


def test_gather_of_one_member_returns_its_row():
    meeting = Meeting(jax.devices()[:1], jax.devices()[0])
    assert Gather(meeting, 4)([1, -2, 3, 2**31 - 1]).tolist() == [[1, -2, 3, 2**31 - 1]]


@pytest.mark.parametrize("rest", ["constant", "another block's"])
def test_what_a_gather_did_not_fill_is_not_taken_for_rows(monkeypatch, rest):
    meeting = Meeting(jax.devices()[:1], jax.devices()[0])
    gather, row = Gather(meeting, 4), [1, -2, 3, 2**31 - 1]
    program, last = gather._program, []
    monkeypatch.setattr(gather, "_program", lambda rows: last.append(program(rows)) or last[0])
    meeting.block = 3, 1
    assert gather(row).tolist() == [row]
    meeting.block = 3, 2
    if rest == "constant":
        last[0] = jnp.full_like(last[0], 7)
    with pytest.raises(DamagedError):
        gather(row)


def test_what_an_exchange_did_not_fill_is_not_taken_for_votes():
    meeting = Meeting(jax.devices()[:1], jax.devices()[0])
    layout = Layout([jax.ShapeDtypeStruct((1, 5), jnp.float32)], [True], None)
    exchange = Exchange(meeting, finish(1, 1), layout)
    sums, marks = (jnp.full((1, 5), np.nan, jnp.float32),), jnp.array([[-5, 6, 1, 0]], jnp.int32)
    vote = Vote(7, save=True, joiners=(Identity(1, 2, 3),))
    meeting.block = 3, 1
    _, told = exchange([sums], vote.pack(), marks)
    found = Vote.unpack(exchange.wait(told)[0])
    assert found == replace(vote, finite=False, fingerprint=(2**32 - 5, 6), num_bad=1)
    meeting.block = 3, 2
    with pytest.raises(DamagedError):
        exchange.wait(told)
    for rest in (0, -1, 7):
        with pytest.raises(DamagedError):
            exchange.wait(jnp.full_like(told, rest))
    for word in (0, 1, 2, 3, VOTE_SIZE - 1, VOTE_SIZE):
        meeting.block = 3, 1
        with pytest.raises(DamagedError):
            exchange.wait(told.at[0, word].set(told[0, word] ^ 1))


def test_rows_of_their_own_are_sent_when_all_else_is_there():
    """A compiler that knew better could let them overtake the sum, of which they are to tell."""
    meeting = Meeting(jax.devices()[:3], jax.devices()[0])
    leaves = [
        jax.ShapeDtypeStruct((1, size), dtype) for size, dtype in ((70, "float32"), (50, "bfloat16"), (9, "int8"))
    ]
    text = Exchange(meeting, finish(3, 3), Layout(leaves), 1, rides=False)._program.as_text()
    operands = {
        name: re.findall(r"%([\w.-]+)", arguments)
        for name, arguments in re.findall(r"^\s*(?:ROOT )?%([\w.-]+) = [^\n]*? [\w-]+\(([^\n]*)$", text, re.MULTILINE)
    }

    def before(name: str) -> set[str]:
        found: set[str] = set()
        todo = [name]
        while todo:
            new = set(operands.get(todo.pop(), ())) - found
            found |= new
            todo += new
        return found

    collectives = {name for name in operands if re.match(r"all[-_]?(gather|to[-_]?all)", name)}
    assert len(collectives) == 7, collectives  # an all-to-all and an all-gather of each part, and the rows
    last = [name for name in collectives if collectives - {name} <= before(name)]
    assert len(last) == 1, text
