"""What a campaign does and when, drawn from a seed: plain values. Pure. `campaign` carries it out."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

MAX_WORKERS = 5

MOMENTS = {"at once": 10, "steps": 4, "calm": 3}
"""When an act comes: at the same instant as the one before, after some steps, when all workers take part that shall."""

CONSEQUENCES = {
    "died": ("kill", "linger", "trip", "leave", "stop_long", "resize", "drain", "agent"),
    "starting": ("kill", "linger", "trip", "leave", "stop_", "resize", "agent", "end"),
    "warming": ("kill", "linger", "trip", "leave", "stop_", "resize", "agent", "end"),
    "ready": ("kill", "linger", "trip", "leave", "stop_", "resize", "agent", "end"),
    "joining": ("kill", "linger", "trip", "leave", "stop_", "resize", "agent", "end"),
    "rejoined": ("kill", "linger", "trip", "leave", "stop_", "resize", "agent", "end"),
    "began": ("kill_coordinator", "stop_coordinator", "end"),
    "saving": ("save",),
}
"""Or in the middle of what comes of the one before, by how the names of such acts begin."""

ACTS = {
    "kill": 8,
    "kill_two": 3,
    "kill_all_but_one": 2,
    "kill_all": 1,
    "trip": 8,
    "linger": 6,
    "raise_always": 1,
    "stop_long": 3,
    "stop_short": 2,
    "leave": 5,
    "kill_coordinator": 7,
    "stop_coordinator": 1,
    "resize": 9,
    "drain": 4,
    "save": 4,
    "saves": 2,
    "status": 2,
    "end_and_resume": 9,
}
ACTS_OF_TWO_HOSTS = {"agent_kill": 5, "agent_leave": 5, "agent_double": 3}
TRIPS = (("data", "raise"), ("data", "deadlock"), ("exchange", "kill"), ("barrier", "kill"), ("gather", "kill"))
TRIPS += (("heal", "kill"), ("hook", "raise"), ("hook", "deadlock"), ("start", "kill"), ("exchange", "raise"))
LINGERS = ("start", "gather", "heal", "length")
ENDS = {"sigterm": 3, "sigint": 2, "stop": 2, "twice": 2, "kill": 6, "without_coordinator": 4, "without_worker": 2}


@dataclasses.dataclass(frozen=True)
class Act:
    """One disturbance, and its moment. `picks` say whom it concerns, `about` how."""

    moment: str
    kind: str
    about: tuple[Any, ...] = ()
    picks: tuple[float, ...] = ()

    def __str__(self) -> str:
        picks = ", ".join(f"{pick:.2f}" for pick in self.picks)
        return " ".join(map(str, (f"{self.moment}:", self.kind, *self.about, *([f"({picks})"] if picks else []))))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Attributes:
    workers: of the job at first.
    two_hosts: the higher slots belong to a second host.
    warm: processes held ready at first.
    min_workers: the floor.
    settings: of the whole run.
    """

    seed: int
    workers: int
    two_hosts: bool
    warm: int
    min_workers: int
    settings: tuple[str, ...]
    acts: tuple[Act, ...]

    def __str__(self) -> str:
        about = f"seed {self.seed}: {self.workers} workers, two hosts: {self.two_hosts}, warm spares: {self.warm}, "
        about += f"min_workers: {self.min_workers}, {' '.join(self.settings)}"
        return "\n".join([about, *(f"{number:3}. {act}" for number, act in enumerate(self.acts))])


def draw(seed: int, num_acts: int) -> Plan:
    """The plan of a seed. Pure."""
    dice = random.Random(seed)
    two_hosts = dice.random() < 0.4
    workers, warm = dice.choice((3, 3, 4)), dice.choice((0, 0, 1, 2))
    min_workers = 1 if two_hosts else dice.choice((1, 1, 2))
    # With few node ids, generations end on purpose.
    settings = (f"prefetch={dice.choice((0, 2))}", f"faults.node_ids={dice.choice((0, 0, 6, 10))}")
    weights = ACTS | (ACTS_OF_TWO_HOSTS if two_hosts else {})
    acts: list[Act] = []
    for number in range(num_acts):
        kind = _weighted(dice, weights)
        if not number:
            moment = dice.choice(("starting", "ready", "calm", "calm"))
        else:
            before = acts[-1].kind
            moments = MOMENTS | {m: 3 for m, kinds in CONSEQUENCES.items() if before.startswith(kinds)}
            moment = _weighted(dice, moments)
        if kind == "raise_always" or (acts and acts[-1].kind == "raise_always"):
            moment = "calm"  # code that raises on all who are there ends a job
        acts.append(Act(moment, kind, _about(dice, kind), tuple(round(dice.random(), 2) for _ in range(2))))
    return Plan(seed, workers, two_hosts, warm, min_workers, settings, tuple(acts))


def _about(dice: random.Random, kind: str) -> tuple[Any, ...]:
    match kind:
        case "trip":
            return dice.choice(TRIPS)
        case "linger":
            return (dice.choice(LINGERS),)
        case "resize":
            return (dice.randint(1, MAX_WORKERS),)
        case "saves":
            return (dice.randint(2, 4),)
        case "end_and_resume":
            # How it ends; which number of workers and warm spares it goes on with (None: the same command); whether a
            # byte of the newest checkpoint is flipped; whether the second host, if there is one, waits for it.
            workers = dice.choice((None, None, 2, 3, 4))
            return _weighted(dice, ENDS), workers, dice.choice((0, 0, 1, 2)), dice.random() < 0.3, dice.random() < 0.5
        case _:
            return ()


def _weighted(dice: random.Random, weights: dict[str, int]) -> str:
    return dice.choices(tuple(weights), tuple(weights.values()))[0]
