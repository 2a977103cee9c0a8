"""When and how one member saves the state while training goes on."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from elastic_train.checkpoint import policy
from elastic_train.checkpoint.manifest import Position, Run
from elastic_train.checkpoint.places import Path
from elastic_train.checkpoint.snapshot import Snapshot
from elastic_train.checkpoint.writing import WriteFailed, Writer, request_for
from elastic_train.config import CheckpointConfig
from elastic_train.state import TrainState

BUSY_LIMIT_S = 60.0
"""How long a step waits for the save before to end. Then its own save is left out: a disk that hangs stops nobody."""

COPY_LIMIT_S = 60.0
"""How long an update waits for the copy of the state that it takes the place of. Then that save has failed."""

LAST_TRIES = 3
"""How often the save at the end is tried."""

_WAIT_S = 1.0


@dataclass(frozen=True)
class Save:
    """How one save ended.

    Attributes:
      step: of the state.
      path: where it is; empty if it failed.
      error: why it failed; empty if it is there.
      num_bytes, seconds: of the whole, from the copy on.
      stall_s: how long training waited for it.
      deleted: steps whose checkpoints it took the place of.
      request: number of the newest request that it answers; 0 for none.
      trouble: what went wrong besides.
      left_out: steps that were due while the save before was being written, and that this one stands for.
      is_last: nothing is saved afterwards: training has ended.
    """

    step: int
    path: str = ""
    error: str = ""
    num_bytes: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0
    deleted: tuple[int, ...] = ()
    request: int = 0
    trouble: str = ""
    left_out: tuple[int, ...] = ()
    is_last: bool = False


class Requests(Protocol):
    """What others want saved, and what they know to be (`coordinator.client.Link`)."""

    @property
    def save_requested(self) -> int:
        """The number of the newest request; 0 for none."""
        ...

    @property
    def saved_step(self) -> int:
        """The newest step that any member has saved."""
        ...

    def phase(self, name: str, step: int) -> None:
        """Told what is waited for."""
        ...

    def noted(self, event: str, show: str, **fields: object) -> None:
        """Told something for the events, and a line for people."""
        ...

    def saved(self, save: Save) -> None:
        """Told how a save ended. Called from another thread."""
        ...

    def wait_last_save(self, step: int, nodes: frozenset[int], timeout: float) -> bool | None:
        """How it stands with the save of this step at the end: True if it has ended, well or not; False if all of
        `nodes` have died before; None if neither has happened within `timeout` seconds."""
        ...


class Saves:
    """One member's part in saving. All members know what is due; the first of them saves it.

    Args:
      root: the checkpoint directory.
      config: the policy.
      run: what is trained.
      last_step: at which training ends.
      limit_s: how long one save may take.
      requests: see there.
      clock: monotonic seconds.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        run: Run,
        last_step: int,
        limit_s: float,
        requests: Requests,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._config, self._run = root, config, run
        self._last_step, self._limit_s, self._requests, self._clock = last_step, limit_s, requests, clock
        self._due_step = self._saved_step = 0
        self._since = self._not_before = clock()
        self._failures = 0
        self._answered = self._voted_for = 0
        self._stall_s = 0.0
        self._writing_step = 0
        self._left_out: list[int] = []
        self._told_of_busy = False
        self._snapshot: Snapshot | None = None
        self._jobs: queue.SimpleQueue[tuple[TrainState, Position, Save] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._copied, self._idle = threading.Event(), threading.Event()
        self._copied.set()
        self._idle.set()

    def begin(self, step: int) -> None:
        """All members begin with the state of `step`: that of a checkpoint, or 0 for what the seed gives."""
        self._due_step = self._saved_step = step

    def warm_up(self, state: TrainState) -> None:
        """Starts, in the background, the process that a save needs. `state` is of the shapes to be saved."""
        if self._thread is None and self._config.keep:
            self._snapshot = Snapshot(state.arrays)
            self._thread = threading.Thread(target=self._serve, args=(self._snapshot,), name="checkpoint", daemon=True)
            self._thread.start()

    def wants(self) -> bool:
        """Whether the first member asks for a save after the coming step, besides those that are due by themselves."""
        if self._config.keep == 0 or not self._idle.is_set():
            return False
        self._voted_for = self._requests.save_requested
        if self._voted_for > self._answered:
            return True
        now = self._clock()
        if now < self._not_before:
            return False
        # Whoever was to save it has failed, or died.
        is_owed = self._due_step > max(self._saved_step, self._requests.saved_step)
        return is_owed or (self._config.every_s > 0 and now - self._since >= self._config.every_s)

    def committed(self, state: TrainState, asked: bool, is_first: bool, position: Callable[[], Position]) -> None:
        """A step counts. If it is due, the first member begins to save it, and returns.

        Args:
          state: after the step.
          asked: the members have agreed that somebody asked.
          is_first: whether this is the first member.
          position: what goes into the manifest.
        """
        if state.step >= self._last_step or not policy.is_due(self._config, state.step, self._last_step, asked):
            return  # the last one is saved by `last`
        request = self._voted_for if asked and is_first else 0
        is_saved = max(self._saved_step, self._requests.saved_step) >= state.step
        if request <= self._answered and (is_saved or (state.step == self._due_step and not asked)):
            self._since = self._clock()
            return  # members that pause commit no step
        self._due_step, self._since = state.step, self._clock()
        if not is_first or (self._clock() < self._not_before and not asked):
            return
        if not self._idle.is_set():
            num_bytes = self._snapshot.num_bytes if self._snapshot else 0
            if not policy.waits(self._config, state.step, num_bytes, asked):
                self._leave_out(state.step)
                return
            self._requests.phase("save", state.step)
        if not self._idle.wait(BUSY_LIMIT_S):
            self._failed()
            self._requests.saved(Save(state.step, error=f"the save before it takes longer than {BUSY_LIMIT_S:g} s"))
            return
        self._stall_s = self._clock() - self._since
        self._start(state, position(), Save(state.step, request=request))

    def _leave_out(self, step: int) -> None:
        """Notes a save that is owed from now on: see `wants`."""
        self._left_out.append(step)
        if not self._told_of_busy:
            self._told_of_busy = True
            self._requests.noted(
                "checkpoint_deferred",
                f"step {step} is not saved: step {self._writing_step} is still being written, and training does not "
                "wait for it (checkpoint.when_busy). The newest state is saved as soon as that has ended; this is not "
                "said again",
                step=step,
                writing_step=self._writing_step,
            )

    def before_update(self) -> None:
        """Call it before the newest state is donated: the copy must have been made."""
        if self._copied.is_set():
            return
        waited = self._clock()
        self._copied.wait(COPY_LIMIT_S)
        self._stall_s += self._clock() - waited

    def last(self, state: TrainState, position: Position, before_me: frozenset[int]) -> None:
        """Saves the state at the end, and waits until that has ended, well or not.

        Args:
          state: the last one.
          position: what goes into the manifest.
          before_me: nodes of the members that come before this one. It saves if all of them have died.
        """
        if self._config.keep == 0 or state.step <= max(self._saved_step, self._requests.saved_step):
            return
        ended = False if not before_me else None
        if before_me:
            self._requests.phase("await_save", state.step)
        while ended is None:  # they end within the limits of a save, or are declared dead
            ended = self._requests.wait_last_save(state.step, before_me, _WAIT_S)
        if ended:
            return
        self._requests.phase("save", state.step)
        for attempt in range(1, LAST_TRIES + 1):
            self._idle.wait()
            request, self._stall_s = self._requests.save_requested, 0.0
            self._start(state, position, Save(state.step, request=request, is_last=attempt == LAST_TRIES))
            self._idle.wait()
            if self._saved_step >= state.step:
                return
            if attempt < LAST_TRIES:
                time.sleep(policy.retry_delay_s(attempt))

    def close(self) -> None:
        """Ends the process that writes."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(5.0)
            self._thread = None

    def _start(self, state: TrainState, position: Position, save: Save) -> None:
        self.warm_up(state)
        save = replace(save, left_out=tuple(self._left_out))
        self._left_out.clear()
        self._writing_step = state.step
        self._answered = max(self._answered, save.request)
        self._copied.clear()
        self._idle.clear()
        self._jobs.put((state, position, save))

    # The thread -----------------------------------------------------------------------------------------------

    def _serve(self, snapshot: Snapshot) -> None:
        writer = Writer(snapshot.descriptor, snapshot.num_bytes, self._limit_s)
        with contextlib.suppress(OSError):  # then the save itself fails, and says so
            writer.start()
        snapshot.touch()
        while (job := self._jobs.get()) is not None:
            state, position, save = job
            del job
            started = self._clock()
            try:
                try:
                    snapshot.copy(state.arrays)
                finally:
                    del state
                    self._copied.set()
                answer = writer.write(request_for(str(self._root), self._config, snapshot.layout, position, self._run))
                save = replace(save, **{**answer, "deleted": tuple(answer["deleted"])})
            except WriteFailed as error:
                save = replace(save, error=str(error))
            except Exception as error:
                save = replace(save, error=f"{type(error).__name__}: {error}")
            self._ended(replace(save, seconds=self._clock() - started, stall_s=self._stall_s))
        writer.close()
        snapshot.close()

    def _ended(self, save: Save) -> None:
        if save.error:
            self._failed()
        else:
            self._failures = 0
            self._saved_step = max(self._saved_step, save.step)
        try:
            self._requests.saved(save)
        except Exception as error:
            print(f"elastic_train: a save could not be reported: {error!r}", file=sys.stderr, flush=True)
        self._idle.set()

    def _failed(self) -> None:
        self._failures += 1
        self._not_before = self._clock() + policy.retry_delay_s(self._failures)
