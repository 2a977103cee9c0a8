"""The schedule of a run's faults: read from TOML, checked, and drawn from its seed. Pure.

```toml
seed = 7
patient = false            # true: the faults below wait until every slot has a member again
stop_after_steps = 10      # the job stops so many steps after all faults were survived; by default it does not

[[fault]]                  # strikes exactly there, whatever else is going on
kind = "kill"
step = 20
slot = 1
where = "exchange"

[random]                   # and these are drawn from the seed
every_s = 15.0             # or every_steps
jitter = 0.5               # the interval is 15 s, plus or minus up to half of it
until_s = 1800.0           # or until_step: nothing new after this
quiet_s = 15.0             # or quiet_steps: nothing before this
max_down = 2               # never more slots without a member at once
kinds = { kill = 4, raise = 1, deadlock = 1 }
```

The names under `kinds` are those of `SCENARIOS`; the numbers are their weights.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_train.chaos.faults import (
    Fault,
    Mistakes,
    ScheduleError,
    is_count,
    is_number,
    known_keys,
    read_fault,
    to_toml,
)

When = Mapping[str, Any]
"""`step` or `after_s`."""

Draw = Callable[[random.Random, Sequence[int], When], tuple[Fault, ...]]
"""(source of chance, all slots in random order, when) -> the faults of one scenario."""

SURVIVED = "all faults have struck, and every slot has a member again"
"""Why a job with `stop_after_steps` is stopped."""

_KEYS = ("seed", "patient", "stop_after_steps", "fault", "random")

MAX_DRAWN = 100_000
"""So many scenarios are enough for a week of one every six seconds."""

LONG_STOP_S = 60.0
"""Longer than any deadline that finds a silent worker in a job under test; it is killed before."""


def _kill(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
    places = ("anywhere", "data", "compute", "exchange", "barrier", "hook")
    return (Fault(kind="kill", slot=slots[0], where=chance.choice(places), **when),)


def _kill_slot_0(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
    return (Fault(kind="kill", slot=0, where=chance.choice(("compute", "exchange", "barrier")), **when),)


def _kill_two(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
    where = chance.choice(("compute", "exchange"))
    return tuple(Fault(kind="kill", slot=slot, where=where, **when) for slot in slots[:2])


def _kill_all_but_one(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
    return tuple(Fault(kind="kill", slot=slot, where="exchange", **when) for slot in slots[:-1])


def _kill_rebuilding(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
    first = Fault(kind="kill", slot=slots[0], where="compute", **when)
    return first, Fault(kind="kill", slot=slots[1], where="gather", **when)


def _kill_joiner(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
    where = chance.choice(("gather", "heal"))
    return _killed(slots, when), Fault(kind="kill", slot="joiner", where=where, **when)


def _kill_donor(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
    return _killed(slots, when), Fault(kind="kill", slot="donor", where="heal", **when)


def _kill_starting(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
    return _killed(slots, when), Fault(kind="kill", slot=slots[0], where="start", **when)


def _corrupt(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
    return _killed(slots, when), Fault(kind="corrupt", slot="joiner", **when)


def _killed(slots: Sequence[int], when: When) -> Fault:
    return Fault(kind="kill", slot=slots[0], where="anywhere", **when)


def _single(kind: str, *places: str, **parameters: Any) -> Draw:
    def draw(chance: random.Random, slots: Sequence[int], when: When) -> tuple[Fault, ...]:
        where = chance.choice(places) if places else ""
        return (Fault(kind=kind, slot=slots[0], where=where, **parameters, **when),)

    return draw


SCENARIOS: Mapping[str, tuple[Draw, int]] = {
    "kill": (_kill, 2),
    "kill_slot_0": (_kill_slot_0, 2),
    "kill_two": (_kill_two, 3),
    "kill_all_but_one": (_kill_all_but_one, 3),
    "kill_rebuilding": (_kill_rebuilding, 3),
    "kill_joiner": (_kill_joiner, 2),
    "kill_donor": (_kill_donor, 3),
    "kill_starting": (_kill_starting, 2),
    "stop_long": (_single("stop", "anywhere", "exchange", "barrier", duration_s=LONG_STOP_S), 2),
    "stop_short": (_single("stop", "anywhere", "exchange", "barrier", duration_s=0.5), 1),
    "raise": (_single("raise", "data", "compute", "hook"), 1),
    "raise_always": (_single("raise", "data", "compute", repeat="incarnation"), 2),
    "leave": (_single("leave"), 2),
    "deadlock": (_single("deadlock", "data"), 2),
    "endless": (_single("endless"), 2),
    "slow": (_single("slow"), 1),
    "nonfinite": (_single("nonfinite"), 1),
    "flip": (_single("flip"), 3),
    "corrupt": (_corrupt, 2),
}
"""What may be drawn at random: the faults of a scenario, and how many workers a job needs so that one survives it."""


@dataclass(frozen=True, kw_only=True)
class RandomFaults:
    """Faults that are drawn from the seed, one scenario after the other.

    Attributes:
      kinds: scenarios and their weights.
      every_steps, every_s: the mean interval, in steps or seconds since the first step; one of the two.
      jitter: the interval varies by up to this share of it.
      until_step, until_s: no scenario begins later. Steps default to an interval before the end of the run.
      quiet_steps, quiet_s: none begins earlier; by default an interval.
      max_down: how many slots may be without a member at once; a scenario waits until it may begin.

    Raises ScheduleError.
    """

    kinds: Mapping[str, float]
    every_steps: int | None = None
    every_s: float | None = None
    jitter: float = 0.5
    until_step: int | None = None
    until_s: float | None = None
    quiet_steps: int | None = None
    quiet_s: float | None = None
    max_down: int = 1

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        require = mistakes.require
        if self.kinds == {}:
            mistakes.note(f"kinds is missing; name some of {', '.join(SCENARIOS)}")
        elif require(isinstance(self.kinds, Mapping), "kinds", self.kinds, "use { kill = 1 }"):
            for name, weight in self.kinds.items():
                if name not in SCENARIOS:
                    mistakes.unknown(name, tuple(SCENARIOS), "kinds")
                require(is_number(weight) and weight > 0, f"kinds.{name}", weight, "use a positive weight")
        self._check_times(mistakes)
        require(is_number(self.jitter) and 0 <= self.jitter < 1, "jitter", self.jitter, "use a share from 0 to below 1")
        ok = isinstance(self.max_down, int) and not isinstance(self.max_down, bool) and self.max_down >= 1
        require(ok, "max_down", self.max_down, "use a number of slots, at least 1")
        mistakes.tell()

    def _check_times(self, mistakes: Mistakes) -> None:
        require = mistakes.require
        timed = (self.every_steps is None) != (self.every_s is None)
        require(timed, "every_steps", self.every_steps, "give either every_steps or every_s, and not both")
        wrong = ("until_s", "quiet_s") if self.every_steps is not None else ("until_step", "quiet_steps")
        for name in ("every_steps", "every_s", "until_step", "until_s", "quiet_steps", "quiet_s"):
            value = getattr(self, name)
            if value is None:
                continue
            unit = "steps" if self.every_steps is not None else "seconds"
            if timed and name in wrong:
                require(False, name, value, f"the interval is given in {unit}, so give this in {unit}, too")
            positive = is_number(value) and (value > 0 or (value == 0 and name.startswith("quiet")))
            if require(positive, name, value, "use a positive number"):
                require(name.endswith("_s") or is_count(value), name, value, "use a whole number of steps")
        if timed and self.every_s is not None:
            require(self.until_s is not None, "until_s", None, "say for how many seconds faults go on")


@dataclass(frozen=True)
class Planned:
    """Faults that belong together.

    Attributes:
      faults: due at the same moment.
      name: the scenario, or "" where somebody has written down exactly these.
      waits: they strike only once those before have struck and enough slots have a member.
    """

    faults: tuple[Fault, ...]
    name: str = ""
    waits: bool = False

    @property
    def step(self) -> int | None:
        return self.faults[0].step

    @property
    def after_s(self) -> float | None:
        return self.faults[0].after_s


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What a chaos file says.

    Attributes:
      seed: start of all that is random.
      faults: those that were written down.
      patient: these wait, in their order, until every slot has a member again.
      random: those to be drawn.
      stop_after_steps: how many steps after all of them have struck, and every slot has a member again, the job stops;
        None if it does not.
    """

    seed: int = 0
    faults: tuple[Fault, ...] = ()
    patient: bool = False
    random: RandomFaults | None = None
    stop_after_steps: int | None = None

    @property
    def max_down(self) -> int:
        """How many slots the faults that wait may leave without a member at once; see `turns.may_begin`."""
        return 0 if self.random is None else self.random.max_down


def read_schedule(path: Path) -> Schedule:
    """Reads a chaos file. Raises ScheduleError: what is wrong, where, and the fix."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScheduleError(f"--chaos {path}: cannot be read ({reason}); give a TOML file") from error
    try:
        return parse_schedule(text)
    except ScheduleError as error:
        (first, *others) = error.texts
        told = "".join(f"\n  {text}" for text in error.texts) if others else f" {first}"
        raise ScheduleError(f"--chaos {path}:{told}") from None


def parse_schedule(text: str) -> Schedule:
    """The schedule in a TOML text. Raises ScheduleError, which tells all that is wrong with it."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScheduleError(f"not valid TOML: {error}") from error
    except RecursionError:
        raise ScheduleError("arrays or tables are nested too deeply; a chaos file needs two levels at most") from None
    mistakes = Mistakes()
    for key in table:
        if key not in _KEYS:
            mistakes.unknown(key, _KEYS, "the file")
    seed = table.get("seed", 0)
    mistakes.require(is_count(seed), "seed", seed, "use a whole number")
    patient = table.get("patient", False)
    if mistakes.require(isinstance(patient, bool), "patient", patient, "use true or false"):
        fix = "leave it out: it is for faults that are written down, and those of [random] wait anyhow"
        mistakes.require(not (patient and "random" in table), "patient", patient, fix)
    stop_after = table.get("stop_after_steps")
    ok = stop_after is None or is_count(stop_after)
    mistakes.require(ok, "stop_after_steps", stop_after, "use a number of steps, 0 or more")
    faults = _read_faults(table.get("fault", []), mistakes)
    drawn = _read_random(table["random"], mistakes) if "random" in table else None
    if not mistakes and not faults and drawn is None:
        mistakes.note("there is no fault in it; write [[fault]] tables, or [random]")
    mistakes.tell()
    return Schedule(seed=seed, faults=faults, patient=patient, random=drawn, stop_after_steps=stop_after)


def _read_faults(tables: Any, mistakes: Mistakes) -> tuple[Fault, ...]:
    is_list = isinstance(tables, list) and all(isinstance(each, dict) for each in tables)
    fix = "write each fault as a table of its own, under [[fault]]"
    if not mistakes.require(is_list, "fault", tables, fix):
        return ()
    faults = []
    for number, each in enumerate(tables, start=1):
        with mistakes.noting():
            faults.append(read_fault(each, f"fault {number}"))
    return tuple(faults)


def _read_random(table: Any, mistakes: Mistakes) -> RandomFaults | None:
    if not mistakes.require(isinstance(table, dict), "random", table, "write it as a table, [random]"):
        return None
    given = known_keys(table, RandomFaults, "random", mistakes)
    with mistakes.noting("random: "):
        return RandomFaults(**{"kinds": {}, **given})
    return None


def resolve(schedule: Schedule, workers: int, steps: int) -> tuple[Planned, ...]:
    """All faults of a job, the same for the same arguments: first those written down, then those drawn, by time.

    Args:
      schedule: what the file says.
      workers: slots of the job.
      steps: its last step.

    Raises:
      ScheduleError: it does not fit a job of that size. All that does not is told.
    """
    mistakes = Mistakes()
    chance = random.Random(f"{schedule.seed} written")
    planned = []
    for number, fault in enumerate(schedule.faults, start=1):
        if isinstance(fault.slot, int):
            fix = f"the job has slots 0 to {workers - 1}; change it, or --workers"
            mistakes.require(fault.slot < workers, f"fault {number}: slot", fault.slot, fix)
        if fault.step is not None:
            fix = f"the job ends after step {steps}"
            mistakes.require(fault.step <= steps, f"fault {number}: step", fault.step, fix)
        if fault.slot == "random":
            fault = replace(fault, slot=chance.randrange(workers))
        planned.append(Planned((fault,), waits=schedule.patient))
    if schedule.random is not None:
        with mistakes.noting("random: "):
            planned += _drawn(schedule.random, schedule.seed, workers, steps)
    mistakes.tell()
    return tuple(planned)


def _drawn(drawn: RandomFaults, seed: int, workers: int, steps: int) -> Iterable[Planned]:
    mistakes = Mistakes()
    fix = f"a job of {workers} workers survives at most {workers - 1}; use that, or more --workers"
    mistakes.require(drawn.max_down < workers, "max_down", drawn.max_down, fix)
    names = sorted(drawn.kinds)
    for name in names:
        needed = SCENARIOS[name][1]
        mistakes.require(workers >= needed, "kinds", name, f"needs at least {needed} workers; the job has {workers}")
    chance = random.Random(f"{seed} drawn")
    in_steps = drawn.every_steps is not None
    every = float(drawn.every_steps if drawn.every_steps is not None else drawn.every_s or 0.0)
    quiet = drawn.quiet_steps if in_steps else drawn.quiet_s
    until = drawn.until_step if in_steps else drawn.until_s
    until = steps - every if until is None else until
    moment = every if quiet is None else float(quiet)
    fix = f"more than {MAX_DRAWN} faults would be drawn; use a longer interval, or an earlier end"
    is_bounded = (min(until, steps) if in_steps else until) - moment <= MAX_DRAWN * every
    mistakes.require(is_bounded, "every_steps" if in_steps else "every_s", every, fix)
    mistakes.tell()
    planned = []
    while moment <= until and not (in_steps and round(moment) >= steps):
        when: When = {"step": round(moment)} if in_steps else {"after_s": round(moment, 3)}
        name = chance.choices(names, [drawn.kinds[name] for name in names])[0]
        slots = chance.sample(range(workers), workers)
        faults = SCENARIOS[name][0](chance, slots, when)
        with mistakes.noting():
            require_fits(name, faults, drawn.max_down)
        planned.append(Planned(faults, name, waits=True))
        moment += every * (1 + drawn.jitter * (2 * chance.random() - 1))
    if not planned:
        mistakes.note("no fault fits between the quiet beginning and the end; use a shorter interval")
    mistakes.tell()
    return planned


def require_fits(name: str, faults: Sequence[Fault], max_down: int) -> None:
    """Raises ScheduleError if a scenario takes more members away at once than `max_down`."""
    taken = num_taken(faults)
    fix = f"too low for {name}, which takes {taken} members away at once; raise it, or leave that kind out"
    if taken > max_down:
        raise ScheduleError(f"max_down = {max_down!r}: {fix}")


def num_taken(faults: Iterable[Fault]) -> int:
    """How many members the faults take away at most at the same time; who has no state yet is none."""
    return sum(fault.is_lethal and not fault.strikes_new for fault in faults)


def aim(planned: Planned, members: Sequence[int]) -> Planned | None:
    """The same faults at slots that have a member now: a slot without one gives its turn to the next that has.

    Args:
      planned: drawn faults.
      members: slots, ascending.

    Returns:
      None if there are fewer members than slots to strike.
    """
    aimed: dict[int, int] = {}
    for slot in dict.fromkeys(fault.slot for fault in planned.faults if isinstance(fault.slot, int)):
        left = [member for member in members if member not in aimed.values()]
        if not left:
            return None
        aimed[slot] = next((member for member in left if member >= slot), left[0])
    faults = (replace(f, slot=aimed[f.slot]) if isinstance(f.slot, int) else f for f in planned.faults)
    return replace(planned, faults=tuple(faults))


def schedule_toml(planned: Iterable[Planned]) -> str:
    """The faults as a chaos file of their own, which gives the same faults again."""
    return "\n".join(to_toml(fault) for each in planned for fault in each.faults)
