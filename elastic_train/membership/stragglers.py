"""Who is slower than the others at its own work, and for how long that has been so. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

MIN_EXCESS_S = 0.05
"""A member that costs less than this per step is no straggler: a short step's time is mostly chance."""


@dataclass(frozen=True)
class Work:
    """Local work of one member so far.

    Attributes:
      seconds: spent on reading data and computing, not on waiting for others.
      num_shards, num_steps: what was done in them.
    """

    seconds: float = 0.0
    num_shards: int = 0
    num_steps: int = 0

    def since(self, earlier: Work) -> Work:
        return Work(
            self.seconds - earlier.seconds, self.num_shards - earlier.num_shards, self.num_steps - earlier.num_steps
        )


@dataclass(frozen=True)
class Pace:
    """One member in one window, beside the others.

    Attributes:
      shard_s: seconds per shard; per shard, because members have different numbers of them.
      others_s: the median of the others'.
      excess_s: what it takes longer than they would, per step.
    """

    shard_s: float
    others_s: float
    excess_s: float

    @property
    def ratio(self) -> float:
        return self.shard_s / self.others_s if self.others_s > 0 else float("inf")

    def is_slow(self, factor: float) -> bool:
        return self.shard_s > factor * self.others_s and self.excess_s >= MIN_EXCESS_S


def paces(window: Mapping[int, Work]) -> dict[int, Pace]:
    """Each member's pace, by whatever names them. Empty if there is nobody to compare, or one has done nothing."""
    if len(window) < 2 or any(work.num_shards <= 0 or work.num_steps <= 0 for work in window.values()):
        return {}
    shard_s = {name: work.seconds / work.num_shards for name, work in window.items()}
    ordered = sorted(shard_s.values())
    found = {}
    for name, work in window.items():
        others_s = _median_without(ordered, shard_s[name])
        excess_s = (shard_s[name] - others_s) * work.num_shards / work.num_steps
        found[name] = Pace(shard_s[name], others_s, excess_s)
    return found


def _median_without(ordered: Sequence[float], value: float) -> float:
    """The median of values in ascending order, one `value` left out."""
    place = bisect_left(ordered, value)
    number = len(ordered) - 1
    # The places in the middle; behind the value that is left out all have moved by one.
    middle = ((number - 1) // 2, number // 2)
    low, high = (ordered[index + (index >= place)] for index in middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Streak:
    """How a member has done of late.

    Attributes:
      length: how many windows in a row say the contrary of `is_straggler`.
      is_straggler: what was reported last.
    """

    length: int = 0
    is_straggler: bool = False


def follow(
    streaks: Mapping[int, Streak], window: Mapping[int, Pace], factor: float, num_windows: int
) -> tuple[dict[int, Streak], tuple[int, ...]]:
    """The streaks after one more window, of those that are in it, and who has become or ceased to be a straggler.

    Either takes `num_windows` in a row, so that one hiccup is no news, and news are not repeated.
    """
    after, news = {}, []
    for name, pace in window.items():
        streak = streaks.get(name, Streak())
        if pace.is_slow(factor) == streak.is_straggler:
            after[name] = replace(streak, length=0)
        elif streak.length + 1 < num_windows:
            after[name] = replace(streak, length=streak.length + 1)
        else:
            after[name] = Streak(is_straggler=not streak.is_straggler)
            news.append(name)
    return after, tuple(news)
