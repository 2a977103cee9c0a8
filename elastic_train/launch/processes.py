"""The worker processes of one agent: starting them, learning of their end at once, and ending them.

Each worker leads a session of its own, so that whatever it starts can be ended with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from elastic_train.launch.stacks import DUMP_SIGNAL, user_frame
from elastic_train.launch.tracebacks import first_traceback
from elastic_train.membership.group import Identity

KILL_LIMIT_S = 60.0
"""How long a process may take to go after SIGKILL. On a GPU with work in flight it takes some 0.3 s."""

DUMP_LIMIT_S = 3.0
"""How long a worker may take to dump its stacks and end by that, before it gets SIGKILL."""

WAIT_STEP_S = 0.02
"""How often is looked whether workers that end by themselves have done so."""

MAX_DUMP_BYTES = 1 << 20
"""How much of a dump is looked at."""

StartCallback = Callable[[Identity, int, bool], None]


class Exit(NamedTuple):
    """The end of a worker process.

    Attributes:
      exit_code: negative for a signal.
      traceback: the first one in its log, "" if there is none.
      ended: seconds since the Unix epoch.
      stuck_at: the user's innermost frame, if its stacks were dumped and show one.
    """

    exit_code: int
    traceback: str
    ended: float
    stuck_at: str = ""


ExitCallback = Callable[[Identity, Exit], None]


class WorkerProcesses:
    """Worker processes, by identity.

    `start` must be called from a thread that lives as long as the workers shall: workers ask the kernel to be
    killed when their parent dies (`PR_SET_PDEATHSIG`), and for the kernel that is the *thread* that forked.

    Args:
      command: what a worker is started with.
      log_dir: gets `SLOT-INCARNATION.log` for every start.
      on_start: called with (identity, process id, whether it was held ready), before `on_exit` of the same worker can
        be.
      on_exit: called with (identity, its end) from the thread that waited for this worker, once it is gone and the
        rest of its group has been sent SIGKILL.
    """

    def __init__(self, command: Sequence[str], log_dir: Path, on_start: StartCallback, on_exit: ExitCallback) -> None:
        self._command = list(command)
        self._log_dir = log_dir
        self._on_start = on_start
        self._on_exit = on_exit
        self._lock = threading.Lock()
        self._running: dict[Identity, subprocess.Popen[bytes]] = {}
        self._waiters: dict[Identity, threading.Thread] = {}
        self._dumps: dict[Identity, int] = {}  # where in the log a dump begins

    def start(self, identity: Identity, environment: Mapping[str, str], descriptors: Sequence[int] = ()) -> None:
        """Starts a worker that inherits `descriptors`. Raises OSError if that fails; no callback is called then."""
        with self.log(identity).open("ab") as output:
            process = start_process(self._command, environment, output.fileno(), descriptors)
        self._add(identity, process, warm=False)

    def adopt(self, identity: Identity, process: subprocess.Popen[bytes]) -> None:
        """A process that was held ready (`launch.spares`) is this worker now."""
        self._add(identity, process, warm=True)

    def _add(self, identity: Identity, process: subprocess.Popen[bytes], *, warm: bool) -> None:
        name = f"wait-{self.log(identity).stem}"
        waiter = threading.Thread(target=self._wait, args=(identity, process), name=name, daemon=True)
        with self._lock:
            self._running[identity] = process
            self._waiters[identity] = waiter
        self._on_start(identity, process.pid, warm)
        waiter.start()

    def log(self, identity: Identity) -> Path:
        """Where a worker's output goes."""
        return self._log_dir / f"{identity.slot}-{identity.incarnation}.log"

    def kill(self, identity: Identity) -> None:
        """Sends SIGKILL to the worker and all processes of its group. Does nothing if it is gone."""
        with self._lock:
            if identity in self._running:
                kill_group(self._running[identity].pid)

    def signal(self, identity: Identity, number: signal.Signals) -> bool:
        """Sends a signal to one worker, not to the processes it has started. Returns whether it was there."""
        with self._lock:
            if identity not in self._running:
                return False
            os.kill(self._running[identity].pid, number)
            return True

    def dump_and_kill(self, identity: Identity) -> None:
        """Has the worker dump the stacks of all its Python threads to its log, by which it ends, and kills it if it
        has not done so within `DUMP_LIMIT_S`. Returns at once. Does nothing if it is gone."""
        with self._lock:
            if identity not in self._running:
                return
            self._dumps[identity] = self._log_size(identity)
            os.kill(self._running[identity].pid, DUMP_SIGNAL)
        limit = threading.Timer(DUMP_LIMIT_S, self.kill, (identity,))
        limit.daemon = True
        limit.start()

    def forward(self, number: signal.Signals) -> None:
        """Sends a signal to every worker, not to the processes it has started."""
        with self._lock:
            for process in self._running.values():
                os.kill(process.pid, number)  # running, or a zombie that is not reaped: the id is ours

    def wait_all(self, limit_s: float, hurry: threading.Event) -> bool:
        """Waits until every worker has ended by itself; False if one has not within `limit_s`, or `hurry` is set."""
        deadline = time.monotonic() + limit_s
        while True:
            with self._lock:
                if not self._waiters:
                    return True
            left_s = deadline - time.monotonic()
            if left_s <= 0 or hurry.wait(min(left_s, WAIT_STEP_S)):
                return False

    def kill_all(self) -> None:
        """Ends every worker and waits until all are reaped and their exits reported.

        Raises:
          TimeoutError: a process is still there `KILL_LIMIT_S` after SIGKILL.
        """
        with self._lock:
            waiters = dict(self._waiters)
            for process in self._running.values():
                kill_group(process.pid)
        deadline = time.monotonic() + KILL_LIMIT_S
        for identity, waiter in waiters.items():
            waiter.join(max(0.0, deadline - time.monotonic()))
            if waiter.is_alive():
                raise TimeoutError(
                    f"the worker of slot {identity.slot} is still there {KILL_LIMIT_S:.0f} s after SIGKILL. "
                    "It hangs in the kernel: a driver or a file system does not answer. `ps` shows its state."
                )

    def _wait(self, identity: Identity, process: subprocess.Popen[bytes]) -> None:
        # WNOWAIT leaves a zombie, so that the process id, which names the group too, is not given to another
        # process before the group is killed and nobody can send a signal to it any more.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        ended = time.time()
        with self._lock:
            kill_group(process.pid)
            exit_code = process.wait()
            del self._running[identity]
        try:
            found = first_traceback(self.log(identity))
        except OSError:  # removed, or the disk fails: that the worker is gone matters more
            found = ""
        self._on_exit(identity, Exit(exit_code, found, ended, self._stuck_at(identity)))
        with self._lock:
            del self._waiters[identity]

    def _log_size(self, identity: Identity) -> int:
        try:
            return self.log(identity).stat().st_size
        except OSError:  # removed; the dump, if any, is lost
            return 0

    def _stuck_at(self, identity: Identity) -> str:
        with self._lock:
            begin = self._dumps.pop(identity, None)
        if begin is None:
            return ""
        try:
            with self.log(identity).open("rb") as log:
                log.seek(begin)
                return user_frame(log.read(MAX_DUMP_BYTES).decode(errors="replace"))
        except OSError:
            return ""


def start_process(
    command: Sequence[str], environment: Mapping[str, str], output: int, descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Starts a process that leads a session of its own, writes to `output`, and inherits `descriptors`."""
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
        pass_fds=descriptors,
    )


def kill_group(leader: int) -> None:
    """Sends SIGKILL to all processes of the group, if any is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
