"""The roster's state, and the draft of the next one while an event is handled. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastic_train.config import FaultConfig
from elastic_train.membership.group import Identity, View
from elastic_train.membership.roster_events import Action, Announce, End, Note
from elastic_train.membership.table import Table


class WorkerState(StrEnum):
    """Where a worker is on its way. `warming` begins with its hello, `ready` when it could join at once."""

    STARTING = "starting"
    WARMING = "warming"
    READY = "ready"
    MEMBER = "member"
    DEAD = "dead"


class Floor(StrEnum):
    """Whether there are `min_workers` members. The floor timer runs in `starting` and in `below`."""

    UNWATCHED = "unwatched"  # no agent has come yet
    STARTING = "starting"  # no group was formed yet
    REACHED = "reached"
    BELOW = "below"


@dataclass(frozen=True)
class Worker:
    """The newest start of one slot's worker."""

    identity: Identity
    agent: str
    state: WorkerState
    pid: int = 0
    host: str = ""
    step: int = 0
    first_step: int | None = None  # the first new step it took part in; not one that is taken again
    left: bool = False  # the members have gone on without it, or it was refused; its exit is awaited
    schema: Mapping[str, str] = field(default_factory=dict)  # what it runs, known when it is ready
    finished: str = ""  # the status it reported, empty while it trains

    @property
    def living(self) -> bool:
        return self.state is not WorkerState.DEAD

    @property
    def member(self) -> bool:
        return self.state is WorkerState.MEMBER and not self.left

    @property
    def ready(self) -> bool:
        return self.state is WorkerState.READY and not self.left


@dataclass(frozen=True)
class Slot:
    """What is remembered of a slot from one start of its worker to the next."""

    starts: int = 0
    failures: int = 0  # in a row; see FaultConfig.forgive_after_steps
    given_up: bool = False
    drained: bool = False  # it was asked to leave for good
    startup_failed: bool = False  # user code raised before the worker was ready, at least once
    exit_code: int | None = None  # of the last exit
    traceback: str = ""  # the first one
    shown: str = ""  # the error that was shown last
    failed_step: int | None = None  # the step whose failures a worker of this slot left for last
    refused: str = ""  # what was said when a worker of this slot was refused last

    @property
    def gone(self) -> bool:
        """It is not filled any more."""
        return self.given_up or self.drained


WORKERS: Mapping[str, Callable[[Worker], bool]] = {
    "living": lambda worker: worker.living,
    "member": lambda worker: worker.member,
    "training": lambda worker: worker.member and not worker.finished,
    "ready": lambda worker: worker.ready,
}
SLOTS: Mapping[str, Callable[[Slot], bool]] = {"gone": lambda slot: slot.gone}
"""What is asked of workers and slots with every event, and must not take a walk over all of them."""


@dataclass(frozen=True)
class Limits:
    """What the job was told: sizes, and the budgets and time limits of its config. `num_nodes` counts the coordinator's
    node 0; `max_slots` is 0 if there is no limit; `capacity` says how many slots this coordinator has room for."""

    num_slots: int
    min_workers: int = 1
    faults: FaultConfig = field(default_factory=FaultConfig)
    leave_timeout_s: float = 30.0
    num_nodes: int = 256
    max_slots: int = 0
    capacity: int = 1 << 16


@dataclass(frozen=True)
class Roster:
    """The state. `workers` holds the newest start of each slot that was ever started.

    Most events concern one worker, and there are as many of them as workers. So what is done with every event must not
    walk over all: it asks for numbers (`num_…`), which cost nothing, and not for tuples (`living`, `members`, `ready`,
    `coming`), which are made when they are asked for.
    """

    limits: Limits
    agents: dict[str, tuple[int, ...]] = field(default_factory=dict)  # whose slots these are
    standby: dict[str, tuple[int, ...]] = field(default_factory=dict)  # offered too: filled by others, or not needed
    spare: dict[str, int] = field(default_factory=dict)  # how many slots more an agent could fill
    carried: dict[int, int] = field(default_factory=dict)  # slots whose state an agent holds, and its step
    leaving: frozenset[str] = frozenset()  # agents that were asked to end; their workers are on their way out
    workers: Mapping[int, Worker] = field(default_factory=dict)
    slots: Mapping[int, Slot] = field(default_factory=dict)
    view: View = field(default_factory=lambda: View(0, ()))
    fallen: tuple[Identity, ...] = ()  # members of `view` that are dead
    next_node: int = 1
    ever_ready: bool = False  # some worker has been ready
    grace: bool = False  # the grace timer runs
    lost_step: int = 0  # how far groups came that died out; steps up to it are taken again
    floor: Floor = Floor.UNWATCHED
    first_failed: int | None = None  # the slot whose traceback came first
    stopping: bool = False  # members were asked to agree on a stop
    returning: bool = False  # members of the generation before are expected, with their states
    stop_wanted: str = ""  # why they will be asked as soon as there are some
    renewing: str = ""  # why the next generation begins soon
    finishing: str = ""  # the first status reported by a member that finished
    ended: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.workers, Table):
            object.__setattr__(self, "workers", Table(WORKERS, self.workers))
        if not isinstance(self.slots, Table):
            object.__setattr__(self, "slots", Table(SLOTS, self.slots))

    @property
    def living(self) -> tuple[Worker, ...]:
        """All workers that are not dead, in ascending order of slots."""
        return self._workers_of("living")

    @property
    def members(self) -> tuple[Worker, ...]:
        """All living members, joiners that were told their view included."""
        return self._workers_of("member")

    @property
    def ready(self) -> tuple[Worker, ...]:
        return self._workers_of("ready")

    @property
    def first_member(self) -> Worker | None:
        """The one of the lowest slot."""
        slots = self._slots_of("member")
        return self.workers[slots[0]] if slots else None

    @property
    def num_members(self) -> int:
        return len(self._slots_of("member"))

    @property
    def num_training(self) -> int:
        """Members that have not finished."""
        return len(self._slots_of("training"))

    @property
    def num_ready(self) -> int:
        return len(self._slots_of("ready"))

    @property
    def coming(self) -> tuple[int, ...]:
        """Slots that are filled or can still be: all that were neither given up nor drained."""
        return tuple(slot for slot in range(self.limits.num_slots) if self.is_coming(slot))

    @property
    def num_coming(self) -> int:
        assert isinstance(self.slots, Table)
        return self.limits.num_slots - bisect_left(self.slots.of("gone"), self.limits.num_slots)

    def is_coming(self, slot: int) -> bool:
        known = self.slots.get(slot)
        return 0 <= slot < self.limits.num_slots and (known is None or not known.gone)

    @property
    def missing(self) -> list[int]:
        """Slots without a member."""
        return sorted(set(range(self.limits.num_slots)) - set(self._slots_of("member")))

    def _workers_of(self, kind: str) -> tuple[Worker, ...]:
        return tuple(self.workers[slot] for slot in self._slots_of(kind))

    def _slots_of(self, kind: str) -> tuple[int, ...]:
        assert isinstance(self.workers, Table)
        return self.workers.of(kind)

    @property
    def closing(self) -> bool:
        """Nobody is started or admitted any more."""
        return self.stopping or bool(self.finishing) or self.ended

    def is_living(self, identity: Identity) -> bool:
        worker = self.workers.get(identity.slot)
        return worker is not None and worker.identity == identity and worker.living


class Turn:
    """One event being handled: the roster as it changes, and the actions so far. Nothing follows an `End`."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.actions: list[Action] = []

    def emit(self, action: Action) -> None:
        if not self.roster.ended:
            self.actions.append(action)

    def note(self, event: str, show: str = "", **fields: object) -> None:
        self.emit(Note(event, fields, show))

    def end(self, exit_code: int, status: str, message: str, traceback: str = "") -> None:
        self.emit(End(exit_code, status, message, traceback))
        self.set(ended=True)

    def set(self, **changes: object) -> None:
        self.roster = replace(self.roster, **changes)

    def set_worker(self, worker: Worker, **changes: object) -> None:
        workers = self.roster.workers
        assert isinstance(workers, Table)
        self.set(workers=workers.put(worker.identity.slot, replace(worker, **changes)))

    def set_slot(self, number: int, **changes: object) -> Slot:
        slots = self.roster.slots
        assert isinstance(slots, Table)
        slot = replace(slots.get(number, Slot()), **changes)
        self.set(slots=slots.put(number, slot))
        return slot

    def set_view(self, view: View) -> None:
        self.set(view=view, fallen=tuple(member for member in view.members if not self.roster.is_living(member)))

    def announce(self) -> None:
        """Tells the members the whole list of joiners; it is empty when nobody shall be admitted any more."""
        members = self.roster.members
        if members and not self.roster.ended:
            joiners = () if self.roster.closing else tuple(worker.identity for worker in self.roster.ready)
            self.emit(Announce(nodes_of(members), joiners))


def nodes_of(workers: Iterable[Worker]) -> tuple[int, ...]:
    return tuple(worker.identity.node for worker in workers)


def slots_of(workers: Iterable[Worker]) -> tuple[int, ...]:
    return tuple(worker.identity.slot for worker in workers)


def title(identity: Identity) -> str:
    """How a message names a worker."""
    return f"worker {identity.slot} (incarnation {identity.incarnation})"
