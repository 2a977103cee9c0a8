"""What members conclude from a block: the same conclusion everywhere, and the right one."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.membership.group import (
    MAX_COUNT,
    MAX_JOINERS_PER_STEP,
    VOTE_SIZE,
    Commit,
    Differ,
    Fenced,
    Identity,
    NonFinite,
    Retry,
    Shrink,
    View,
    Vote,
    judge,
)

property_test = settings(derandomize=True, deadline=None, max_examples=200)

int31 = st.integers(0, 2**31 - 1)
uint32 = st.integers(0, 2**32 - 1)
identities = st.builds(Identity, slot=int31, incarnation=int31, node=int31)
small_identities = st.builds(
    Identity, slot=st.integers(0, 9), incarnation=st.integers(0, 3), node=st.integers(100, 200)
)
votes = st.builds(
    Vote,
    step=st.integers(0, 2**63 - 1),
    ok=st.booleans(),
    finite=st.booleans(),
    stop=st.booleans(),
    leave=st.booleans(),
    drained=st.booleans(),
    spent=st.booleans(),
    checked=st.booleans(),
    nonfinite=st.integers(0, MAX_COUNT),
    fingerprint=st.tuples(uint32, uint32),
    num_bad=int31,
    first_bad=int31,
    joiners=st.lists(identities, max_size=MAX_JOINERS_PER_STEP).map(tuple),
)


@st.composite
def views(draw: st.DrawFn) -> View:
    """One to eight members with slots below 10 and nodes below 100."""
    slots = sorted(draw(st.sets(st.integers(0, 9), min_size=1, max_size=8)))
    nodes = draw(st.lists(st.integers(1, 99), min_size=len(slots), max_size=len(slots), unique=True))
    members = (Identity(slot, draw(st.integers(0, 3)), node) for slot, node in zip(slots, nodes, strict=True))
    return View.of(draw(st.integers(0, 1000)), members)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[View, dict[int, int], dict[int, int], list[Vote]]:
    """A view, the barrier's answers before and after (members may be gone or changed), and the votes."""
    view = draw(views())
    before = {node: draw(st.integers(0, 2**63)) for node in view.nodes}
    fates = {node: draw(st.sampled_from(["same", "same", "same", "gone", "changed"])) for node in view.nodes}
    after = {node: before[node] + (fates[node] == "changed") for node in view.nodes if fates[node] != "gone"}
    checked = draw(st.sampled_from([False, False, True]))
    asked = st.builds(
        Vote,
        step=st.just(7),
        ok=st.sampled_from([True, True, True, False]),
        stop=st.sampled_from([False, False, True]),
        leave=st.booleans(),
        drained=st.booleans(),
        finite=st.sampled_from([True, True, True, True, False]),
        num_bad=st.sampled_from([0, 0, 0, 0, 2]),
        first_bad=st.just(3),
        nonfinite=st.integers(0, 3),
        spent=st.booleans(),
        checked=st.just(checked),
        fingerprint=st.sampled_from([(1, 2), (1, 2), (1, 2), (1, 3)]),
        # No node id is used twice.
        joiners=st.lists(small_identities, max_size=MAX_JOINERS_PER_STEP, unique_by=lambda joiner: joiner.node).map(
            tuple
        ),
    )
    return view, before, after, [draw(asked) for _ in view.members]


@given(votes)
@property_test
def test_a_vote_survives_packing(vote: Vote) -> None:
    row = vote.pack()
    assert len(row) == VOTE_SIZE
    assert all(-(2**31) <= number < 2**31 for number in row)
    assert Vote.unpack(row) == vote


@given(st.lists(identities, min_size=MAX_JOINERS_PER_STEP + 1, max_size=20).map(tuple))
@property_test
def test_joiners_that_do_not_fit_wait_for_the_next_step(joiners: tuple[Identity, ...]) -> None:
    assert Vote.unpack(Vote(0, joiners=joiners).pack()).joiners == joiners[:MAX_JOINERS_PER_STEP]


@given(blocks())
@property_test
def test_members_with_equal_inputs_draw_equal_verdicts(block: tuple) -> None:
    view, before, after, said = block
    verdicts = {node: judge(view, node, before, after, said) for node in view.nodes}
    inside = [verdict for verdict in verdicts.values() if not isinstance(verdict, Fenced)]
    assert all(verdict == inside[0] for verdict in inside)


@given(blocks(), st.booleans())
@property_test
def test_fenced_exactly_if_the_barrier_does_not_know_me(block: tuple, exchanged: bool) -> None:
    view, before, after, said = block
    for node in view.nodes:
        verdict = judge(view, node, before, after, said if exchanged else None)
        all_there = after == before
        assert isinstance(verdict, Fenced) == (after.get(node) != before[node] or (all_there and not exchanged))


@given(blocks(), st.booleans())
@property_test
def test_shrink_drops_exactly_those_that_vanished_or_changed(block: tuple, exchanged: bool) -> None:
    view, before, after, said = block
    gone = tuple(member for member in view.members if after.get(member.node) != before[member.node])
    for member in view.members:
        verdict = judge(view, member.node, before, after, said if exchanged else None)
        assert isinstance(verdict, Shrink) == (bool(gone) and member not in gone)
        if isinstance(verdict, Shrink):
            assert verdict.gone == gone
            assert verdict.view.epoch == view.epoch + 1
            assert verdict.view.members == tuple(other for other in view.members if other not in gone)


@given(blocks())
@property_test
def test_a_member_that_was_not_there_at_entry_counts_as_gone(block: tuple) -> None:
    view, before, _, said = block
    absent, *others = view.nodes
    entered = {node: incarnation for node, incarnation in before.items() if node != absent}
    assert judge(view, absent, entered, before, said) == Fenced()
    for node in others:
        verdict = judge(view, node, entered, before, said)
        assert verdict == Shrink(view.without([absent]), view.members[:1])


@given(blocks())
@property_test
def test_all_there(block: tuple) -> None:
    view, before, _, said = block
    me = view.nodes[0]
    assert judge(view, me, before, before, None) == Fenced()
    verdict = judge(view, me, before, before, said, max_skips=2)
    voted = list(zip(view.members, said, strict=True))
    failed = tuple(member for member, vote in voted if not vote.ok)
    bad = tuple(member for member, vote in voted if vote.num_bad)
    in_a_row = max(vote.nonfinite for vote in said) + 1
    nonfinite = NonFinite(bad, (3,) * len(bad), 2 * len(bad), in_a_row)
    is_finite = not bad and all(vote.finite for vote in said)
    if said[0].checked and len({vote.fingerprint for vote in said}) > 1:
        assert isinstance(verdict, Differ)
        check_groups(view, said, verdict)
    elif failed:
        assert verdict == Retry(failed, tuple(member for member, vote in voted if not vote.ok and vote.spent))
    elif not is_finite and in_a_row > 2:
        assert verdict == Retry(nonfinite=nonfinite)
    else:
        assert isinstance(verdict, Commit)
        assert verdict.skipped == (None if is_finite else nonfinite)
        check_commit(view, said, replace(verdict, skipped=None))


def check_groups(view: View, said: list[Vote], verdict: Differ) -> None:
    """Every member is in one group, with all that show what it shows; the largest comes first."""
    shown = {member: vote.fingerprint for member, vote in zip(view.members, said, strict=True)}
    assert sorted(member for group in verdict.groups for member in group) == sorted(view.members)
    assert len(verdict.groups) == len(set(shown.values()))
    assert all(len({shown[member] for member in group}) == 1 for group in verdict.groups)
    assert [len(group) for group in verdict.groups] == sorted(map(len, verdict.groups), reverse=True)


def check_commit(view: View, said: list[Vote], verdict: Commit) -> None:
    leaving = tuple(member for member, vote in zip(view.members, said, strict=True) if vote.leave)
    if leaving == view.members:  # somebody must hand the state on
        leaving = tuple(member for member, vote in zip(view.members, said, strict=True) if not vote.drained)
    assert verdict.stop == (any(vote.stop for vote in said) or leaving == view.members)
    if verdict.stop:
        assert verdict == Commit(view, stop=True)
        return
    assert verdict.leaving == leaving
    assert set(verdict.view.members) == (set(view.members) - set(leaving)) | set(verdict.joining)
    assert set(verdict.joining) <= set(said[0].joiners)
    changed = bool(leaving or verdict.joining)
    assert verdict.view.epoch == view.epoch + changed
    stay_slots = {member.slot for member in view.members if member not in leaving}
    admitted_slots = {joiner.slot for joiner in said[0].joiners} - stay_slots
    assert {joiner.slot for joiner in verdict.joining} == admitted_slots


@given(
    views(),
    st.sets(st.integers(1, 99)),
    st.lists(small_identities, max_size=12, unique_by=lambda joiner: joiner.node),
)
@property_test
def test_the_next_view_has_each_slot_once(view: View, leaving: set[int], joiners: list[Identity]) -> None:
    after = view.next(leaving, joiners)
    slots = [member.slot for member in after.members]
    assert len(slots) == len(set(slots))
    assert list(after.nodes) == sorted(set(after.nodes))
    assert after.epoch == view.epoch + 1
    stay = {member for member in view.members if member.node not in leaving}
    assert stay <= set(after.members) <= stay | set(joiners)
    assert [after.rank(node) for node in after.nodes] == list(range(len(after.members)))
