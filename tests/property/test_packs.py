"""How a state of any size is dealt out to packs. Nothing of that size is allocated."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.membership.packs import PACK_BYTES, packs

INT32_MAX = 2**31 - 1
leaves = st.lists(st.tuples(st.integers(0, 2**34), st.sampled_from([1, 2, 4, 8, 16])), max_size=6)


@given(leaves, st.integers(2**24, PACK_BYTES))
def test_every_element_is_in_one_pack_in_order_and_no_pack_is_too_large(leaves, limit):
    dealt = packs(leaves, limit)
    for pack in dealt:
        assert 0 < sum((piece.stop - piece.start) * leaves[piece.leaf][1] for piece in pack) <= limit <= INT32_MAX
    pieces = list(itertools.chain(*dealt))
    assert pieces == sorted(pieces)
    for leaf, (count, _) in enumerate(leaves):
        mine = [piece for piece in pieces if piece.leaf == leaf]
        bounds = [0, *(piece.stop for piece in mine)]
        assert [piece.start for piece in mine] == bounds[:-1]
        assert bounds[-1] == count


@given(st.lists(st.tuples(st.integers(1, 1000), st.sampled_from([1, 4, 8])), min_size=1), st.integers(8000, 20000))
def test_leaves_that_fit_stay_whole_and_packs_are_filled(leaves, limit):
    dealt = packs(leaves, limit)
    assert [piece.leaf for pack in dealt for piece in pack] == list(range(len(leaves)))
    sizes = [sum(leaves[piece.leaf][0] * leaves[piece.leaf][1] for piece in pack) for pack in dealt]
    for size, following in zip(sizes, dealt[1:], strict=False):
        count, itemsize = leaves[following[0].leaf]
        assert size + count * itemsize > limit


def test_a_leaf_of_many_gigabytes_is_sent_in_pieces():
    dealt = packs([(10, 4), (3 * 2**30, 4), (10, 4)])
    assert len(dealt) == 1 + 12 * 2**30 // PACK_BYTES + 1 - (1 if len(dealt[-1]) == 2 else 0)
    assert all(piece.stop - piece.start == PACK_BYTES // 4 for pack in dealt[1:-1] for piece in pack)


def test_an_element_that_fits_no_pack_is_refused():
    with pytest.raises(ValueError, match="leaf 1: an element of 16 bytes"):
        packs([(3, 8), (3, 16)], 8)
