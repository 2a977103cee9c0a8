"""A trainer in one plain process: no launcher, no coordinator, the same steps and the same numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from elastic_train.membership.group import Identity, View
from elastic_train.membership.live import Alone, Group
from elastic_train.training import Outside, Recipe, Result, Training

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

ME = Identity(slot=0, incarnation=0, node=0)


class Nobody:
    """The outside of a process that nobody watches and nobody asks for anything."""

    candidates: tuple[Identity, ...] = ()
    stop_requested: str | None = None

    def phase(self, name: str, step: int) -> None:
        pass

    def viewed(self, view: View, reason: str, gone: Any, came: Any, step: int, time: float) -> None:
        pass

    def record(self, record: dict[str, Any], flush: bool = False, send: bool = True) -> None:
        pass

    def resend(self) -> None:
        pass

    def failed(self, step: int, fatal: bool, startup: bool, traceback: str) -> None:
        pass

    def wait_dead(self, nodes: frozenset[int], timeout: float) -> bool:
        return False


def fit_alone(trainer: Trainer, outside: Outside | None = None) -> Result:
    """Trains to the last step (or until a stop is asked for) in this process."""
    outside = outside or Nobody()
    device = jax.local_devices()[0]
    recipe = Recipe(trainer, device)
    group = Group(
        ME,
        {ME.node: device},
        recipe.local.specs,
        trainer.config.shards,
        outside,
        trainer.config.faults,
        None,
        lambda devices: Alone(),
    )
    return Training(recipe, group, outside).run(View(1, (ME,)))


def main(trainer: type[Trainer]) -> None:
    raise SystemExit("temp")
