"""The reduction tree: the same bits for every number of members."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.step.memory import most_partials
from elastic_train.step.plan import Node, finish, fold, partials, reusable, run_of, split
from tests.property.plans import evaluate

MAX_SHARDS = 32
SPECIAL = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1e-39, 3.4e38, -3.4e38, 1e8, -1e8, 1.0, -1.0],
    np.float32,
)
property_test = settings(derandomize=True, deadline=None, max_examples=40)


def hard_to_add(seed: int, num_shards: int) -> np.ndarray:
    """float32[num_shards, 64]: many magnitudes and signs, a third of the values from the special ones."""
    random = np.random.default_rng(seed)
    values = (random.standard_normal((num_shards, 64)) * 10.0 ** random.integers(-30, 30, (num_shards, 64))).astype(
        np.float32
    )
    special = random.random(values.shape) < 1 / 3
    values[special] = random.choice(SPECIAL[:-2], special.sum())
    values[:, :8] = -0.0
    values[:, 8:24] = random.choice(SPECIAL[-4:], (num_shards, 16))  # cancels, or loses its small part
    return values


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


@pytest.mark.parametrize("num_shards", range(1, MAX_SHARDS + 1))
def test_the_sum_has_the_same_bits_for_every_number_of_members(num_shards: int) -> None:
    leaves = hard_to_add(num_shards, num_shards)
    with np.errstate(all="ignore"):
        canonical = fold(Node(0, num_shards), leaves.__getitem__, operator.add)
        for num_members in range(1, num_shards + 1):
            plan = finish(num_shards, num_members)
            # Padding holds a value that no sum of the leaves could hide.
            tables = np.full((num_members, plan.slots_per_member, 64), 12345.678, np.float32)
            for node, (rank, index) in plan.owner.items():
                tables[rank, index] = fold(node, leaves.__getitem__, operator.add)
            np.testing.assert_array_equal(bits(evaluate(plan, tables)), bits(canonical), err_msg=str(num_members))


@pytest.mark.parametrize("num_shards", range(1, MAX_SHARDS + 1))
def test_no_number_of_members_gives_one_more_partials(num_shards: int) -> None:
    slots = [finish(num_shards, num_members).slots_per_member for num_members in range(1, num_shards + 1)]
    assert most_partials(num_shards) == max(slots)


@pytest.mark.parametrize("num_shards", [*range(33, 68), 96, 127, 128, 129, 170, 255, 256, 257, 341])
def test_nor_does_any_with_many_shards(num_shards: int) -> None:
    places = ((members, rank) for members in range(1, num_shards + 1) for rank in range(members))
    runs = {(run.start, run.stop) for run in (run_of(num_shards, *place) for place in places)}
    assert most_partials(num_shards) == max(len(partials(*run, num_shards)) for run in runs)


def test_most_partials_looks_at_few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker asks for it when it starts, with as many shards as there are workers or more."""
    looked = []

    def counting(start: int, stop: int, num_shards: int) -> tuple[Node, ...]:
        looked.append(start)
        return partials(start, stop, num_shards)

    monkeypatch.setattr("elastic_train.step.memory.partials", counting)
    assert [most_partials(num_shards) for num_shards in (1000, 4096, 10_000)] == [9, 13, 13]
    assert len(looked) < 2000


def test_the_tree_matters() -> None:
    """The test above would be empty if any order gave these bits."""
    leaves = hard_to_add(3, 16)
    with np.errstate(all="ignore"):
        canonical = fold(Node(0, 16), leaves.__getitem__, operator.add)
        assert (bits(leaves.cumsum(axis=0, dtype=np.float32)[-1]) != bits(canonical)).any()


@given(st.integers(0, 2**32), st.integers(1, 64), st.data())
@property_test
def test_random_values_and_sizes(seed: int, num_shards: int, data: st.DataObject) -> None:
    num_members = data.draw(st.integers(1, num_shards))
    leaves = hard_to_add(seed, num_shards)
    plan = finish(num_shards, num_members)
    with np.errstate(all="ignore"):
        tables = np.full((num_members, plan.slots_per_member, 64), np.nan, np.float32)
        for node, (rank, index) in plan.owner.items():
            tables[rank, index] = fold(node, leaves.__getitem__, operator.add)
        canonical = fold(Node(0, num_shards), leaves.__getitem__, operator.add)
        np.testing.assert_array_equal(bits(evaluate(plan, tables)), bits(canonical))


@pytest.mark.parametrize("num_shards", range(1, MAX_SHARDS + 1))
def test_runs_and_partials(num_shards: int) -> None:
    for num_members in range(1, num_shards + 1):
        runs = [run_of(num_shards, num_members, rank) for rank in range(num_members)]
        assert [shard for run in runs for shard in run] == list(range(num_shards))
        sizes = [len(run) for run in runs]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
        for run in runs:
            nodes = partials(run.start, run.stop, num_shards)
            assert [shard for node in nodes for shard in range(*node)] == list(run)
            assert len(nodes) <= 2 * math.ceil(math.log2(num_shards)) + 1


@pytest.mark.parametrize("num_shards", range(1, MAX_SHARDS + 1))
def test_every_partial_is_read_once_and_padding_never(num_shards: int) -> None:
    for num_members in range(1, num_shards + 1):
        plan = finish(num_shards, num_members)
        assert plan.slots_per_member == max(index for _, index in plan.owner.values()) + 1
        read = sorted(register for addition in plan.additions for register in (addition.left, addition.right))
        first_result = num_members * plan.slots_per_member
        held = {rank * plan.slots_per_member + index for rank, index in plan.owner.values()}
        results = [addition.result for addition in plan.additions]
        assert results == list(range(first_result, first_result + len(results)))
        assert all(max(addition.left, addition.right) < addition.result for addition in plan.additions)
        assert sorted([*read, plan.root]) == sorted([*held, *results])


@pytest.mark.parametrize("num_shards", range(1, MAX_SHARDS + 1))
def test_as_many_members_as_shards_have_one_partial_each(num_shards: int) -> None:
    plan = finish(num_shards, num_shards)
    assert plan.slots_per_member == 1
    assert plan.owner == {Node(shard, shard + 1): (shard, 0) for shard in range(num_shards)}
    assert finish(num_shards, 1).additions == ()


@pytest.mark.parametrize("num_shards", range(1, MAX_SHARDS + 1))
def test_partials_are_maximal(num_shards: int) -> None:
    parent = {}
    waiting = [Node(0, num_shards)]
    while waiting:
        node = waiting.pop()
        middle = split(node)
        if middle is not None:
            children = [Node(node.start, middle), Node(middle, node.stop)]
            size = middle - node.start
            assert size & (size - 1) == 0
            assert size < node.stop - node.start <= 2 * size
            parent.update(dict.fromkeys(children, node))
            waiting += children
    for start in range(num_shards):
        for stop in range(start + 1, num_shards + 1):
            for node in partials(start, stop, num_shards):
                above = parent.get(node)
                assert above is None or above.start < start or above.stop > stop


def test_fold_asks_for_leaves_in_order_and_holds_few() -> None:
    alive = most = 0
    asked = []

    def leaf(shard: int) -> int:
        nonlocal alive, most
        asked.append(shard)
        alive += 1
        most = max(most, alive)
        return shard

    def add(left: int, right: int) -> int:
        nonlocal alive
        alive -= 1
        return left + right

    assert fold(Node(0, 32), leaf, add) == sum(range(32))
    assert asked == list(range(32))
    assert most == 6


def test_more_members_than_shards_is_refused() -> None:
    with pytest.raises(ValueError, match=r"9 members cannot share 8 shards.*raise `shards` or start fewer workers"):
        finish(8, 9)
    with pytest.raises(ValueError, match="rank 3"):
        run_of(8, 3, 3)


@given(st.integers(0, 2**32), st.integers(1, 32), st.booleans(), st.data())
@property_test
def test_a_changed_run_takes_what_is_held_and_asks_for_the_rest(
    seed: int, num_shards: int, with_shards: bool, data: st.DataObject
) -> None:
    """Any run before, any run after: no shard that is in a held sum the new run can use is asked for again, all others
    are, once and in order, and the sums have the bits that they would have without."""
    leaves = hard_to_add(seed, num_shards)
    before, after = (
        run_of(num_shards, members, rank) for members, rank in (data.draw(places(num_shards)) for _ in "ab")
    )
    asked: list[int] = []

    def leaf(shard: int) -> np.ndarray:
        asked.append(shard)
        return leaves[shard]

    with np.errstate(all="ignore"):
        held = {node: fold(node, leaf, operator.add) for node in partials(before.start, before.stop, num_shards)}
        if with_shards:
            held |= {Node(shard, shard + 1): leaves[shard] for shard in before}
        asked.clear()
        nodes = partials(after.start, after.stop, num_shards)
        taken, missing = reusable(nodes, held.keys())
        for node in nodes:
            alone = fold(node, leaves.__getitem__, operator.add)
            np.testing.assert_array_equal(bits(fold(node, leaf, operator.add, held)), bits(alone))
    assert tuple(asked) == missing
    covered = [shard for node in taken for shard in range(*node)]
    assert sorted([*covered, *missing]) == list(after)
    if with_shards:
        assert list(missing) == [shard for shard in after if shard not in before]
    inside = [node for node in held if after.start <= node.start and node.stop <= after.stop]
    assert set(covered) == {shard for node in inside for shard in range(*node)}


def places(num_shards: int) -> st.SearchStrategy[tuple[int, int]]:
    """A number of members, and the rank of one of them."""
    return st.integers(1, num_shards).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1)))
