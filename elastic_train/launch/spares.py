"""Processes that an agent holds ready, each to become the next worker of this host that must be started.

A spare has imported what is slow: jax, this package and the recipe. It has no device, no slot, and no connection but
the channel to its agent, a pair of sockets that nobody else has. Through it the agent tells it which worker it is, and
the spare answers whether it can be that one (`launch.spare`). Workers of such an agent have a channel, too, and say
there that they are ready: spares are started when no worker of this host is on its way.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import selectors
import socket
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from elastic_train.launch.channel import OUTPUT, TAKEN, channel, receive, send
from elastic_train.launch.environment import CHANNEL_VARIABLE, fixed_differences, told_later
from elastic_train.launch.processes import KILL_LIMIT_S, kill_group, start_process

REST_S = 3.0
"""How long after the last worker became ready the next spare is started: that worker is being admitted and healed."""

IMPORT_LIMIT_S = 300.0
"""How long a spare may import; then it is killed, and counts as one that has failed."""

ANSWER_LIMIT_S = 5.0
"""How long a spare that is told which worker it is may take to answer; then it is killed, and the worker started."""

EXIT_LIMIT_S = 1.0
"""How long a spare that has closed its channel may take to exit, so that its exit code is known; then it is killed."""

FIRST_BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0
"""The wait before a spare that died is replaced; each further one in a row doubles."""

LOG = "spares.log"
"""In the directory of the workers' logs: what became of each spare, and what those wrote that became no worker."""


@dataclass(eq=False)
class _Spare:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    output: int  # memory with what it has written so far
    began: float
    imported: bool = False


class _Worker(NamedTuple):
    """A worker that is not ready yet."""

    channel: socket.socket


class _Wanted(NamedTuple):
    """A worker that must be started."""

    environment: Mapping[str, str]
    descriptors: Mapping[str, int]
    log: Path
    answer: Future[subprocess.Popen[bytes] | None]


class Spares:
    """Holds processes ready, and hands them out. One thread does all there is to do.

    That thread is the parent of the processes, for the kernel, also of those that have become workers, and they end
    with it: close this when the workers are gone.

    Args:
      number: how many.
      command: what a worker is started with.
      environment: of a process that is not a worker yet, see `environment.spare_environment`.
      log_dir: gets `LOG`.
      on_note: shows a line to the person who watches.
    """

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_dir: Path,
        on_note: Callable[[str], None] = print,
    ) -> None:
        self._number = number
        self._command = list(command)
        self._environment = dict(environment)
        self._log_dir = log_dir
        self._on_note = on_note
        self._orders: queue.SimpleQueue[_Wanted | _Worker] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="spares", daemon=True)
        # What follows belongs to the thread.
        self._selector = selectors.DefaultSelector()
        self._spares: list[_Spare] = []
        self._starting: set[_Worker] = set()
        self._due = math.inf  # until a first worker is ready: it and its like must not wait for a spare's imports
        self._num_failures = 0

    def start(self) -> None:
        """Begins to watch for workers that become ready."""
        self._thread.start()

    def watch(self) -> socket.socket:
        """A worker's end of a channel, which it must inherit; no spare is started before it is ready, or gone."""
        ours, theirs = channel()
        self._order(_Worker(ours))
        return theirs

    def take(
        self, environment: Mapping[str, str], descriptors: Mapping[str, int], log: Path
    ) -> subprocess.Popen[bytes] | None:
        """Makes a spare a worker; None if there is none that can be this one.

        Args:
          environment: of the worker.
          descriptors: files that it needs, by the variable in which it looks for their number.
          log: where its output goes from now on.
        """
        answer: Future[subprocess.Popen[bytes] | None] = Future()
        self._order(_Wanted(environment, descriptors, log, answer))
        return answer.result((self._number + 1) * (ANSWER_LIMIT_S + KILL_LIMIT_S))

    def close(self) -> None:
        """Ends every spare. Workers that were spares must be gone."""
        self._closing.set()
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"\0")
        if self._thread.is_alive():
            self._thread.join((self._number + 1) * KILL_LIMIT_S)
        for end in (self._wake, self._woken):
            end.close()

    def _order(self, order: _Wanted | _Worker) -> None:
        self._orders.put(order)
        with contextlib.suppress(BlockingIOError):  # it has been woken often enough
            self._wake.send(b"\0")

    # The thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        self._selector.register(self._woken, selectors.EVENT_READ, self._obey)
        try:
            while not self._closing.is_set():
                self._start_if_due()
                for key, _ in self._selector.select(self._pause_s()):
                    key.data()
                self._kill_slow()
        except Exception:
            # Workers that were spares end with this thread, so it stays. Others are started without one.
            self._number = 0
            self._on_note(f"no process is held ready any more (faults.warm_spares):\n{traceback.format_exc()}")
            while not self._closing.wait(ANSWER_LIMIT_S / 2):
                self._refuse_all()
        finally:
            for spare in tuple(self._spares):
                self._end(spare)
            self._refuse_all()
            for worker in self._starting:
                worker.channel.close()
            self._selector.close()

    def _pause_s(self) -> float | None:
        """How long nothing is to do unless somebody says something."""
        ends = [spare.began + IMPORT_LIMIT_S for spare in self._spares if not spare.imported]
        if self._may_start():
            ends.append(self._due)
        end = min(ends, default=math.inf)
        return None if end == math.inf else max(0.0, end - time.monotonic())

    def _may_start(self) -> bool:
        """Whether one is missing and nothing else imports now."""
        importing = any(not spare.imported for spare in self._spares)
        return len(self._spares) < self._number and not importing and not self._starting

    def _start_if_due(self) -> None:
        if not self._may_start() or time.monotonic() < self._due:
            return
        ours, theirs = channel()
        output = os.memfd_create("output-of-a-spare")
        try:
            with theirs:
                environment = {**self._environment, CHANNEL_VARIABLE: str(theirs.fileno())}
                process = start_process(self._command, environment, output, [theirs.fileno()])
        except OSError as error:
            ours.close()
            os.close(output)
            self._failed(f"could not be started ({error})")
            return
        spare = _Spare(process, ours, output, time.monotonic())
        self._spares.append(spare)
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._heard_spare(spare))

    def _obey(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(1 << 12)
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            if isinstance(order, _Worker):
                self._watch(order)
            elif order.answer.set_running_or_notify_cancel():
                process = None
                try:
                    process = self._hand_over(order)
                finally:  # whatever goes wrong here, a worker waits to be started
                    order.answer.set_result(process)

    def _refuse_all(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                order = self._orders.get_nowait()
                if isinstance(order, _Worker):
                    order.channel.close()
                elif order.answer.set_running_or_notify_cancel():
                    order.answer.set_result(None)

    # Workers that are on their way.

    def _watch(self, worker: _Worker) -> None:
        self._starting.add(worker)
        self._selector.register(worker.channel, selectors.EVENT_READ, lambda: self._heard_worker(worker))

    def _heard_worker(self, worker: _Worker) -> None:
        """It is ready, or gone."""
        try:
            message, _ = receive(worker.channel)
        except OSError:  # it was killed before it had read something
            message = None
        self._selector.unregister(worker.channel)
        worker.channel.close()
        self._starting.remove(worker)
        if message is not None:
            rested = time.monotonic() + REST_S
            self._due = rested if self._due == math.inf else max(self._due, rested)

    # Spares.

    def _heard_spare(self, spare: _Spare) -> None:
        if spare not in self._spares:  # it ended, or was handed out, while this was about to be looked at
            return
        try:
            message, _ = receive(spare.channel)
        except OSError:
            message = None
        if message is not None:  # it has imported everything
            spare.imported, self._num_failures = True, 0
            self._write(spare, f"has imported everything, in {time.monotonic() - spare.began:.1f} s")
            return
        doing = "while it waited" if spare.imported else "while it imported"
        self._failed(f"has ended {doing}: {self._end(spare, EXIT_LIMIT_S)}")

    def _kill_slow(self) -> None:
        for spare in tuple(self._spares):
            if not spare.imported and time.monotonic() > spare.began + IMPORT_LIMIT_S:
                self._end(spare)
                self._failed(f"was killed: it had not imported everything within {IMPORT_LIMIT_S:g} s")

    def _failed(self, how: str) -> None:
        pause_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**self._num_failures)
        self._num_failures += 1
        self._due = max(self._due, time.monotonic() + pause_s)
        if self._num_failures == 1:
            self._on_note(
                f"a process held ready for a worker (faults.warm_spares) {how}. What it wrote is in "
                f"{self._log_dir / LOG}. Workers start without it; another one is started in {pause_s:g} s."
            )

    def _hand_over(self, wanted: _Wanted) -> subprocess.Popen[bytes] | None:
        for spare in [spare for spare in self._spares if spare.imported]:
            try:
                with wanted.log.open("ab") as output:
                    refusal = self._offer(spare, wanted, output.fileno())
            except OSError:  # the worker's log cannot be written: no fault of this process
                return None
            if not refusal:
                self._write(spare, f"is the worker {wanted.log.stem} now")
                self._forget(spare)
                os.close(spare.output)
                self._watch(_Worker(spare.channel))
                return spare.process
            self._write(spare, f"is not used: {refusal}")
            self._end(spare)
            self._on_note(f"the process held ready for a worker is not used: {refusal}. The worker is started anew.")
        self._due = max(self._due, time.monotonic() + REST_S)  # it is about to be
        return None

    def _offer(self, spare: _Spare, wanted: _Wanted, output: int) -> str:
        """Tells `spare` which worker it is. Returns why it cannot be that one."""
        if different := fixed_differences(self._environment, wanted.environment):
            return f"it was started with other values of {', '.join(different)}"
        names = [OUTPUT, *wanted.descriptors]
        told = {"environment": told_later(wanted.environment), "descriptors": names}
        spare.channel.settimeout(ANSWER_LIMIT_S)
        try:
            send(spare.channel, told, [output, *wanted.descriptors.values()])
            answer, _ = receive(spare.channel)
        except TimeoutError:
            return f"it did not answer within {ANSWER_LIMIT_S:g} s"
        except OSError as error:
            return f"its channel broke ({error})"
        if answer is None:
            return "it has just ended"
        return "" if answer["say"] == TAKEN else answer["reason"]

    def _forget(self, spare: _Spare) -> None:
        self._spares.remove(spare)
        self._selector.unregister(spare.channel)

    def _end(self, spare: _Spare, patience_s: float = 0.0) -> str:
        """Kills it, if it does not end by itself within `patience_s`, and keeps what it wrote. Returns how it ended."""
        self._forget(spare)
        spare.channel.close()
        # While it is not reaped, its id is nobody else's.
        limit = time.monotonic() + patience_s
        while not os.waitid(os.P_PID, spare.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
            if time.monotonic() >= limit:
                break
            time.sleep(0.01)
        kill_group(spare.process.pid)
        exit_code = spare.process.wait(KILL_LIMIT_S)
        ended = f"signal {-exit_code}" if exit_code < 0 else f"exit code {exit_code}"
        written = os.pread(spare.output, os.fstat(spare.output).st_size, 0)
        os.close(spare.output)
        self._write(spare, f"has ended with {ended}", written)
        return ended

    def _write(self, spare: _Spare, what: str, written: bytes = b"") -> None:
        moment = time.strftime("%Y-%m-%d %H:%M:%S")
        with contextlib.suppress(OSError), (self._log_dir / LOG).open("ab") as log:  # a full disk stops no worker
            log.write(f"{moment} process {spare.process.pid} {what}\n".encode() + written)
