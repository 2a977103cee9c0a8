"""A worker under test does to itself what the job's schedule says, at the exact place."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from elastic_train.chaos import places
from elastic_train.chaos.faults import Fault
from elastic_train.chaos.orders import Order, Orders, Strike
from elastic_train.membership.group import Identity, View
from elastic_train.membership.stragglers import MIN_EXCESS_S
from elastic_train.state import PyTree
from elastic_train.trainer import Trainer

ALTERING = frozenset({"nonfinite", "flip", "corrupt"})
"""Kinds that change a value; the others are done at a place."""


class InjectedError(RuntimeError):
    """What a fault of kind raise raises."""


def install(trainer: Trainer, me: Identity, directory: Path) -> None:
    """Has this worker carry out the orders in `directory`. Call it before the worker prepares itself."""
    places.install(Injector(me, Orders(directory)), trainer)


class Injector(places.Interference):
    """Carries out what is due. The state of a worker: what it has claimed, and where it is.

    Args:
      me: this worker.
      orders: what the job wants.
    """

    def __init__(self, me: Identity, orders: Orders) -> None:
        self._me, self._orders = me, orders
        self._view: View | None = None
        self._step: int | None = None  # None: this worker has no state yet
        self._tried: set[int] = set()
        self._repeated: set[int] = set()
        self._struck: set[int | None] = set()  # completed steps at which this worker was struck
        self._slow: tuple[int, float] | None = None

    def viewed(self, view: View) -> None:
        self._view = view

    def committed(self, step: int) -> None:
        self._step = step

    def at(self, where: str, role: str = "") -> None:
        if where in ("data", "compute") and self._step is None:
            return  # it tries a shard out before it is a member
        for fault in self.due(where, role):
            match fault.kind:
                case "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                case "raise":
                    raise InjectedError(f"injected fault at {where}, step {self._step}, on slot {self._me.slot}")
                case "deadlock":
                    lock = threading.Lock()
                    lock.acquire()
                    lock.acquire()
                case "endless":
                    jax.block_until_ready(jax.jit(_endless)(np.int32(0)))
                case "slow":
                    assert fault.num_steps is not None and fault.factor is not None
                    self._slow = ((self._step or 0) + fault.num_steps, fault.factor)

    def compute(self, shard: Callable[[], Any]) -> Any:
        if self._slow is None:
            return shard()
        until, factor = self._slow
        if (self._step or 0) >= until:
            self._slow = None
            return shard()
        started = time.monotonic()
        sums = jax.block_until_ready(shard())
        # Less than this would not count as slow: a shard of a small model takes a millisecond.
        time.sleep(max((factor - 1) * (time.monotonic() - started), 2 * MIN_EXCESS_S))
        return sums

    def shard_params(self, params: PyTree) -> PyTree:
        # What is computed from them is for the product to find, as it would any other.
        return _changed(params, _all_nan) if self._strikes("compute", "", "nonfinite") else params

    def params(self, params: PyTree) -> PyTree:
        return _changed(params, _bit_flipped) if self._strikes("compute", "", "flip") else params

    def received(self, state: PyTree) -> PyTree:
        if not self._strikes("heal", "joiner", "corrupt"):
            return state
        return {**state, "params": _changed(state["params"], _bit_flipped)}

    def _strikes(self, where: str, role: str, kind: str) -> bool:
        return next(self.due(where, role, kind), None) is not None

    def due(self, where: str, role: str, kind: str = "") -> Iterator[Fault]:
        """The faults that are this worker's to carry out here and now, each put on record before it is handed out."""
        for order in self._orders.read():
            if self._is_due(order, where, role, kind):
                yield order.fault

    def _is_due(self, order: Order, where: str, role: str, kind: str) -> bool:
        fault = order.fault
        if fault.where != where or kind != (fault.kind if fault.kind in ALTERING else ""):
            return False
        if order.number in self._repeated:
            return True
        if order.number in self._tried or not self._is_meant(fault, role):
            return False
        if order.alone and self._step in self._struck:
            return False
        # The first communicator is formed before anybody has a state: that is step 0.
        step = 0 if self._step is None and where == "gather" else self._step
        is_reached = step is not None and step >= (fault.step or 0)
        return (fault.strikes_new or is_reached) and self._claim(order)

    def _is_meant(self, fault: Fault, role: str) -> bool:
        if isinstance(fault.slot, int):
            return fault.slot == self._me.slot
        if fault.slot in ("joiner", "donor"):
            return role == fault.slot or (fault.slot == "joiner" and not role and self._step is None)
        if self._view is None:
            return False
        return self._view.rank(self._me.node) == (0 if fault.slot == "first" else len(self._view.members) - 1)

    def _claim(self, order: Order) -> bool:
        """Whether it is this worker that strikes. With `repeat = "slot"` every worker of the slot does."""
        self._tried.add(order.number)
        name = f"{order.number}"
        if order.fault.repeat == "slot":
            name += f"-{self._me.incarnation}"
        if self._orders.is_claimed(name):
            return False
        claimed = self._orders.claim(Strike(order.number, self._me, self._step or 0, time.time()), name)
        if claimed:
            self._struck.add(self._step)
        if claimed and order.fault.repeat != "once":
            self._repeated.add(order.number)
        return claimed


def _endless(number: Any) -> Any:
    return jax.lax.while_loop(lambda n: n >= 0, lambda n: (n + 1) % 2, number)


def _changed(params: PyTree, change: Callable[[np.ndarray], None]) -> PyTree:
    """The parameters with one leaf changed, the first that is floating."""
    leaves, treedef = jax.tree.flatten(params)
    number = next(i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating))
    values = np.array(leaves[number])
    change(values)
    leaves[number] = jax.device_put(values, leaves[number].sharding)
    return jax.tree.unflatten(treedef, leaves)


def _all_nan(values: np.ndarray) -> None:
    values[...] = np.nan


def _bit_flipped(values: np.ndarray) -> None:
    values.reshape(-1).view(np.uint8)[0] ^= 1
