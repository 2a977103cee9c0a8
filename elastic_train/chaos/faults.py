"""One fault: what is done to one worker, when, and at which place of a step. Pure.

| kind | what is done | parameters |
|---|---|---|
| kill | SIGKILL | |
| stop | SIGSTOP; SIGCONT after `duration_s` | duration_s |
| leave | SIGTERM: the worker leaves after a commit | |
| raise | an exception of the user's code | repeat |
| deadlock | a lock that is never released is waited for | |
| endless | a program that does not end, on the device | |
| slow | the worker computes its shards `factor` times slower, for `num_steps` steps | factor, num_steps |
| nonfinite | a NaN in the gradient of one shard | |
| flip | one bit of one parameter of one member | |
| corrupt | one bit of what a joiner received | |

| where | |
|---|---|
| anywhere | from outside, by a signal, at any moment of a step |
| data | before a shard is read |
| compute | before a shard's gradient is computed |
| exchange | in place of the exchange |
| barrier | between exchange and commit |
| hook | after a commit, in `on_step` |
| gather | before the first collective of an epoch: its communicator is being formed |
| heal | before the transfer of the state to a joiner |
| start | before a new worker has built its model |
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from elastic_train.errors import UsageError

PLACES: Mapping[str, tuple[str, ...]] = {
    "kill": ("anywhere", "data", "compute", "exchange", "barrier", "hook", "gather", "heal", "start"),
    "stop": ("anywhere", "data", "compute", "exchange", "barrier", "hook", "gather", "heal", "start"),
    "leave": ("anywhere",),
    "raise": ("data", "compute", "hook", "exchange", "start"),
    "deadlock": ("data", "compute", "hook"),
    "endless": ("compute",),
    "slow": ("compute",),
    "nonfinite": ("compute",),
    "flip": ("compute",),
    "corrupt": ("heal",),
}
"""Where a fault of each kind may strike; the first is the default."""

ROLES = ("first", "last", "random", "joiner", "donor")
"""Names in place of a slot: the oldest or newest member, one drawn from the seed, one that has (no) state yet."""

REPEATS = ("once", "incarnation", "slot")
"""How often an exception is raised: once, every time until the worker is gone, also in every worker that follows."""

LETHAL = frozenset({"kill", "deadlock", "endless", "leave"})
"""Kinds after which the worker is gone. A long stop and a repeated exception are lethal, too; see `Fault.is_lethal`."""

SHORT_STOP_S = 2.0
"""A stop up to this long is not expected to cost the worker its place."""

# Where a worker is that does not know yet how many steps the others have completed.
_NEW = frozenset({"start", "joiner"})

# Where a worker comes only when the members change.
_AT_A_CHANGE = frozenset({"gather", "heal", "start"})


class ScheduleError(UsageError):
    """A schedule of faults is wrong.

    Attributes:
      texts: each mistake in a line of its own, with the key, the value and the fix.
    """

    def __init__(self, *texts: str) -> None:
        super().__init__("\n".join(texts))
        self.texts = texts


class Mistakes:
    """Gathers what is wrong, so that one error tells all of it. Whoever notes something says nothing of what only
    follows from another mistake."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def require(self, condition: bool, key: str, value: object, fix: str) -> bool:
        """Notes a mistake in `key` unless `condition` holds. Returns whether it does."""
        if not condition:
            self.note(f"{key} = {value!r}: {fix}")
        return condition

    def unknown(self, key: str, known: Sequence[str], place: str) -> None:
        """Notes a key or name that nothing knows."""
        near = difflib.get_close_matches(key, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        self.note(f"{place}: unknown {key!r}.{hint} Known are: {', '.join(known)}")

    def note(self, text: str) -> None:
        """Notes a mistake; the same one only once."""
        self._texts[text] = None

    @contextlib.contextmanager
    def noting(self, prefix: str = "") -> Iterator[None]:
        """Around what raises ScheduleError; each of its texts gets the prefix."""
        try:
            yield
        except ScheduleError as error:
            for text in error.texts:
                self.note(prefix + text)

    def __bool__(self) -> bool:
        return bool(self._texts)

    def tell(self) -> None:
        """Raises ScheduleError if there are any."""
        if self._texts:
            raise ScheduleError(*self._texts)


def is_number(value: object) -> bool:
    """Whether it is a finite number; TOML has inf and nan, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_count(value: object) -> bool:
    """Whether it is a whole number, 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What strikes one worker, once (unless `repeat` says otherwise).

    Attributes:
      kind, where: see the tables above; `where` defaults to the first place of the kind.
      step: completed steps from which on it is due; it strikes the first time its worker is at `where` then.
      after_s: in place of `step`: seconds since the first committed step.
      slot: whom: a number, or one of `ROLES`.
      duration_s: of a stop.
      factor, num_steps: of a slow worker.
      repeat: of an exception; one of `REPEATS`.

    Raises ScheduleError.
    """

    kind: str
    where: str = ""
    step: int | None = None
    after_s: float | None = None
    slot: int | str = "random"
    duration_s: float | None = None
    factor: float | None = None
    num_steps: int | None = None
    repeat: str = "once"

    def __post_init__(self) -> None:
        mistakes = Mistakes()
        has_place = self._check_kind(mistakes)
        timed = (self.step is None) != (self.after_s is None)
        mistakes.require(timed, "step", self.step, "give either step or after_s, and not both")
        if self.step is not None:
            mistakes.require(is_count(self.step), "step", self.step, "use a number of completed steps, 0 or more")
        if self.after_s is not None:
            ok = is_number(self.after_s) and self.after_s >= 0
            mistakes.require(ok, "after_s", self.after_s, "use seconds since the first step, 0 or more")
        if self._check_slot(mistakes) and has_place:
            self._check_who_is_there(mistakes)
        self._check_parameters(mistakes)
        mistakes.tell()

    def _check_kind(self, mistakes: Mistakes) -> bool:
        """Returns whether kind and place fit together."""
        if not self.kind:
            mistakes.note(f"kind is missing; use one of {', '.join(PLACES)}")
            return False
        if self.kind not in tuple(PLACES):  # whatever it is, a list perhaps
            mistakes.unknown(str(self.kind), tuple(PLACES), "kind")
            return False
        places = PLACES[self.kind]
        if not self.where:
            object.__setattr__(self, "where", places[0])
        fix = f"a {self.kind} can be at {', '.join(places)}"
        return mistakes.require(self.where in places, "where", self.where, fix)

    def _check_slot(self, mistakes: Mistakes) -> bool:
        """Returns whether it can be a slot."""
        if not isinstance(self.slot, str):
            fix = f"use a slot's number or one of {', '.join(ROLES)}"
            return mistakes.require(is_count(self.slot), "slot", self.slot, fix)
        if self.slot not in ROLES:
            mistakes.unknown(self.slot, ROLES, "slot, where it is no number")
        return self.slot in ROLES

    def _check_who_is_there(self, mistakes: Mistakes) -> None:
        require = mistakes.require
        if self.slot == "joiner":
            fits = self.where in ("gather", "heal")
            require(fits, "slot", self.slot, 'a joiner is one at where = "gather" or "heal" only')
        if self.slot == "donor":
            require(self.where == "heal", "slot", self.slot, 'a donor is one at where = "heal" only')
        if self.kind == "corrupt":
            require(self.slot == "joiner", "slot", self.slot, 'what is received is corrupted: use slot = "joiner"')
        if self.where == "start":
            is_slot = isinstance(self.slot, int) or self.slot == "random"
            require(is_slot, "slot", self.slot, "a worker that starts is no member: name its slot, or random")

    def _check_parameters(self, mistakes: Mistakes) -> None:
        require = mistakes.require
        has_kind = self.kind in tuple(PLACES)
        for name, kind, default in (("duration_s", "stop", 1.0), ("factor", "slow", 10.0), ("num_steps", "slow", 50)):
            value = getattr(self, name)
            if self.kind == kind and value is None:
                object.__setattr__(self, name, default)
            elif value is not None and has_kind and self.kind != kind:
                require(False, name, value, f"only a fault of kind {kind} has it")
            elif value is not None and require(is_number(value) and value > 0, name, value, "use a positive number"):
                require(name != "num_steps" or isinstance(value, int), name, value, "use a whole number")
        if require(self.repeat in REPEATS, "repeat", self.repeat, f"use one of {', '.join(REPEATS)}"):
            fits = self.repeat == "once" or self.kind == "raise" or not has_kind
            require(fits, "repeat", self.repeat, "only a fault of kind raise is repeated")

    @property
    def is_lethal(self) -> bool:
        """Whether the worker is expected to be gone after it."""
        is_long = self.kind == "stop" and (self.duration_s or 0.0) > SHORT_STOP_S
        return self.kind in LETHAL or is_long or self.repeat != "once" or self.where == "start"

    @property
    def is_outside(self) -> bool:
        """Whether it is a signal from outside, not something that the worker does to itself."""
        return self.where == "anywhere"

    @property
    def strikes_new(self) -> bool:
        """Whether it strikes a worker that has no state yet, and so knows of no step."""
        return bool({self.where, self.slot} & _NEW)

    @property
    def awaits_change(self) -> bool:
        """Whether it finds an occasion only when the members change."""
        return self.where in _AT_A_CHANGE

    def as_table(self) -> dict[str, Any]:
        """Key and value of all that is not at its default: what reads back as this fault."""
        defaults = {field.name: field.default for field in fields(self)}
        kept = {key: value for key, value in asdict(self).items() if value is not None and value != defaults[key]}
        return {"kind": self.kind, **kept, "slot": self.slot}


def read_fault(table: Mapping[str, Any], place: str) -> Fault:
    """The fault of one `[[fault]]` table. Raises ScheduleError, which names `place`."""
    mistakes = Mistakes()
    given = known_keys(table, Fault, place, mistakes)
    with mistakes.noting(f"{place}: "):
        fault = Fault(**{"kind": "", **given})
    mistakes.tell()
    return fault


def known_keys(table: Mapping[str, Any], kind: type, place: str, mistakes: Mistakes) -> dict[str, Any]:
    """What a table says of the fields of the dataclass `kind`; other keys are mistakes."""
    known = tuple(field.name for field in fields(kind))
    for key in table:
        if key not in known:
            mistakes.unknown(key, known, place)
    return {key: value for key, value in table.items() if key in known}


def to_toml(fault: Fault) -> str:
    """One `[[fault]]` table, with a newline at its end."""
    lines = ["[[fault]]"]
    for key, value in fault.as_table().items():
        lines.append(f'{key} = "{value}"' if isinstance(value, str) else f"{key} = {value}")
    return "\n".join(lines) + "\n"
