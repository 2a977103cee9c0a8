"""A plan of additions, carried out in NumPy: what the exchange program has to compute."""

from __future__ import annotations

import numpy as np

from elastic_train.step.plan import Plan


def evaluate(plan: Plan, tables: np.ndarray) -> np.ndarray:
    """The sum over all shards.

    Args:
      tables: the partials, `[num_members, slots_per_member, ...]`; padding may hold anything.
    """
    assert tables.shape[:2] == (plan.num_members, plan.slots_per_member)
    registers: list[np.ndarray] = list(tables.reshape(-1, *tables.shape[2:]))
    for left, right, _ in plan.additions:
        registers.append(registers[left] + registers[right])
    return registers[plan.root]
