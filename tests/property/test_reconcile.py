"""Who donates and who receives, over thousands of groups."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.membership.reconcile import Standing, agree, differing, name_some, pack, unpack
from tests.property.examples import examples

words = st.integers(0, 2**32 - 1)
standings = st.lists(
    st.builds(
        Standing,
        step=st.integers(0, 3),
        samples=st.integers(0, 2),
        fingerprint=st.tuples(st.integers(0, 2), st.just(0)),
        layout=st.tuples(st.sampled_from([0, 0, 0, 1]), st.just(0)),
        has_state=st.booleans(),
    ),
    min_size=1,
    max_size=9,
)


@examples(3000)
@given(standings)
def test_everybody_is_a_donor_a_receiver_refused_or_already_equal(group):
    result = agree(group)
    donors, receivers, refused = set(result.donors), set(result.receivers), set(result.refused)
    assert donors and not donors & receivers and not donors & refused and not receivers & refused
    donor = group[result.donors[0]]
    for rank, standing in enumerate(group):
        equal = standing[:3] == donor[:3]
        if rank in donors:
            assert equal
        if rank in receivers:
            assert not equal
        if rank in refused:
            assert standing.layout != donor.layout
        if rank not in donors | receivers | refused:
            assert equal and standing.layout == donor.layout


@examples(3000)
@given(standings)
def test_a_joiner_never_donates_to_a_member_that_holds_state(group):
    result = agree(group)
    holders = [standing for standing in group if standing.has_state]
    assert result.fresh == (not holders)
    if holders:
        assert all(group[rank].has_state for rank in result.donors)
        same_layout = [s.step for s in holders if s.layout == group[result.donors[0]].layout]
        assert group[result.donors[0]].step == max(same_layout)


@examples(2000)
@given(standings)
def test_after_the_transfer_all_agree(group):
    result = agree(group)
    donor = group[result.donors[0]]
    healed = [
        standing._replace(step=donor.step, samples=donor.samples, fingerprint=donor.fingerprint, has_state=True)
        if rank in result.receivers
        else standing
        for rank, standing in enumerate(group)
        if rank not in result.refused
    ]
    again = agree(healed)
    assert again.receivers == () and again.refused == ()
    ranks = range(len(healed))
    assert again.donors == (tuple(rank for rank in ranks if healed[rank].has_state) or tuple(ranks))


@examples(3000)
@given(standings)
def test_undecided_exactly_if_no_state_of_the_newest_step_has_more_holders_than_each_other(group):
    result = agree(group)
    layout = group[result.donors[0]].layout
    newest = group[result.donors[0]].step
    held = Counter(s[1:3] for s in group if s.has_state and s.layout == layout and s.step == newest)
    most = sorted(held.values(), reverse=True)
    assert result.undecided == (len(most) > 1 and most[0] == most[1])
    if held:
        assert held[group[result.donors[0]][1:3]] == most[0]


def test_leaves_that_differ_are_named():
    tables = np.zeros((3, 4, 2), np.int32)
    tables[1, 2, 1] = 7
    tables[2, 0, 0] = 1
    paths = ["a", "b", "c", "d"]
    assert differing(tables, 0, [1], paths) == ["c"]
    assert differing(tables, 0, [1, 2], paths) == ["a", "c"]
    assert name_some(["a", "b", "c", "d", "e", "f"]) == "a, b, c, d and 2 more leaves"
    assert name_some([]) == "the position in the data"


@examples(500)
@given(st.integers(0, 2**62), words, words, words, words, st.booleans(), st.booleans())
def test_standing_survives_the_wire(samples, a, b, c, d, has_state, owes):
    standing = Standing(5, samples, (a, b), (c, d), has_state, owes)
    row = pack(standing)
    assert all(-(2**31) <= word < 2**31 for word in row)
    assert unpack(5, (a, b), row) == standing
