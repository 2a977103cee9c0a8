"""The watchdog against simulated groups: it finds who is stuck, in time, and nobody else."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_train.membership.group import Identity
from elastic_train.membership.stragglers import Work, paces
from elastic_train.membership.watchdog import WAITING, Deadlines, Sign, Stuck, judge_members

property_test = settings(derandomize=True, deadline=None, max_examples=200)

TICK_S = 0.5
LIMIT_S = 10.0
HOOK_S = 20.0
DEADLINES = Deadlines(LIMIT_S, 10.0, 30.0, 25.0, HOOK_S, 50.0)
DEATH_S = 2.0
"""From a kill until the others know of the death."""

PHASES = ("data", "compute", "exchange", "barrier", "update", "hook")
LIMITS = {"data": LIMIT_S, "compute": LIMIT_S, "update": LIMIT_S, "hook": HOOK_S}


@dataclass
class Member:
    """One member; it works for random times, and waits for the others in between."""

    identity: Identity
    step: int = 10
    phase: str = "data"
    left_s: float = 0.0
    quiet_s: float = 0.0
    silent_s: float = 0.0
    is_stuck: bool = False
    is_silent: bool = False

    def enter(self, phase: str, left_s: float) -> None:
        self.phase, self.left_s, self.quiet_s = phase, left_s, 0.0

    def sign(self) -> Sign:
        return Sign(self.identity, self.step, self.phase, self.quiet_s, self.silent_s, False, False)


@dataclass
class Group:
    """Members that take steps together, watched."""

    members: list[Member]
    durations: list[float]
    now: float = 0.0
    changed_at: float = 0.0
    last_condemned: float = -math.inf

    def __post_init__(self) -> None:
        self.condemned: dict[Identity, float] = {}
        self.found: list[tuple[float, Stuck]] = []

    def duration(self, phase: str) -> float:
        """Between nothing and just below the phase's limit."""
        share = self.durations.pop(0)
        self.durations.append(share)
        return share * (LIMITS[phase] - 2 * TICK_S)

    def tick(self) -> None:
        self.now += TICK_S
        for member in self.members:
            self._move(member)
        for phase, following in (("exchange", "barrier"), ("barrier", "update")):
            # Whoever was condemned counts as there until the others know of its death.
            if all(member.phase == phase for member in self.members):
                for member in self.members:
                    member.enter(following, self.duration("update") if following == "update" else math.inf)
        self._judge()
        for identity, death in list(self.condemned.items()):
            if self.now >= death:
                del self.condemned[identity]
                self.members = [member for member in self.members if member.identity != identity]
                self.changed_at = self.now
                for member in self.members:
                    if member.phase in WAITING:  # the step again
                        member.enter("data", self.duration("data"))

    def _move(self, member: Member) -> None:
        member.quiet_s += TICK_S
        member.silent_s = member.silent_s + TICK_S if member.is_silent else 0.0
        if member.is_stuck or member.phase in WAITING:
            return
        member.left_s -= TICK_S
        if member.left_s > 0:
            return
        following = PHASES[(PHASES.index(member.phase) + 1) % len(PHASES)]
        member.step += following == "hook"
        member.enter(following, math.inf if following in WAITING else self.duration(following))

    def _judge(self) -> None:
        judgement = judge_members(
            [member.sign() for member in self.members if member.identity not in self.condemned],
            DEADLINES,
            step_time_s=0.0,
            unchanged_s=self.now - self.changed_at,
            since_last_s=self.now - self.last_condemned,
            is_pending=bool(self.condemned),
        )
        for stuck in judgement.stuck:
            assert stuck.identity not in self.condemned
            self.condemned[stuck.identity] = self.now + DEATH_S
            self.last_condemned = self.now
            self.found.append((self.now, stuck))


shares = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=20)


def group(num_members: int, durations: list[float]) -> Group:
    return Group([Member(Identity(slot, 0, slot + 1)) for slot in range(num_members)], list(durations))


@property_test
@given(num_members=st.integers(1, 5), durations=shares)
def test_whoever_stays_within_the_limits_is_left_alone(num_members: int, durations: list[float]) -> None:
    run = group(num_members, durations)
    for _ in range(400):
        run.tick()
    assert run.found == []


@property_test
@given(
    num_members=st.integers(2, 5),
    durations=shares,
    culprit=st.integers(0, 4),
    begins=st.integers(0, 100),
    is_silent=st.booleans(),
)
def test_one_that_is_stuck_is_found_in_time_and_nobody_else(
    num_members: int, durations: list[float], culprit: int, begins: int, is_silent: bool
) -> None:
    run = group(num_members, durations)
    guilty = run.members[culprit % num_members]
    since: float | None = None
    for number in range(begins + 400):
        # Stuck is who works; who waits would not be, but may fall silent.
        if number >= begins and since is None and (is_silent or guilty.phase not in WAITING):
            guilty.is_stuck, guilty.is_silent, since = True, is_silent, run.now
        run.tick()
    assert since is not None
    ((found_at, stuck),) = run.found
    assert stuck.identity == guilty.identity
    assert stuck.rule == "works" or is_silent
    assert found_at - since <= HOOK_S + 2 * TICK_S
    assert len(run.members) == num_members - 1
    assert min(member.step for member in run.members) > guilty.step


@property_test
@given(num_members=st.integers(1, 5), durations=shares)
def test_if_all_are_stuck_one_is_replaced_at_a_time(num_members: int, durations: list[float]) -> None:
    run = group(num_members, durations)
    for member in run.members:
        member.is_stuck = True
    for _ in range(400):
        run.tick()
    times = [time for time, _ in run.found]
    assert len(times) == num_members
    assert all(later - earlier > LIMIT_S for earlier, later in itertools.pairwise(times))


members_that_wait = st.lists(
    st.tuples(st.sampled_from(WAITING), st.integers(5, 6), st.floats(0.0, 60.0)), min_size=1, max_size=5
)


@property_test
@given(waiting=members_that_wait, unchanged_s=st.floats(0.0, 60.0))
def test_a_hanging_collective_is_said_after_one_limit_and_broken_after_two(
    waiting: list[tuple[str, int, float]], unchanged_s: float
) -> None:
    signs = [
        Sign(Identity(slot, 0, slot + 1), step, phase, quiet_s, 0.0, False, False)
        for slot, (phase, step, quiet_s) in enumerate(waiting)
    ]
    found = judge_members(
        signs, DEADLINES, step_time_s=0.0, unchanged_s=unchanged_s, since_last_s=math.inf, is_pending=False
    )
    waited_s = min(unchanged_s, *(sign.quiet_s for sign in signs))
    assert (found.chosen is not None) == (waited_s > LIMIT_S)
    assert len(found.stuck) == (waited_s > 2 * LIMIT_S)
    if found.chosen is not None:
        behind = [sign for sign in signs if sign.step == min(sign.step for sign in signs)]
        earliest = min(WAITING.index(sign.phase) for sign in behind)
        last = [sign.identity for sign in behind if WAITING.index(sign.phase) == earliest][-1]
        assert found.chosen.identity == last
    while_one_dies = judge_members(
        signs, DEADLINES, step_time_s=0.0, unchanged_s=unchanged_s, since_last_s=0.0, is_pending=True
    )
    assert while_one_dies.stuck == ()


@property_test
@given(
    shards=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    shard_s=st.floats(0.01, 10.0),
    slow=st.integers(0, 5),
    times=st.floats(4.0, 100.0),
)
def test_a_slow_member_is_found_however_the_shards_are_dealt_out(
    shards: list[int], shard_s: float, slow: int, times: float
) -> None:
    slow %= len(shards)
    window = {
        node: Work(10 * number * shard_s * (times if node == slow else 1.0), 10 * number, 10)
        for node, number in enumerate(shards)
    }
    found = {node for node, pace in paces(window).items() if pace.is_slow(3.0)}
    assert found == ({slow} if (times - 1.0) * shard_s * shards[slow] >= 0.05 else set())
