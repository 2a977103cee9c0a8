"""What one `live_devices` block meant, and who is in the next one. Pure: no JAX, no sockets, no clock.

Every member runs this code on the same inputs (the barrier's answer and the all-gathered votes are equal on
all members that get them), so all members draw the same conclusion without talking further.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_JOINERS_PER_STEP = 8
"""How many joiners fit into one control vector; more are admitted by the next step."""

VOTE_SIZE = 8 + 3 * MAX_JOINERS_PER_STEP
"""Length of a control vector, in int32."""


class Identity(NamedTuple):
    """One start of a worker: the slot it fills, which start of that slot, and JAX's process id."""

    slot: int
    incarnation: int
    node: int


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

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(member.node for member in self.members)

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


@dataclass(frozen=True)
class Vote:
    """One member's control vector: what it says about a step, and what it asks for.

    `pack` gives int32[VOTE_SIZE]; `unpack` reads one row back.
    """

    step: int
    ok: bool = True
    finite: bool = True
    stop: bool = False
    leave: bool = False
    fingerprint: tuple[int, int] = (0, 0)
    joiners: tuple[Identity, ...] = ()

    def pack(self) -> list[int]:
        """The vector as signed 32-bit integers."""
        flags = self.ok | self.finite << 1 | self.stop << 2 | self.leave << 3
        joiners = self.joiners[:MAX_JOINERS_PER_STEP]
        head = [
            signed(self.step),
            signed(self.step >> 32),
            flags,
            *map(signed, self.fingerprint),
            len(joiners),
            0,
            0,
        ]
        body = [number for joiner in joiners for number in joiner]
        return head + body + [0] * (VOTE_SIZE - len(head) - len(body))

    @classmethod
    def unpack(cls, row: Sequence[int]) -> Vote:
        numbers = [int(number) for number in row]
        flags, count = numbers[2], numbers[5]
        body = numbers[8:]
        return cls(
            step=(numbers[1] << 32) | (numbers[0] & 0xFFFFFFFF),
            ok=bool(flags & 1),
            finite=bool(flags & 2),
            stop=bool(flags & 4),
            leave=bool(flags & 8),
            fingerprint=(numbers[3] & 0xFFFFFFFF, numbers[4] & 0xFFFFFFFF),
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
class Retry:
    """Nothing was committed: somebody's own code failed. The same step again, on the same view."""

    failed: tuple[Identity, ...]


@dataclass(frozen=True)
class Commit:
    """The step counts. `view` is the next view; it is the old one, epoch included, unless it changed."""

    view: View
    stop: bool = False
    leaving: tuple[Identity, ...] = ()
    joining: tuple[Identity, ...] = field(default=())


Verdict = Fenced | Shrink | Retry | Commit


def judge(
    view: View,
    me: int,
    before: Mapping[int, int],
    after: Mapping[int, int],
    votes: Sequence[Vote] | None,
) -> Verdict:
    """What a block meant.

    Args:
      view: the members when the block was entered.
      me: my node id.
      before: JAX incarnation by node id, as the barrier said at entry.
      after: the same at exit.
      votes: one per member, in the view's order; None if my exchange failed.
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
    failed = tuple(m for m, vote in zip(view.members, votes, strict=True) if not vote.ok)
    if failed:
        return Retry(failed)
    return requests(view, votes)


def requests(view: View, votes: Sequence[Vote]) -> Commit:
    """What the votes of a committed block ask for. The first member speaks for the joiners."""
    leaving = tuple(m for m, vote in zip(view.members, votes, strict=True) if vote.leave)
    stop = any(vote.stop for vote in votes) or len(leaving) == len(view.members)
    if stop:
        return Commit(view, stop=True)
    after = view.next((m.node for m in leaving), votes[0].joiners)
    joining = tuple(member for member in after.members if member not in view.members)
    if not leaving and not joining:
        return Commit(view)
    return Commit(after, leaving=leaving, joining=joining)
