"""What one `live_devices` block meant, and who is in the next one. Pure: no JAX, no sockets, no clock.

Every member runs this code on the same inputs (the barrier's answer and the all-gathered votes are equal on
all members that get them), so all members draw the same conclusion without talking further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

MAX_JOINERS_PER_STEP = 8
"""How many joiners fit into one control vector; more are admitted by the next step."""

VOTE_SIZE = 8 + 3 * MAX_JOINERS_PER_STEP
"""Length of a control vector, in int32."""

FLAGS_WORD, FINITE_BIT = 2, 1 << 1
MARKS_START, NUM_BAD_WORD, MARKS_STOP = 4, 6, 8
"""Where a control vector holds what is known on the device only: the fingerprint's two words, how many of the member's
shards were not finite, and the first of these. The exchange writes them, and clears `FINITE_BIT` of all rows if the sum
is not finite."""


class Identity(NamedTuple):
    """One start of a worker: the slot it fills, which start of that slot, and JAX's process id."""

    slot: int
    incarnation: int
    node: int


def name_slots(slots: Iterable[int]) -> str:
    """How a message names slots.

    >>> name_slots([0, 1, 2, 3, 5, 6])
    'slots 0-3, 5, 6'
    """
    numbers = list(slots)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ("slot " if len(numbers) == 1 else "slots ") + ", ".join(parts)


@dataclass(frozen=True)
class View:
    """A version of the member list. Members are in ascending order of their node ids: the oldest comes first.

    The order is also that of their devices in a mesh, which XLA wants in ascending order of device ids.
    """

    epoch: int
    members: tuple[Identity, ...]

    def __post_init__(self) -> None:
        slots = [member.slot for member in self.members]
        if len(slots) != len(set(slots)):
            raise ValueError(f"a view holds each slot once; got slots {slots}")
        if list(self.nodes) != sorted(set(self.nodes)):
            raise ValueError(f"a view holds each node once, in ascending order; got nodes {self.nodes}")

    @classmethod
    def of(cls, epoch: int, members: Iterable[Identity]) -> View:
        """A view of `members`, put in order."""
        return cls(epoch, tuple(sorted(members, key=lambda member: member.node)))

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        return tuple(member.node for member in self.members)

    @cached_property
    def _identities(self) -> frozenset[Identity]:
        return frozenset(self.members)

    def has(self, identity: Identity) -> bool:
        """Whether it is a member. The members are not walked over, as they are by `in view.members`."""
        return identity in self._identities

    def rank(self, node: int) -> int:
        """Position of `node` among the members. Raises ValueError if it is none."""
        return self.nodes.index(node)

    def without(self, nodes: Iterable[int]) -> View:
        """The next view, less `nodes`."""
        gone = frozenset(nodes)
        return View(self.epoch + 1, tuple(m for m in self.members if m.node not in gone))

    def next(self, leaving: Iterable[int], joiners: Iterable[Identity]) -> View:
        """The next view after a commit: `leaving` out, then `joiners` in.

        A joiner whose slot a member still fills is left out; it is admitted once that member is gone.
        """
        stay = self.without(leaving).members
        taken = {member.slot for member in stay}
        new = {joiner.slot: joiner for joiner in joiners if joiner.slot not in taken}
        return View.of(self.epoch + 1, (*stay, *new.values()))


def likely(
    nodes: tuple[int, ...], me: int, joined: tuple[int, ...], is_settled: bool, limit: int
) -> tuple[tuple[int, ...], ...]:
    """The lists of nodes that may come after `nodes`, as far as `me` is concerned, the most likely first.

    Args:
      joined: the list with all candidates; `nodes` itself if there are none.
      is_settled: whether to think of deaths, too: the list without each other node.
      limit: the largest number of lists.

    >>> likely((1, 2, 5), 2, (1, 2, 5, 6), True, 8)
    ((1, 2, 5, 6), (2, 5), (1, 2))
    """
    found = [joined] if joined != nodes else []
    others = [node for node in nodes if node != me] if is_settled else []
    found += [tuple(other for other in nodes if other != node) for node in others[: max(0, limit - len(found))]]
    return tuple(found[:limit])


MAX_COUNT = 2**24 - 1
"""The largest number that a control vector can hold for `Vote.nonfinite`, which shares a word with the flags."""


@dataclass(frozen=True)
class Vote:
    """One member's control vector: what it says about a step, and what it asks for.

    `pack` gives int32[VOTE_SIZE]; `unpack` reads one row back.

    Attributes:
      step: committed steps.
      ok: its own code did not raise.
      finite: so is the sum over all shards.
      stop, leave: it asks for the end of the job; to leave it alone.
      save: it asks for the state after the step to be saved.
      drained: it asks to leave since its slot is to be empty, which can wait until another one has the state.
      spent: if its code raised, that was the last time its budget allows.
      checked: `fingerprint` is that of its state, and all must be equal.
      nonfinite: how many times in a row, as far as it knows, the gradient was not finite; below 2**24.
      fingerprint: 64 bits over the state, as two words.
      num_bad, first_bad: how many of its shards were not finite, and the first of these.
      joiners: candidates it knows of.
    """

    step: int
    ok: bool = True
    finite: bool = True
    stop: bool = False
    leave: bool = False
    drained: bool = False
    save: bool = False
    spent: bool = False
    checked: bool = False
    nonfinite: int = 0
    fingerprint: tuple[int, int] = (0, 0)
    num_bad: int = 0
    first_bad: int = 0
    joiners: tuple[Identity, ...] = ()

    def pack(self) -> list[int]:
        """The vector as signed 32-bit integers."""
        flags = self.ok | self.finite << 1 | self.stop << 2 | self.leave << 3 | self.spent << 4 | self.checked << 5
        flags |= self.save << 6 | self.drained << 7 | self.nonfinite << 8
        joiners = self.joiners[:MAX_JOINERS_PER_STEP]
        head = [
            signed(self.step),
            signed(self.step >> 32),
            signed(flags),
            len(joiners),
            *map(signed, self.fingerprint),
            self.num_bad,
            self.first_bad,
        ]
        body = [number for joiner in joiners for number in joiner]
        return head + body + [0] * (VOTE_SIZE - len(head) - len(body))

    @classmethod
    def unpack(cls, row: Sequence[int]) -> Vote:
        numbers = [int(number) for number in row]
        flags, count = numbers[FLAGS_WORD] & 0xFFFFFFFF, numbers[3]
        first, second, num_bad, first_bad = numbers[MARKS_START:MARKS_STOP]
        body = numbers[8:]
        return cls(
            step=(numbers[1] << 32) | (numbers[0] & 0xFFFFFFFF),
            ok=bool(flags & 1),
            finite=bool(flags & 2),
            stop=bool(flags & 4),
            leave=bool(flags & 8),
            drained=bool(flags & 128),
            save=bool(flags & 64),
            spent=bool(flags & 16),
            checked=bool(flags & 32),
            nonfinite=flags >> 8,
            fingerprint=(first & 0xFFFFFFFF, second & 0xFFFFFFFF),
            num_bad=num_bad,
            first_bad=first_bad,
            joiners=tuple(Identity(*body[3 * i : 3 * i + 3]) for i in range(count)),
        )


def signed(number: int) -> int:
    """The low 32 bits of `number` as a signed integer."""
    number &= 0xFFFFFFFF
    return number - (1 << 32) if number >= 1 << 31 else number


@dataclass(frozen=True)
class Fenced:
    """The barrier does not know me, or knows another incarnation under my node id: exit at once.

    Also if my exchange failed and all are there after all: the others may have committed.
    """


@dataclass(frozen=True)
class Shrink:
    """Members are gone. Nothing was committed: the same step again, on `view`."""

    view: View
    gone: tuple[Identity, ...]


@dataclass(frozen=True)
class Differ:
    """Nothing was committed: the members hold different states. They must be made equal before the step is taken.

    Attributes:
      groups: members with equal states, the largest group first.
    """

    groups: tuple[tuple[Identity, ...], ...]


@dataclass(frozen=True)
class NonFinite:
    """The gradient or the loss of a step is not finite.

    Attributes:
      members: whose shards are not; nobody's if only the sum of all overflowed, or all weights are zero.
      shards: the first such shard of each of them.
      num_shards: how many there are in all.
      in_a_row: how many times in a row that was so, this time included.
    """

    members: tuple[Identity, ...]
    shards: tuple[int, ...]
    num_shards: int
    in_a_row: int


@dataclass(frozen=True)
class Retry:
    """Nothing was committed. The same step again, on the same view, if a budget allows it.

    Attributes:
      failed: whose own code raised.
      spent: those of them that it was the last time for.
      nonfinite: the reason if nobody's code raised.
    """

    failed: tuple[Identity, ...] = ()
    spent: tuple[Identity, ...] = ()
    nonfinite: NonFinite | None = None


@dataclass(frozen=True)
class Commit:
    """The step counts. `view` is the next view; it is the old one, epoch included, unless it changed.

    Attributes:
      save: somebody asked for the state after it to be saved.
      skipped: why the step changes nothing but the position in the data; None for a step that trains.
    """

    view: View
    stop: bool = False
    save: bool = False
    leaving: tuple[Identity, ...] = ()
    joining: tuple[Identity, ...] = field(default=())
    skipped: NonFinite | None = None


Agreed = Shrink | Differ | Retry | Commit
Verdict = Fenced | Agreed


def judge(
    view: View,
    me: int,
    before: Mapping[int, int],
    after: Mapping[int, int],
    votes: Sequence[Vote] | None,
    max_skips: int = 0,
) -> Verdict:
    """What a block meant.

    Args:
      view: the members when the block was entered.
      me: my node id.
      before: JAX incarnation by node id, as the barrier said at entry.
      after: the same at exit.
      votes: one per member, in the view's order; None if my exchange failed.
      max_skips: how many steps in a row may be skipped because they are not finite.
    """
    same = {node for node in view.nodes if node in before and after.get(node) == before[node]}
    if me not in same:
        return Fenced()
    gone = tuple(member for member in view.members if member.node not in same)
    if gone:
        return Shrink(view.without(member.node for member in gone), gone)
    if votes is None:
        return Fenced()
    if len(votes) != len(view.members):
        raise ValueError(f"expected one vote per member, {len(view.members)}; got {len(votes)}")
    # First of all: whatever else is wrong may come of it.
    if groups := _different(view, votes):
        return Differ(groups)
    failed = [(m, vote.spent) for m, vote in zip(view.members, votes, strict=True) if not vote.ok]
    if failed:
        return Retry(tuple(m for m, _ in failed), tuple(m for m, spent in failed if spent))
    nonfinite = _not_finite(view, votes)
    if nonfinite is not None and nonfinite.in_a_row > max_skips:
        return Retry(nonfinite=nonfinite)
    return replace(requests(view, votes), skipped=nonfinite)


def _different(view: View, votes: Sequence[Vote]) -> tuple[tuple[Identity, ...], ...]:
    """Members by the fingerprint they show, largest group first; empty if all that show one show the same."""
    groups: dict[tuple[int, int], list[Identity]] = {}
    for member, vote in zip(view.members, votes, strict=True):
        if vote.checked:
            groups.setdefault(vote.fingerprint, []).append(member)
    if len(groups) < 2:
        return ()
    return tuple(map(tuple, sorted(groups.values(), key=len, reverse=True)))


def _not_finite(view: View, votes: Sequence[Vote]) -> NonFinite | None:
    bad = [(member, vote) for member, vote in zip(view.members, votes, strict=True) if vote.num_bad]
    if not bad and all(vote.finite for vote in votes):
        return None
    # A member that came in between does not know how often it was so before.
    in_a_row = min(max(vote.nonfinite for vote in votes) + 1, MAX_COUNT)
    return NonFinite(
        members=tuple(member for member, _ in bad),
        shards=tuple(vote.first_bad for _, vote in bad),
        num_shards=sum(vote.num_bad for _, vote in bad),
        in_a_row=in_a_row,
    )


def requests(view: View, votes: Sequence[Vote]) -> Commit:
    """What the votes of a committed block ask for. The first member speaks for the joiners."""
    leaving = tuple(m for m, vote in zip(view.members, votes, strict=True) if vote.leave)
    if len(leaving) == len(view.members):
        # Workers of slots that are to stay may be on their way; those who are drained keep the state for them.
        leaving = tuple(m for m, vote in zip(view.members, votes, strict=True) if vote.leave and not vote.drained)
    stop = any(vote.stop for vote in votes) or len(leaving) == len(view.members)
    save = any(vote.save for vote in votes)
    if stop:
        return Commit(view, stop=True, save=save)
    after = view.next((m.node for m in leaving), votes[0].joiners)
    joining = tuple(member for member in after.members if member not in view.members)
    if not leaving and not joining:
        return Commit(view, save=save)
    return Commit(after, save=save, leaving=leaving, joining=joining)
