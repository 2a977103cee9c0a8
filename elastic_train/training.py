"""The order of events of a run, on every member: epochs, steps, evaluations, the end."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from elastic_train.config import Config, shards_note
from elastic_train.data.batches import batches
from elastic_train.data.prefetch import Prefetcher, Shard
from elastic_train.data.source import DataError, DataSource, read
from elastic_train.errors import UserCodeError
from elastic_train.membership.group import (
    VOTE_SIZE,
    Commit,
    Identity,
    Retry,
    Shrink,
    View,
    Vote,
)
from elastic_train.membership.heal import Healer
from elastic_train.membership.live import Group, leave
from elastic_train.membership.reconcile import STANDING_SIZE, Agreement, Standing, agree, pack, unpack
from elastic_train.state import Device, TrainState, key_path_leaves
from elastic_train.step.commit import Stepper
from elastic_train.step.evaluate import Evaluator
from elastic_train.step.local import LocalProgram
from elastic_train.telemetry.leaves import write_leaves

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

MAX_HEALING_ROUNDS = 3
PAUSE_S = 0.2
MAX_IDS_SHOWN = 16


class Outside(Protocol):
    """What a run needs from outside: the coordinator's link in a job, files and signals in a plain process."""

    @property
    def candidates(self) -> tuple[Identity, ...]: ...
    @property
    def stop_requested(self) -> str | None: ...

    def phase(self, name: str, step: int) -> None: ...
    def viewed(self, view: View, reason: str, gone: Any, came: Any, step: int, time: float) -> None: ...
    def record(self, record: dict[str, Any], flush: bool = False, send: bool = True) -> None: ...
    def resend(self) -> None: ...
    def failed(self, step: int, fatal: bool, startup: bool, traceback: str) -> None: ...


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      status: "done", or "stopped" if somebody asked for it.
      state: the state after the last committed step.
      metrics: means of the last step and of the last evaluation ("eval_" in front).
    """

    status: str
    state: TrainState
    metrics: dict[str, float]


@dataclass(frozen=True)
class _Equal:
    """All members hold the same state. Ranks in the view's order.

    Attributes:
      fresh: nobody had any state before; it is the one that the seed gives.
      new: those who had none.
      healed: those who received it.
      heal_s: how long that took.
    """

    fresh: bool
    new: tuple[int, ...]
    healed: tuple[int, ...]
    heal_s: float


class OwnCodeFails(Exception):
    """This worker's code keeps raising, and that of others does not: this worker leaves."""


class Recipe:
    """A trainer made ready on this worker's device: model, compiled programs, open data. Slow; needs no peers."""

    def __init__(self, trainer: Trainer, device: Device) -> None:
        config: Config = trainer.config
        self.trainer, self.config, self.device = trainer, config, device
        # Sources are opened and read in one and the same thread, evaluation data too: some cannot bear another.
        self._prefetcher = Prefetcher(self._read_now, config.prefetch, self._describe)
        try:
            self._prepare(trainer, device)
        except BaseException:
            self.close()
            raise

    def _prepare(self, trainer: Trainer, device: Device) -> None:
        config = self.config
        self._source, num_samples = self._prefetcher.call(lambda: _opened(trainer.train_data(), "train_data"))
        self.batches = batches(config.batch_policy, num_samples, config.batch_size, config.shards, config.seed)
        self._eval_source, num_eval = self._prefetcher.call(lambda: _opened(trainer.eval_data(), "eval_data"))
        rows = self.batches.rows
        batch, _ = self.read(0, 0)
        eval_batch = self._read_eval(np.arange(rows) % num_eval) if num_eval else None
        self.local = LocalProgram(trainer, device, batch, eval_batch)
        self.evaluator = Evaluator(self.local, self._read_eval, num_eval, rows) if num_eval else None
        self.healer = Healer(self.local.initial.arrays, device)
        self.layout = _layout(self.local.initial, config)

    def expect(self, state: TrainState, run: range, batch_size: int) -> None:
        """Has the shards `run` of the step after `state` read ahead, and of those that follow up to the last step."""
        ahead = range(min(self.config.steps - state.step, self.config.prefetch + 1))
        self._prefetcher.expect((state.samples + number * batch_size, run) for number in ahead)

    def read(self, samples: int, shard: int) -> Shard:
        """Samples of one shard of the batch that begins at position `samples`, and their weights."""
        try:
            return self._prefetcher.get(samples, shard)
        except Exception as error:
            error.add_note(f"while reading {self._describe(samples, shard)}")
            raise

    def close(self) -> None:
        """Ends the thread that reads data."""
        self._prefetcher.close()

    def _read_now(self, samples: int, shard: int) -> Shard:
        ids, weight = self.batches.shard_ids(samples, shard)
        return read(self._source, ids), weight

    def _read_eval(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        return self._prefetcher.call(lambda: read(self._eval_source, ids))

    def _describe(self, samples: int, shard: int) -> str:
        ids, weight = self.batches.shard_ids(samples, shard)
        real = ids[weight > 0].tolist()
        more = f", … ({len(real)} in all)" if len(real) > MAX_IDS_SHOWN else ""
        named = ", ".join(str(index) for index in real[:MAX_IDS_SHOWN])
        return f"samples {named}{more} (shard {shard} of the batch at position {samples})"


def _opened(source: DataSource | None, method: str) -> tuple[Any, int]:
    if source is not None and len(source) == 0:
        hint = "; return None for no evaluation" if method == "eval_data" else ""
        raise DataError(f"{method}() gave a data source without samples: len(source) is 0{hint}")
    return source, 0 if source is None else len(source)


def write_params(run_dir: Path, state: TrainState) -> None:
    """Leaves a description of the parameters in `run_dir`. It is a help for comparing runs: a disk that is full
    must not cost a run that has reached its end, so what goes wrong is only said."""
    try:
        write_leaves(run_dir, state.step, ((path, np.asarray(leaf)) for path, leaf in key_path_leaves(state.params)))
    except OSError as error:
        print(
            f"cannot describe the parameters in {run_dir}: {error}; the run is not affected, but `elastic-train "
            "compare` cannot tell by how much they differ from another run's",
            file=sys.stderr,
            flush=True,
        )


def _layout(state: TrainState, config: Config) -> tuple[int, int]:
    """64 bits over what must be the same on all members: key paths, shapes, dtypes and the settings."""
    leaves = [(path, str(leaf.dtype), leaf.shape) for path, leaf in key_path_leaves(state.arrays)]
    digest = hashlib.sha256(repr((leaves, config)).encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


class Training:
    """One member's run, from its first view to the last commit.

    Args:
      recipe: the trainer, made ready.
      group: the members.
      outside: where records go and requests come from.
      min_workers: below this many members no step is tried.
      leave_requested: set when this worker alone was asked to leave.
    """

    def __init__(
        self,
        recipe: Recipe,
        group: Group,
        outside: Outside,
        min_workers: int = 1,
        leave_requested: threading.Event | None = None,
    ) -> None:
        self._recipe, self._group, self._outside, self._min_workers = recipe, group, outside, min_workers
        self._config, self._trainer, self._local = recipe.config, recipe.trainer, recipe.local
        self._stepper = Stepper(group, recipe.local, recipe, recipe.batches, self._phase)
        self._state = recipe.local.initial
        self._has_state = False
        self._failure = ""
        self._failures_in_a_row = 0
        self._metrics: dict[str, float] = {}
        self._record: dict[str, Any] | None = None
        self._recovered: dict[str, Any] | None = None
        self._last_commit = time.monotonic()
        self._leave_requested = leave_requested or threading.Event()

    def run(self, view: View) -> Result:
        """Trains to the last step, beginning as a member of `view`."""
        members = len(view.members)
        note = shards_note(self._recipe.batches.num_shards(members), members)
        if note and self._recipe.device.platform != "cpu":
            print(f"elastic_train: {note}", file=sys.stderr, flush=True)
        self._begin(view)
        while self._state.step < self._config.steps:
            if len(self._group.view.members) < self._min_workers:
                verdict = self._pause()
            else:
                verdict = self._step()
            if isinstance(verdict, Commit) and (verdict.stop or self._group.me in verdict.leaving):
                self._send_record()
                return Result("stopped" if verdict.stop else "left", self._state, self._metrics)
            self._follow(verdict)
            self._evaluate_if_due()
            self._send_record()
        return Result("done", self._state, self._metrics)

    @property
    def state(self) -> TrainState:
        """The newest committed state."""
        return self._state

    @property
    def is_first(self) -> bool:
        """Whether this is the first of the members: the one that speaks for all."""
        return self._group.is_first

    # Epochs.

    def _follow(self, verdict: Commit | Retry | Shrink) -> None:
        """Goes into the next epoch if the verdict names one."""
        if isinstance(verdict, Shrink):
            self._begin(verdict.view, died=verdict.gone)
        elif isinstance(verdict, Commit) and verdict.view.epoch != self._group.view.epoch:
            self._begin(verdict.view, left=verdict.leaving, came=verdict.joining)

    def _begin(
        self,
        view: View,
        died: tuple[Identity, ...] = (),
        left: tuple[Identity, ...] = (),
        came: tuple[Identity, ...] = (),
    ) -> None:
        """Begins an epoch: meets the members of `view`, and makes all states equal. Shrinks again if it must."""
        started = time.monotonic()
        while True:
            reason = "death" if died else "leave" if left else "admission"
            self._outside.viewed(view, reason, (*died, *left), came, self._state.step, time.time())
            self._phase("compile")
            expected = self._recipe.healer.stripe if came or not self._has_state else None
            self._group.prepare(view, expected)
            outcome = self._make_equal()
            if isinstance(outcome, _Equal):
                break
            view, died = outcome.view, (*died, *outcome.gone)
        self._has_state = True
        if self._group.is_first:
            self._outside.resend()
        # A joiner was not told who else is new, but all members see who had no state.
        new = [view.members[rank].slot for rank in outcome.new]
        self._recovered = {
            "epoch": view.epoch,
            "step": self._state.step,
            "kind": "formed" if outcome.fresh else "death" if died else "leave" if left else "admission",
            "gone": [member.slot for member in (*died, *left)],
            "came": new,
            "healed": [view.members[rank].slot for rank in outcome.healed],
            "heal_s": outcome.heal_s,
            "rebuild_s": time.monotonic() - started - outcome.heal_s,
        }
        failure = self._trainer._epoch_begun(view, self._group.me.slot, self._state.step, self._recovered)
        self._failure = self._failure or failure

    def _make_equal(self) -> _Equal | Shrink:
        """Compares the members' states and transfers the one that counts, until all are equal."""
        outcome = self._reconcile()
        if isinstance(outcome, Shrink):
            return outcome
        agreement, standings = outcome
        new = tuple(rank for rank, standing in enumerate(standings) if not standing.has_state)
        fresh, healed, heal_s, num_rounds = agreement.fresh, agreement.receivers, 0.0, 0
        while agreement.receivers and num_rounds < MAX_HEALING_ROUNDS:
            num_rounds += 1
            started = time.monotonic()
            verdict = self._heal(agreement, standings)
            heal_s += time.monotonic() - started
            outcome = verdict if isinstance(verdict, Shrink) else self._reconcile()
            if isinstance(outcome, Shrink):
                return outcome
            agreement, standings = outcome
        if self._group.rank in agreement.receivers:
            leave(f"slot {self._group.me.slot}: the state still differs after {MAX_HEALING_ROUNDS} transfers")
        return _Equal(fresh, new, healed, heal_s)

    def _reconcile(self) -> tuple[Agreement, list[Standing]] | Shrink:
        """All members say which state they hold."""
        fingerprint = self._local.fingerprint(self._state)
        mine = Standing(self._state.step, self._state.samples, fingerprint, self._recipe.layout, self._has_state)
        row = Vote(mine.step, fingerprint=fingerprint).pack() + pack(mine)
        self._phase("reconcile")

        def body() -> tuple[np.ndarray, np.ndarray]:
            rows = self._group.gather(row)
            return rows, rows

        verdict, rows = self._group.attempt(body)
        if isinstance(verdict, Shrink):
            return verdict
        standings: list[Standing] = []
        for each in rows:
            vote = Vote.unpack(each)
            standings.append(unpack(vote.step, vote.fingerprint, each[VOTE_SIZE:]))
        agreement = agree(standings)
        if self._group.rank in agreement.refused:
            leave(f"slot {self._group.me.slot}: runs another model, dtype or config than the other members")
        return agreement, standings

    def _heal(self, agreement: Agreement, standings: list[Standing]) -> Commit | Retry | Shrink:
        """The donors' state to the receivers. A receiver's own state is replaced only if everybody was there."""
        rank = self._group.rank
        receives = rank in agreement.receivers
        donor = standings[agreement.donors[0]]
        self._phase("heal")
        spread = self._group.spread(self._recipe.healer.stripe)

        def body() -> tuple[Any, np.ndarray]:
            arrays = self._recipe.healer.run(spread, self._state.arrays, agreement.donors, rank, receives)
            return arrays, self._group.gather(Vote(self._state.step).pack() + [0] * STANDING_SIZE)

        verdict, arrays = self._group.attempt(body)
        if receives and isinstance(verdict, Commit):
            self._state = TrainState(donor.step, donor.samples, **arrays)
        return verdict

    def _pause(self) -> Commit | Retry | Shrink:
        """Below the floor: only votes are exchanged, at a slow pace, until joiners bring the number up."""
        self._phase("pause")
        time.sleep(PAUSE_S)
        row = self._vote(self._outside.candidates).pack() + [0] * STANDING_SIZE

        def body() -> tuple[np.ndarray, np.ndarray]:
            rows = self._group.gather(row)
            return rows, rows

        return self._group.attempt(body)[0]

    # Steps.

    def _vote(self, candidates: tuple[Identity, ...]) -> Vote:
        return Vote(
            self._state.step,
            stop=self._outside.stop_requested is not None,
            leave=self._leave_requested.is_set(),
            joiners=candidates if self._group.is_first else (),
        )

    def _step(self) -> Commit | Retry | Shrink:
        before = self._state
        # Whoever joined with the last commit would find nothing to do.
        last = before.step + 1 == self._config.steps
        vote = self._vote(() if last else self._outside.candidates)
        outcome = self._stepper.attempt(before, vote, self._failure)
        self._state = outcome.state
        if isinstance(outcome.verdict, Commit):
            self._failures_in_a_row = 0
            self._failure = ""
            self._committed(before, outcome.metrics)
        elif isinstance(outcome.verdict, Retry):
            self._retry(outcome.verdict, outcome.failure)
        return outcome.verdict

    def _retry(self, verdict: Retry, failure: str) -> None:
        """Somebody's code raised. The same step again, until the budget of one of them is spent."""
        self._failure = ""
        if not failure:
            return
        self._failures_in_a_row += 1
        spent = self._failures_in_a_row >= self._config.faults.max_step_failures
        everywhere = len(verdict.failed) == len(self._group.view.members)
        self._outside.failed(self._state.step, spent, False, failure)
        if spent and everywhere:
            raise UserCodeError(failure)
        if spent:
            raise OwnCodeFails(failure)

    def _committed(self, before: TrainState, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        sampler = self._recipe.batches.sampler
        spans = sampler.spans(before.samples, self._state.samples - before.samples)
        record: dict[str, Any] = {
            "step": self._state.step,
            "samples": self._state.samples,
            "first_sample": before.samples,
            "num_samples": self._state.samples - before.samples,
            "passes": [list(span) for span in spans],
            "pass_size": sampler.num_samples,
            **metrics,
            "learning_rate": self._local.learning_rate(before.step),
            "workers": sorted(member.slot for member in self._group.view.members),
            "epoch": self._group.view.epoch,
            "step_time_s": now - self._last_commit,
            "time": time.time(),
        }
        if self._recovered is not None:
            record["recovered"] = self._recovered
            self._recovered = None
        self._last_commit = now
        self._metrics = {**self._metrics, **metrics}
        self._record = record
        self._failure = self._trainer._step_committed(self._state.step, self._state.samples, metrics)

    def _send_record(self) -> None:
        """Every member keeps the record until it is known to be on disk; the first one sends it."""
        if self._record is not None:
            urgent = "recovered" in self._record or "evaluation" in self._record
            self._outside.record(self._record, flush=urgent, send=self._group.is_first)
            self._record = None

    def _evaluate_if_due(self) -> None:
        """Evaluates the step just committed, so that its record can tell."""
        every, evaluator = self._config.eval_every, self._recipe.evaluator
        step = self._state.step
        due = step >= self._config.steps or (every > 0 and step % every == 0)
        if evaluator is None or not due or self._record is None:
            return
        while True:
            self._phase("evaluate")
            verdict, means, failure = evaluator.attempt(self._group, self._state)
            if isinstance(verdict, Commit):
                break
            if isinstance(verdict, Retry):
                self._retry(verdict, failure)
            self._follow(verdict)
        self._failures_in_a_row = 0
        self._last_commit = time.monotonic()
        self._metrics = {**self._metrics, **{f"eval_{name}": value for name, value in means.items()}}
        self._record["evaluation"] = means

    def _phase(self, name: str) -> None:
        self._outside.phase(name, self._state.step)
