"""Evaluation: every member takes some of the batches; the means are the same for any number of members."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import numpy as np

from elastic_train.membership.group import VOTE_SIZE, Agreed, Commit, Vote
from elastic_train.membership.live import Group
from elastic_train.state import TrainState, failure_of
from elastic_train.step.local import LocalProgram


class Evaluator:
    """Averages the user's evaluation metrics over a whole data source.

    Args:
      local: this worker's compiled programs.
      read: gives evaluation samples by their ids, stacked.
      num_samples: how many there are.
      rows: samples per batch; the last batch is padded.
    """

    def __init__(
        self,
        local: LocalProgram,
        read: Callable[[np.ndarray], Mapping[str, np.ndarray]],
        num_samples: int,
        rows: int,
    ) -> None:
        self._local, self._read, self._num_samples, self._rows = local, read, num_samples, rows
        self.num_batches = -(-num_samples // rows)

    def attempt(
        self, group: Group, state: TrainState, vote: Vote, phase: Callable[[str], None]
    ) -> tuple[Agreed, dict[str, float], str]:
        """Evaluates once with the current members. `vote` is this member's, if its code does not raise; `phase` is told
        what is being done, with every batch anew.

        Returns the verdict; the means, if it is `Commit`; and the traceback of this worker's code, if that raised.
        """
        members = len(group.view.members)
        names = self._local.eval_names
        per_member = -(-self.num_batches // members)
        raised: list[str] = []

        def body() -> tuple[np.ndarray, np.ndarray]:
            # Sums travel as the bits of float64 and are added on the host in the order of the batches, so that
            # the result does not depend on who computed what.
            sums, lost = np.zeros((per_member, len(names), 2), np.float64), ""
            try:
                for place, number in enumerate(range(group.rank, self.num_batches, members)):
                    phase("evaluate")
                    sums[place] = self._batch_sums(state, number)
            except (Exception, SystemExit) as error:
                error.add_note(f"in the evaluation after step {state.step}")
                lost = failure_of(state)
                raised.append(lost or traceback.format_exc())
            # Trying again cannot bring a state back.
            row = (
                replace(vote, ok=not raised, spent=vote.spent or bool(lost)).pack()
                + sums.view(np.int32).ravel().tolist()
            )
            phase("compile")
            gather = group.gather_of(len(row))
            phase("gather")
            rows = gather(row)
            shape = (members, per_member, len(names), 2)
            table = np.ascontiguousarray(rows[:, VOTE_SIZE:]).view(np.float64).reshape(shape)
            return table, rows

        verdict, table = group.attempt(body)
        means: dict[str, float] = {}
        if isinstance(verdict, Commit):
            in_order = table.transpose(1, 0, 2, 3).reshape(-1, len(names), 2)[: self.num_batches]
            totals = np.add.reduce(in_order, axis=0)
            means = {name: float(value / weight) for name, (value, weight) in zip(names, totals, strict=True)}
        return verdict, means, raised[0] if raised else ""

    def _batch_sums(self, state: TrainState, number: int) -> np.ndarray:
        sums = jax.device_get(self._local.eval_sums(state, self._local.put(*self.batch(number))))
        return np.array([sums[name] for name in self._local.eval_names], np.float64)

    def batch(self, number: int) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
        """Samples of batch `number` and the weights of its rows: 1, or 0 for padding."""
        ids = np.arange(number * self._rows, (number + 1) * self._rows)
        weight = (ids < self._num_samples).astype(np.float32)
        return self._read(np.minimum(ids, self._num_samples - 1)), weight
