"""The learning rate of each step, as it is logged. What the optimizer uses is Optax's business."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from elastic_train.state import Device

RATES_AT_ONCE = 64
"""For how many steps the learning rate is computed at a time. A call takes as long for one, and the device waits."""


class LearningRates:
    """The learning rate by step.

    Args:
      schedule: the trainer's, or None if it has none.
      num_steps: of the run.
      device: where the worker trains.
    """

    def __init__(self, schedule: optax.Schedule | None, num_steps: int, device: Device) -> None:
        self._device = _cheapest_for_scalars(device)
        self._schedule = None if schedule is None else jax.jit(partial(_many_rates, schedule, num_steps - 1))
        self._rates: tuple[int, np.ndarray] = -1, np.empty(0)
        self.of(0)  # compiles

    def of(self, step: int) -> float | None:
        """The learning rate of the update that follows `step` updates; None without a schedule."""
        if self._schedule is None:
            return None
        start = step - step % RATES_AT_ONCE
        if self._rates[0] != start:
            with jax.default_device(self._device):
                self._rates = start, np.asarray(self._schedule(np.int32(start)))
        return float(self._rates[1][step - start])


def _many_rates(schedule: Any, last: int, start: jax.Array) -> jax.Array:
    """The learning rates of `RATES_AT_ONCE` steps from `start` on, int32[], none after `last`; traceable. One by one,
    so that a rate does not depend on which others are computed beside it."""
    steps = jnp.minimum(start + jnp.arange(RATES_AT_ONCE, dtype=jnp.int32), last)
    return jax.lax.map(lambda step: jnp.asarray(schedule(step)), steps)


def _cheapest_for_scalars(device: Device) -> Device:
    """The CPU, where a few scalar operations cost microseconds, unless `JAX_PLATFORMS` leaves it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return device
