"""The coordinator in a process of its own, and the end of it that `run` holds.

A crash of JAX's service then takes nothing with it but what can be started again: the agent and the workers' states
stay. The two processes exchange lines of JSON: orders one way; what is to be shown, and how it ends, the other way.
"""

import os
import sys

from elastic_train.launch.bond import die_with_parent

if __name__ == "__main__":
    # Before anything slow: a command that dies while this process imports must not leave it behind.
    die_with_parent(int(sys.argv[1]))

import contextlib
import dataclasses
import json
import queue
import signal
import subprocess
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXIT_NEXT = 79
"""Exit code of a coordinator that has made room for the next generation on purpose."""

TELL_INTERVAL_S = 0.1
"""How often the state of the job is told, and orders are looked for."""

LAST_WORD_LIMIT_S = 10.0
"""How long the summary waits for what the command has to say of the faults that it has injected."""

OTHER_HOSTS_LIMIT_S = 30.0
"""How long the agents of other hosts may take to end their workers after the end of the job."""

CLOSE_LIMIT_S = OTHER_HOSTS_LIMIT_S + 10.0
"""How long this process may take to end after the job; then it is killed."""

NODES_PER_SLOT, FEWEST_PER_SLOT, MANY_NODES = 32, 4, 512
"""JAX's service is sized for so many starts of each slot, at least 255 in all. Above `MANY_NODES`, which take a second
to register while eight times as many take thirty, it is sized for a few starts of each: see `faults.node_ids`."""


def node_ids(workers: int) -> int:
    """How many starts of workers a generation of a job has room for."""
    return max(255, min(NODES_PER_SLOT * workers, MANY_NODES), FEWEST_PER_SLOT * workers)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a coordinator is told, as JSON values.

    Attributes:
      run_dir, recipe, trainer, config_toml, steps, log_every, tensorboard, faults: as in `launch.check.Checked`.
      platform: on what the workers of this host compute, "cpu" or "cuda"; empty if it has none.
      workers, min_workers, max_workers: of the job; `max_workers` is 0 if there is no limit.
      workers_asked: what the command line said; the job may have been resized since.
      alone: whether this host fills no slots.
      chaos: whether the command injects faults; then it has the last word on them before the summary.
      resume: `checkpoint.resume.Resume` as a dictionary; None for a new run.
      continues: the run's last coordinator died, and the job goes on.
      lost: how that ended: `exit_code`, and `time` in Unix seconds; empty if it ended on purpose.
      stop_wanted: why the members shall stop; empty if nobody has asked.
      has_checkpoints: the run goes on from one.
      bind, host, secret, tls, jax_tls: as for `service.Endpoint`; `tls` is a dictionary.
      versions: of Python packages.
      pid: of the command.
    """

    run_dir: str
    recipe: str
    trainer: str
    platform: str
    config_toml: str
    steps: int
    log_every: int
    tensorboard: bool
    faults: dict[str, Any]
    workers: int
    min_workers: int
    max_workers: int
    workers_asked: int
    alone: bool
    chaos: bool
    resume: dict[str, Any] | None
    continues: bool
    lost: dict[str, Any]
    stop_wanted: str
    has_checkpoints: bool
    bind: str
    host: str
    secret: str
    tls: dict[str, str]
    jax_tls: bool
    versions: dict[str, str]
    pid: int


class CoordinatorProcess:
    """The command's end. It is started early, since it imports for a second; `begin` gives it its task.

    Call it from one thread that lives as long as the process shall: the kernel ends it with that thread.
    """

    def __init__(self) -> None:
        command = [sys.executable, "-m", "elastic_train.launch.coordinator_process", str(os.getpid())]
        # A group of its own: Ctrl-C at a terminal is for the command, which knows what it means.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
            # XLA reports every tombstone and every start below errors.
            env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ},
            text=True,
            encoding="utf-8",
        )
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="coordinator-messages", daemon=True)
        self._reader.start()

    def begin(self, task: Task) -> None:
        """Has it do its task."""
        self.order(dataclasses.asdict(task))

    def order(self, order: Mapping[str, Any]) -> None:
        """Gives an order: `{"stop": {"now", "reason"}}`, `{"event": [name, fields]}`,
        `{"finish": True}` or `{"close": True}`."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is gone: whoever reads its messages finds out
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def messages(self) -> list[dict[str, Any] | None]:
        """What has come since the last call. None, as the last one, says that the process is gone."""
        found = []
        with contextlib.suppress(queue.Empty):
            while True:
                found.append(self._messages.get_nowait())
        return found

    def kill(self) -> int:
        """Ends it at once; returns the exit code. Its last messages can still be read."""
        self._process.kill()
        exit_code = self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # an order that was not read
                pipe.close()
        return exit_code

    def close(self) -> None:
        """Has it end after the job; kills it if it takes too long."""
        self.order({"close": True})
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_LIMIT_S)
        self.kill()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):  # cut off by its death
                self._messages.put(json.loads(line))
        self._messages.put(None)


# The process itself ---------------------------------------------------------------------------------------


class _Messages:
    """Tells the command; never blocks, even if that one is stopped."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="messages", daemon=True)
        self._thread.start()
        self._record: dict[str, Any] = {}
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        self._queue.put(json.dumps(message))

    def note(self, text: str) -> None:
        self.send(note=text)

    def record(self, record: Mapping[str, Any]) -> None:
        """To be shown with the next `show`; only the newest is."""
        with self._lock:
            self._record |= record

    def show(self, **status: Any) -> None:
        with self._lock:
            record, self._record = self._record, {}
        self.send(show={**record, **status})

    def close(self) -> None:
        """Returns when all is written."""
        self._queue.put(None)
        self._thread.join(TELL_INTERVAL_S * 50)

    def _write(self) -> None:
        while (text := self._queue.get()) is not None:
            try:
                self._file.write(text + "\n")
                self._file.flush()
            except OSError:
                return  # the command is gone, and this process ends with it


def _read_orders(orders: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        orders.put(json.loads(line))
    orders.put({"close": True})


def main() -> None:
    """Waits for a task, and serves one job. argv: the command's process id."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the command hands on what they mean
    messages = _Messages(os.dup(1))
    os.dup2(2, 1)  # what libraries print is no message
    from elastic_train.errors import ElasticTrainError
    from elastic_train.launch import coordinating  # takes a second; the task comes later than that
    from elastic_train.terminal import say

    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_orders, args=(orders,), name="orders", daemon=True).start()
    first = orders.get()
    if "close" not in first:
        try:
            coordinating.serve(Task(**first), messages, orders)
        except ElasticTrainError as error:
            messages.send(refused={"message": str(error), "exit_code": error.exit_code})
        except Exception as error:
            say(traceback.format_exc(), sys.stderr)
            messages.send(refused={"message": f"the coordinator failed: {error!r}", "exit_code": 1})
    messages.close()


if __name__ == "__main__":
    main()
