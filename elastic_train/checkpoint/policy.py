"""Which steps are saved, and which checkpoints stay. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_train.config import CheckpointConfig

FIRST_RETRY_S = 1.0
MAX_RETRY_S = 300.0
"""How long nothing is saved after a save that failed: doubled with each failure in a row, up to this."""

WAITING_BYTES = 64 << 20
"""A smaller state is written in a fraction of a second, so that waiting for it costs less than a save left out."""


def is_due(config: CheckpointConfig, step: int, last_step: int, asked: bool) -> bool:
    """Whether the state after `step` is to be saved; the same on all members.

    Args:
      config: the job's policy.
      step: completed updates.
      last_step: the one at which training ends.
      asked: the members have agreed on it: a person asked, or so much time has passed.
    """
    if config.keep == 0:
        return False
    at_multiple = any(every and step % every == 0 for every in (config.every_steps, config.keep_every_steps))
    return asked or at_multiple or step >= last_step


def to_delete(config: CheckpointConfig, steps: Iterable[int]) -> list[int]:
    """Which of the saved steps go: all but the newest `keep`, and the multiples of `keep_every_steps`."""
    ordered = sorted(steps)
    old = ordered[: max(0, len(ordered) - config.keep)]
    every = config.keep_every_steps
    return [step for step in old if not (every and step % every == 0)]


def waits(config: CheckpointConfig, step: int, num_bytes: int, asked: bool) -> bool:
    """Whether training waits with a save that is due until the one before it is written; else it is left out.

    Args:
      config: the job's policy.
      step: completed updates.
      num_bytes: size of the state.
      asked: as `is_due` has it.
    """
    every = config.keep_every_steps
    if asked or config.when_busy == "wait" or (every and step % every == 0):
        return True
    return config.when_busy == "auto" and num_bytes <= WAITING_BYTES


def retry_delay_s(failures: int) -> float:
    """How long to save nothing after so many failures in a row.

    >>> [retry_delay_s(failures) for failures in (1, 2, 3, 100)]
    [1.0, 2.0, 4.0, 300.0]
    """
    return min(FIRST_RETRY_S * 2.0 ** min(failures - 1, 32), MAX_RETRY_S)
