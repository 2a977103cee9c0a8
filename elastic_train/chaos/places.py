"""The places of a step at which faults can be injected: wraps the product's classes, in a worker under test only.

Nothing here is imported unless the job was started with `--chaos` (or by a recipe of the tests), so an ordinary run
pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic_train.data.prefetch import Prefetcher
from elastic_train.membership.group import View
from elastic_train.membership.heal import Healer
from elastic_train.membership.live import Group
from elastic_train.state import PyTree, TrainState
from elastic_train.step.commit import Stepper
from elastic_train.step.local import LocalProgram
from elastic_train.step.reduce import Exchange, Gather
from elastic_train.trainer import StepCommitted, Trainer


class Interference:
    """What may be done at each place; by default nothing. All is called in the worker's main thread."""

    def at(self, where: str, role: str = "") -> None:
        """The worker is at a place of `faults.PLACES`; `role` is "joiner" or "donor" where that is known."""

    def viewed(self, view: View) -> None:
        """A view is about to be formed."""

    def committed(self, step: int) -> None:
        """So many steps are completed now."""

    def compute(self, shard: Callable[[], Any]) -> Any:
        """Computes a shard, and returns that."""
        return shard()

    def shard_params(self, params: PyTree) -> PyTree:
        """The parameters at which the gradient of one shard is taken."""
        return params

    def params(self, params: PyTree) -> PyTree:
        """The parameters that the next step starts from."""
        return params

    def received(self, state: PyTree) -> PyTree:
        """What a joiner has received."""
        return state


def install(to: Interference, trainer: Trainer | None = None) -> None:
    """Wraps the classes that a worker uses, and the hooks of `trainer`. Once in a process, before it prepares."""

    def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))

    forming = False

    def prepare(original: Any, group: Group, view: View, stripe: int | None = None) -> None:
        nonlocal forming
        if view.epoch > 0:  # epoch 0 is that of a rehearsal before the worker is a member
            forming = True
            to.viewed(view)
        original(group, view, stripe)

    def gather(original: Any, gather: Gather, row: Any) -> Any:
        nonlocal forming
        if forming:
            forming = False
            to.at("gather")
        return original(gather, row)

    def exchange(original: Any, exchange: Exchange, *args: Any) -> Any:
        to.at("exchange")
        return original(exchange, *args)

    def wait(original: Any, exchange: Exchange, votes: Any) -> Any:
        rows = original(exchange, votes)
        to.at("barrier")
        return rows

    def heal(original: Any, healer: Healer, spread: Any, state: PyTree, donors: Any, rank: int, receives: bool) -> Any:
        to.at("heal", "joiner" if receives else "donor" if rank in donors else "")
        healed = original(healer, spread, state, donors, rank, receives)
        return to.received(healed) if receives else healed

    def get(original: Any, prefetcher: Prefetcher, samples: int, shard: int) -> Any:
        to.at("data")
        return original(prefetcher, samples, shard)

    def shard_sums(original: Any, local: LocalProgram, state: TrainState, *args: Any) -> Any:
        to.at("compute")
        params = to.shard_params(state.params)
        return to.compute(lambda: original(local, _with_params(state, params), *args))

    def attempt(original: Any, stepper: Stepper, state: TrainState, *args: Any) -> Any:
        return original(stepper, _with_params(state, to.params(state.params)), *args)

    wrap(Group, "prepare", prepare)
    wrap(Gather, "__call__", gather)
    wrap(Exchange, "__call__", exchange)
    wrap(Exchange, "wait", wait)
    wrap(Healer, "run", heal)
    wrap(Prefetcher, "get", get)
    wrap(LocalProgram, "shard_sums", shard_sums)
    wrap(Stepper, "attempt", attempt)
    if trainer is None:
        return

    def model(original: Any, *args: Any) -> Any:
        to.at("start")
        return original(*args)

    def on_step(original: Any, event: StepCommitted) -> None:
        to.committed(event.step)
        original(event)
        to.at("hook")

    def on_members(original: Any, event: Any) -> None:
        to.committed(event.step)
        original(event)

    # On the instance, so that the class of the recipe stays as it is.
    for name, around in (("model", model), ("on_step", on_step), ("on_members", on_members)):
        wrap(trainer, name, around)


def _with_params(state: TrainState, params: PyTree) -> TrainState:
    return state if params is state.params else replace(state, params=params)
