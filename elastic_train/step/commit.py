"""One step: local gradients, the exchange, the verdict, the update."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from elastic_train.data.batches import Batches
from elastic_train.data.prefetch import Shard
from elastic_train.membership.group import Agreed, Commit, Retry, Shrink, Vote
from elastic_train.membership.live import Group
from elastic_train.state import TrainState, failure_of
from elastic_train.step.flat import Sums
from elastic_train.step.kept import Kept
from elastic_train.step.local import Inputs, LocalProgram
from elastic_train.step.mathematics import Marks
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
      failure: traceback of this worker's own code, if that raised. Not told if members are gone: what raised is tried
        again in any case.
      num_reused: how many of this member's shards were taken from an attempt before, one that members did not survive.
    """

    verdict: Agreed
    state: TrainState
    metrics: dict[str, float]
    failure: str = ""
    num_reused: int = 0


@dataclass
class _Part:
    """One member's part of one attempt: its partial sums, which need not be there yet, and what it says of them.

    Attributes:
      state: from which the step is taken.
      vote: the control vector, as the host knows it.
      marks: what the device adds to it, about `state` and the shards so far; see `group.MARKS_START`.
      began: when this member's own work began, in seconds of the monotonic clock.
      sums: the partial sums; zeros of a member whose own code has raised.
      scale: the factor on the update; see `LocalProgram.scale`.
      reusable: what the next attempt can use of this one, if members are gone.
      num_computed, num_reused: of its shards; reused are those that the attempt before has left.
      failure: traceback of what its own code has raised, before the step or in it.
      is_there: whether `sums` and `marks` have come; None until they have been waited for.
    """

    state: TrainState
    vote: Vote
    marks: Marks
    began: float
    sums: list[Sums] = field(default_factory=list)
    scale: tuple[jax.Array, ...] = ()
    reusable: Mapping[Node, Sums] = field(default_factory=dict)
    num_computed: int = 0
    num_reused: int = 0
    failure: str = ""
    is_there: bool | None = True


class _Tried(NamedTuple):
    """What an attempt comes to with the parts of all members. Arrays need not be there yet.

    Attributes:
      total: the sum over all shards.
      means: the step's metrics, float32[] each.
      after: the state after the step; None if it takes the place of the one before, which it may not do yet.
      scale, failure, num_reused: of this member's part.
      not_queued: why the update could not be queued; empty if it was, or was not tried.
    """

    total: Sums
    means: dict[str, jax.Array]
    after: TrainState | None
    scale: tuple[jax.Array, ...]
    failure: str
    num_reused: int
    not_queued: str


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

    def attempt(self, state: TrainState, vote: Vote, failure: str = "") -> Outcome:
        """Tries the step that follows `state`, once. In this order:

        1. local gradients; a worker whose own code raised takes part all the same, with zeros and a vote against
        2. the exchange, on accelerators (and by one member alone) queued before the gradients are there, and behind it
           the update, if there is room for its result. One that branches is queued when the gradients are there
        3. when gradients and exchange are there, the exit barrier of `live_devices`
        4. after a commit, and only then, the new state counts. If it takes the old one's place, it is computed now

        Args:
          state: the newest committed state.
          vote: this member's control vector.
          failure: traceback of what this worker's code raised since the last commit (in a hook), if it did.
        """
        size = self._batches.size(self._group.plan.num_members)
        take_part = partial(self._take_part, state, vote, size, failure)
        verdict, tried = self._group.attempt(take_part, step=state.step + 1)
        if isinstance(verdict, Shrink):
            return Outcome(verdict, state, {})
        self._kept.drop()  # before the update, which needs the memory
        values: dict[str, jax.Array] = {}
        if isinstance(verdict, Commit) or (isinstance(verdict, Retry) and verdict.nonfinite is not None):
            values = tried.means
        if isinstance(verdict, Commit):
            self._phase("update")
            self._before_update()
            if verdict.skipped is not None:
                state = _moved_on(state, size)
            else:
                state = tried.after or self._local.update(state, tried.total, size, tried.scale)
        metrics = {name: float(value) for name, value in jax.device_get(values).items()}
        return Outcome(verdict, state, metrics, tried.failure, tried.num_reused)

    def _take_part(self, state: TrainState, vote: Vote, size: int, failure: str) -> tuple[_Tried, np.ndarray]:
        """What is done between the two barriers, up to the point at which all control vectors are there."""
        part = self._begin(state, vote, size, failure)
        sent = tried = None
        if self._queues_ahead:
            try:
                sent = self._group.exchange(part.sums, part.vote.pack(), part.marks)
                if not self._local.update_waits:
                    tried = self._queue(sent[0], size, part)
                    self._bring_next(state, size)
            except Exception:
                if self._is_there(part):  # so it is not for want of gradients
                    raise
        if not self._is_there(part):
            # What is queued has nothing to work with, so it sends nothing: the others wait for zeros instead.
            sent = tried = None
        exchange = self._group.exchange  # which may have to be waited for
        self._phase("exchange")
        total, votes = sent or exchange(part.sums, part.vote.pack(), part.marks)
        tried = tried or self._queue(total, size, part)
        if tried.not_queued:
            # The exchange is under way, and this is no reason not to take part. What is wrong shows later.
            print(f"elastic_train: the update could not be queued: {tried.not_queued}", file=sys.stderr, flush=True)
        self._bring_next(state, size)
        return tried, exchange.wait(votes)

    @property
    def _queues_ahead(self) -> bool:
        """Whether the exchange is queued before the gradients are there. With nobody else it waits for nobody."""
        return self._local.queues_ahead or self._group.plan.num_members == 1

    def _begin(self, state: TrainState, vote: Vote, size: int, failure: str) -> _Part:
        """Queues on the device what this member computes by itself. What its code raises meanwhile is voted on."""
        part = _Part(state, vote, self._local.marks(state, checked=False), time.monotonic())
        self._phase("data")
        marks = None
        try:
            marks = part.marks = self._local.marks(state, vote.checked)
        except Exception as error:
            self._fail(part, error)
            return part
        if failure:
            self._oppose(part, failure, marks)
            return part
        plan = self._group.plan
        run = run_of(plan.num_shards, plan.num_members, self._group.rank)
        nodes = partials(run.start, run.stop, plan.num_shards)
        found, missing = self._kept.take(state, nodes)
        keeps_shards = self._kept.has_room(len(run), self._local.layout)

        def shard_sums(shard: int) -> Sums:
            sums, part.marks = self._shard(state, shard, part.marks)
            if keeps_shards:
                found[Node(shard, shard + 1)] = sums
            return sums

        try:
            part.scale = self._local.scale(size)
            self._data.expect(state, missing, run, size)
            part.sums = [fold(node, shard_sums, self._local.add, found) for node in nodes]
        except (Exception, SystemExit) as error:
            self._fail(part, error, marks)
            return part
        sums = dict(zip(nodes, part.sums, strict=True))
        part.reusable = {**found, **sums} if keeps_shards else sums
        part.num_computed, part.num_reused = len(missing), len(run) - len(missing)
        part.is_there = None
        return part

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

    def _is_there(self, part: _Part) -> bool:
        """Waits for a part. Gives False if that fails; the part is one that opposes the step then."""
        if part.is_there is None:
            part.is_there = self._wait_for(part)
        return part.is_there

    def _wait_for(self, part: _Part) -> bool:
        # What fails on the device, callbacks into the user's code included, must show here: in the exchange it could
        # not be voted on. And whoever says that it waits for the others has done its part, an endless kernel included.
        self._phase("compute")
        try:
            jax.block_until_ready((part.sums, part.marks))
        except Exception as error:
            self._fail(part, error)
            return False
        if part.num_computed:
            self._worked(time.monotonic() - part.began, part.num_computed)
        self._kept.keep(part.state, part.reusable, part.marks)
        return True

    def _queue(self, total: Sums, size: int, part: _Part) -> _Tried:
        """Queues on the device, behind the exchange, all that follows from it and can be thrown away. So the device has
        something to do while the host finds out what counts."""
        state, not_queued = part.state, ""
        means = self._local.means(total)
        for value in means.values():
            value.copy_to_host_async()
        after = None
        if part.vote.ok and self._local.num_states > 1:
            try:
                after = self._local.update(state, total, size, part.scale)
            except Exception as error:
                not_queued = str(error)
        return _Tried(total, means, after, part.scale, part.failure, part.num_reused, not_queued)

    def _bring_next(self, state: TrainState, size: int) -> None:
        """Brings what has been read by now of the next step's samples to the device, if it is not there yet."""
        for shard in run_of(self._group.plan.num_shards, self._group.plan.num_members, self._group.rank):
            self._data.refine(state.samples + size, shard, partial(self._place, state.step + 1, shard))

    def _place(self, step: int, shard: int, samples: Shard | Inputs) -> Inputs:
        if not isinstance(samples, Inputs):
            return self._local.place(step, shard, *samples)
        return samples if samples.step == step else self._local.place(step, shard, samples.batch, samples.weight)

    def _fail(self, part: _Part, error: BaseException, marks: Marks | None = None) -> None:
        """Has a part oppose the step because of `error`, which is being handled. `marks`: see `_oppose`."""
        error.add_note(f"in step {part.state.step + 1}")
        if lost := failure_of(part.state):
            # Trying again cannot help: this worker leaves, and the next one of its slot is given the state.
            part.vote = replace(part.vote, spent=True)
            self._oppose(part, lost)
        else:
            self._oppose(part, traceback.format_exc(), marks)

    def _oppose(self, part: _Part, failure: str, marks: Marks | None = None) -> None:
        """Makes a part one of zeros, with a vote against the step.

        Args:
          failure: why: traceback of what this worker's own code has raised.
          marks: those of the state, if nothing has failed on the device; otherwise they are not to be had.
        """
        part.failure = failure
        part.vote = replace(part.vote, ok=False, checked=part.vote.checked and marks is not None)
        part.sums, part.reusable = [self._local.zeros()], {}
        part.num_computed = part.num_reused = 0
        part.marks = self._local.marks(part.state, checked=False) if marks is None else marks


def _moved_on(state: TrainState, num_samples: int) -> TrainState:
    """The state after a step that is skipped: its samples count as used, and the next step has keys of its own."""
    return replace(state, step=state.step + 1, samples=state.samples + num_samples)
