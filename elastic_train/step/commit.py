"""One step: local gradients, the exchange, the verdict, the update."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from elastic_train.data.batches import Batches
from elastic_train.data.prefetch import Shard
from elastic_train.membership.group import Agreed, Commit, Retry, Shrink, Vote
from elastic_train.membership.live import Group
from elastic_train.state import TrainState
from elastic_train.step.flat import Sums
from elastic_train.step.kept import Kept
from elastic_train.step.local import Inputs, LocalProgram, Marks
from elastic_train.step.plan import Node, fold, partials, run_of


class Shards(Protocol):
    """Where a step's samples come from."""

    def expect(self, state: TrainState, missing: Sequence[int], run: range, batch_size: int) -> None:
        """Says which shards this member will ask for: `missing` in the step after `state`, and `run`, for all it
        knows, in those that follow."""
        ...

    def read(self, samples: int, shard: int) -> Shard | Inputs:
        """Samples of one shard of the batch that begins at position `samples`, and their weights; or what was made of
        them."""
        ...

    def refine(self, samples: int, shard: int, work: Callable[[Shard], Any]) -> None:
        """Has `read` give what `work` makes of a shard, if that has been read by now."""
        ...


@dataclass(frozen=True)
class Outcome:
    """What one attempt at a step came to.

    Attributes:
      verdict: the same on all members.
      state: the state after it; the old one unless the step was committed. A step that was skipped has moved only its
        place in the data.
      metrics: means over the batch, if the step was committed, or if it was not because they are not finite.
      failure: traceback of this worker's own code, if that raised.
      num_reused: how many of this member's shards were taken from an attempt before, one that members did not survive.
    """

    verdict: Agreed
    state: TrainState
    metrics: dict[str, float]
    failure: str
    num_reused: int


class _Queued(NamedTuple):
    """What follows from a step's partial sums, none of which need be there yet.

    Attributes:
      total: the sum over all shards.
      means: the step's metrics, float32[] each.
      after: the state after the step; None if it takes the place of the one before, which it may not do yet.
    """

    total: Sums
    means: dict[str, jax.Array]
    after: TrainState | None


class Stepper:
    """Tries steps. Between two attempts it holds nothing but partial sums, and these only if members are gone.

    Args:
      group: the members.
      local: this worker's compiled programs.
      data: gives a shard's samples.
      batches: how a step's batch is cut.
      phase: told what is being done, for the display and for whoever looks for a stuck worker.
      worked: told how many seconds this member's part of a step took, and how many shards that was.
      before_update: called when the state is about to be replaced.
    """

    def __init__(
        self,
        group: Group,
        local: LocalProgram,
        data: Shards,
        batches: Batches,
        phase: Callable[[str], None],
        worked: Callable[[float, int], None],
        before_update: Callable[[], None],
    ) -> None:
        self._group, self._local, self._data = group, local, data
        self._batches, self._phase, self._worked = batches, phase, worked
        self._before_update = before_update
        self._kept = Kept()
        self._scale: tuple[jax.Array, ...] = ()
        self._num_reused = 0

    def attempt(self, state: TrainState, vote: Vote, failure: str = "") -> Outcome:
        """Tries the step that follows `state`, once. In this order:

        1. local gradients; a worker whose own code raised takes part all the same, with zeros and a vote against
        2. the exchange, on accelerators queued before the gradients are there, and behind it the update, if there is
           room for its result
        3. when gradients and exchange are there, the exit barrier of `live_devices`
        4. after a commit, and only then, the new state counts. If it takes the old one's place, it is computed now

        Args:
          state: the newest committed state.
          vote: this member's control vector.
          failure: traceback of what this worker's code raised since the last commit (in a hook), if it did.
        """
        raised = [failure] if failure else []
        size = self._batches.size(self._group.plan.num_members)

        def body() -> tuple[_Queued, np.ndarray]:
            marks = self._local.marks(state, vote.checked)
            sums, marks, finish = self._partial_sums(state, marks, size, raised)
            said = replace(vote, ok=False) if raised else vote
            sent, is_there = None, None
            if self._local.queues_ahead:
                try:
                    sent = self._group.exchange(sums, said.pack(), marks)
                except Exception:
                    is_there = finish()
                    if is_there:  # so it is the exchange
                        raise
            if not (finish() if is_there is None else is_there):
                # What was queued has nothing to work with, so it sends nothing. The others wait for this instead.
                said, sent = replace(vote, ok=False, checked=False), None
                sums, marks = [self._local.zeros()], self._local.marks(state, checked=False)
            exchange = self._group.exchange  # which may have to be waited for
            self._phase("exchange")
            total, votes = sent or exchange(sums, said.pack(), marks)
            queued = self._queue(state, total, size, may_commit=said.ok)
            return queued, exchange.wait(votes)

        self._num_reused = 0
        verdict, queued = self._group.attempt(body, step=state.step + 1)
        if not isinstance(verdict, Shrink):
            self._kept.drop()  # before the update, which needs the memory
        values: dict[str, jax.Array] = {}
        if isinstance(verdict, Commit) or (isinstance(verdict, Retry) and verdict.nonfinite is not None):
            values = queued.means
        if isinstance(verdict, Commit):
            self._phase("update")
            self._before_update()
            if verdict.skipped is not None:
                state = _moved_on(state, size)
            else:
                state = queued.after or self._local.update(state, queued.total, size, self._scale)
        metrics = {name: float(value) for name, value in jax.device_get(values).items()}
        return Outcome(verdict, state, metrics, raised[0] if raised else "", self._num_reused)

    def _queue(self, state: TrainState, total: Sums, size: int, may_commit: bool) -> _Queued:
        """Queues on the device, behind the exchange, all that follows from it and can be thrown away, and brings the
        next step's samples there. So the device has something to do while the host finds out what counts."""
        means = self._local.means(total)
        for value in means.values():
            value.copy_to_host_async()
        after = None
        if may_commit and self._local.num_states > 1:
            try:
                after = self._local.update(state, total, size, self._scale)
            except Exception as error:
                # The exchange is under way, and this is no reason not to take part. What is wrong shows later.
                print(f"elastic_train: the update could not be queued: {error}", file=sys.stderr, flush=True)
        for shard in run_of(self._group.plan.num_shards, self._group.plan.num_members, self._group.rank):
            self._data.refine(state.samples + size, shard, partial(self._place, state.step + 1, shard))
        return _Queued(total, means, after)

    def _place(self, step: int, shard: int, samples: Shard | Inputs) -> Inputs:
        if not isinstance(samples, Inputs):
            return self._local.place(step, shard, *samples)
        return samples if samples.step == step else self._local.place(step, shard, samples.batch, samples.weight)

    def _partial_sums(
        self, state: TrainState, marks: Marks, size: int, raised: list[str]
    ) -> tuple[list[Sums], Marks, Callable[[], bool]]:
        """This member's partial sums, which need not be there yet, and their marks. The function waits for them, and
        gives False if that fails. Adds to `raised` what the user's code raises."""
        began = time.monotonic()
        self._phase("data")
        if raised:
            return [self._local.zeros()], marks, lambda: True
        plan = self._group.plan
        run = run_of(plan.num_shards, plan.num_members, self._group.rank)
        nodes = partials(run.start, run.stop, plan.num_shards)
        found, missing = self._kept.take(state, nodes)
        keeps_shards = self._kept.has_room(len(run), self._local.layout)
        newest = [marks]

        def shard_sums(shard: int) -> Sums:
            sums, newest[0] = self._shard(state, shard, newest[0])
            if keeps_shards:
                found[Node(shard, shard + 1)] = sums
            return sums

        def failed(error: BaseException) -> None:
            error.add_note(f"in step {state.step + 1}")
            raised.append(traceback.format_exc())

        def finish() -> bool:
            # What fails on the device, callbacks into the user's code included, must show here: in the exchange it
            # could not be voted on. And whoever says that it waits for the others has done its part, an endless
            # kernel included.
            self._phase("compute")
            try:
                jax.block_until_ready((sums, newest[0]))
            except Exception as error:
                failed(error)
                return False
            if missing:
                self._worked(time.monotonic() - began, len(missing))
            self._num_reused = len(run) - len(missing)
            parts = dict(zip(nodes, sums, strict=True))
            self._kept.keep(state, {**found, **parts} if keeps_shards else parts, newest[0])
            return True

        try:
            self._scale = self._local.scale(size)
            self._data.expect(state, missing, run, size)
            sums = [fold(node, shard_sums, self._local.add, found) for node in nodes]
        except (Exception, SystemExit) as error:
            failed(error)
            return [self._local.zeros()], marks, lambda: True
        return sums, newest[0], finish

    def _shard(self, state: TrainState, shard: int, marks: Marks) -> tuple[Sums, Marks]:
        self._phase("data")
        samples = self._data.read(state.samples, shard)
        self._phase("compute")
        inputs = self._place(state.step, shard, samples)
        try:
            return self._local.shard_sums(state, inputs, marks)
        except Exception as error:
            error.add_note(f"in the loss of shard {shard}")
            raise


def _moved_on(state: TrainState, num_samples: int) -> TrainState:
    """The state after a step that is skipped: its samples count as used, and the next step has keys of its own."""
    return replace(state, step=state.step + 1, samples=state.samples + num_samples)
