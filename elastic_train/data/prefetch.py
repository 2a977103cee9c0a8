"""Reading ahead: one background thread reads the shards of the next steps while the device computes this one.

What is read ahead is a guess, and nothing depends on it. A result is kept under (first sample, shard), which says
all that a shard's content depends on; whoever asks for that key gets it, at a retry or after a change of the
members too, and what was not read yet is read when it is asked for.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from elastic_train.data.source import DataError
from elastic_train.terminal import say

Result = TypeVar("Result")
Shard = tuple[Mapping[str, np.ndarray], np.ndarray]
"""Samples of one shard, and their weights."""

Key = tuple[int, int]
"""(samples consumed before the step, shard)."""

REPORT_S = 30.0
"""How often a wait for data says what it waits for."""

CLOSE_LIMIT_S = 10.0
"""How long `close` waits for a read that has begun."""


class _Outcome(NamedTuple):
    value: Any
    error: Exception | None


class _Request(NamedTuple):
    key: Hashable
    work: Callable[[], Any]


class Prefetcher:
    """Reads shards ahead. One thread at a time calls it; all reads happen in one thread of its own.

    So a data source need not be thread-safe, as long as everything that touches it goes through here: shards
    through `get`, anything else through `call`.

    Args:
      read: gives the shard for a key.
      depth: how many steps to read ahead. At most the shards of `depth + 1` steps are held: the current one's,
        as far as they were not fetched yet, and the next ones'. With 0 there is no thread, and all reads
        happen in `get` itself.
      describe: the samples of a key, in words, for messages.
    """

    def __init__(
        self,
        read: Callable[[int, int], Shard],
        depth: int,
        describe: Callable[[int, int], str] = lambda samples, shard: f"shard {shard} of the batch at {samples}",
    ) -> None:
        if depth < 0:
            raise ValueError(f"depth = {depth}: must be 0 or positive")
        self._read, self._depth, self._describe = read, depth, describe
        # Guards all below. The reader waits for work, the caller for results; each wakes the other.
        self._changed = threading.Condition()
        self._expected: dict[Key, None] = {}  # in the order in which they will be needed
        self._outcomes: dict[Hashable, _Outcome] = {}
        self._request: _Request | None = None  # what the caller is waiting for
        self._reading: Hashable | None = None
        self._closed = False
        self._has_said_unrefined = False
        self._thread: threading.Thread | None = None
        if depth > 0:
            self._thread = threading.Thread(target=self._run, name="data-reader", daemon=True)
            self._thread.start()

    # For the caller.

    def expect(self, steps: Iterable[tuple[int, Iterable[int]]]) -> None:
        """Says what will be asked for, in that order, in place of all that was said before.

        What was read and is expected no longer is dropped, errors included.

        Args:
          steps: (samples consumed before the step, this member's shards), the current step first. Those beyond
            `depth` steps after the first are left out.
        """
        if self._thread is None:
            return
        keys = [(samples, shard) for samples, run in list(steps)[: self._depth + 1] for shard in run]
        with self._changed:
            self._expected = dict.fromkeys(keys)
            for key in [key for key in self._outcomes if key not in self._expected]:
                del self._outcomes[key]
            self._changed.notify_all()

    def get(self, samples: int, shard: int) -> Shard:
        """One shard, as soon as it has been read. It is not held here any longer then.

        Raises what reading it raised. The next call for the same shard reads again, and so do calls for other
        shards whose reading ahead has failed before now: what was wrong may be over.
        """
        return self._take((samples, shard), partial(self._read, samples, shard))

    def refine(self, samples: int, shard: int, work: Callable[[Shard], Any]) -> None:
        """Has `get` give what `work` makes of a shard, if that has been read by now and not been asked for yet.

        What `work` raises is said on stderr, the first time: `get` then gives what was read, so that whoever asked does
        the work in time and meets what is wrong with it, or loses nothing but the time that was to be saved.
        """
        key = samples, shard
        with self._changed:
            outcome = self._outcomes.get(key)
        if outcome is None or outcome.error is not None:
            return
        try:
            refined = _Outcome(work(outcome.value), None)
        except Exception as error:
            if not self._has_said_unrefined:
                self._has_said_unrefined = True
                self._say(f"cannot prepare ahead {self._describe(samples, shard)}; it is done in the step: {error!r}")
            return
        with self._changed:
            if self._outcomes.get(key) is outcome:
                self._outcomes[key] = refined

    def call(self, work: Callable[[], Result]) -> Result:
        """The result of anything else that touches the data sources, done between two reads."""
        return self._take(object(), work)

    def close(self) -> None:
        """Ends the thread, after the read that it is in; without waiting longer than `CLOSE_LIMIT_S` for that."""
        with self._changed:
            self._closed = True
            self._expected.clear()
            self._outcomes.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)

    @property
    def num_held(self) -> int:
        """How many shards have been read and not been asked for yet."""
        with self._changed:
            return len(self._outcomes)

    def _take(self, key: Hashable, work: Callable[[], Any]) -> Any:
        # Without a thread, Ctrl-C arrives here, and is meant for us.
        outcome = _attempt(work, KeyboardInterrupt) if self._thread is None else self._await(_Request(key, work))
        if outcome.error is not None:
            try:
                raise outcome.error
            finally:
                del outcome  # an error that knows this frame, which knows the error, would stay in memory
        return outcome.value

    def _await(self, request: _Request) -> _Outcome:
        assert self._thread is not None
        started = time.monotonic()
        report_at = started + REPORT_S
        with self._changed:
            self._request = request
            self._changed.notify_all()
            try:
                while request.key not in self._outcomes:
                    if self._closed or not self._thread.is_alive():
                        raise RuntimeError("the thread that reads data has ended; this prefetcher cannot be used again")
                    self._changed.wait(max(0.0, report_at - time.monotonic()))
                    if time.monotonic() >= report_at:
                        report_at += REPORT_S
                        self._report(request.key, time.monotonic() - started)
                outcome = self._outcomes.pop(request.key)
                if outcome.error is not None:
                    # Otherwise a source that was away for a second would fail as many attempts as reads.
                    self._outcomes = {key: other for key, other in self._outcomes.items() if other.error is None}
                    self._changed.notify_all()
                if isinstance(request.key, tuple):
                    self._expected.pop(request.key, None)
                return outcome
            finally:
                self._request = None

    def _report(self, key: Hashable, waited_s: float) -> None:
        other = "" if self._reading == key else f"; the data source is still busy with {self._name(self._reading)}"
        self._say(f"waiting for data for {waited_s:.0f} s: {self._name(key)}{other}")

    @staticmethod
    def _say(text: str) -> None:
        say(f"elastic_train: {text}", sys.stderr)

    def _name(self, key: Hashable) -> str:
        return self._describe(*key) if isinstance(key, tuple) else "evaluation or opening"

    # The reader's thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                while (request := self._next()) is None and not self._closed:
                    self._changed.wait()  # ends at the latest in `close`, or with the process: a daemon thread
                if request is None or self._closed:
                    return
                self._reading = request.key
            outcome = _attempt(request.work)
            with self._changed:
                self._reading = None
                awaited = self._request is not None and self._request.key == request.key
                if not self._closed and (awaited or request.key in self._expected):
                    self._outcomes[request.key] = outcome
                self._changed.notify_all()
            del outcome, request  # while this thread waits, it must not hold a shard

    def _next(self) -> _Request | None:
        """What the caller waits for comes first, then what will be needed soonest."""
        if self._request is not None and self._request.key not in self._outcomes:
            return self._request
        for key in self._expected:
            if key not in self._outcomes:
                return _Request(key, partial(self._read, *key))
        return None


def _attempt(work: Callable[[], Any], passes: type[BaseException] | tuple[()] = ()) -> _Outcome:
    """Does the work. What would end the thread becomes an ordinary error, but for what `passes`."""
    try:
        return _Outcome(work(), None)
    except passes:
        raise
    except Exception as error:
        return _Outcome(None, error)
    except BaseException as error:
        wrapped = DataError(
            f"the data source tried to exit the process, with {error!r}. "
            "Raise an ordinary exception instead: the step is then tried again"
        )
        wrapped.__cause__ = error
        return _Outcome(None, wrapped)
