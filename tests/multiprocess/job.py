"""A real job under test: `elastic-train run` in a process of its own, watched through its run directory.

Waits are for events with a deadline, and say what they waited for. Whatever happens, every process is gone at
the end of the `with` block; whether they went by themselves is part of what is tested (`processes_left`). Then what
the workers wrote at their barriers is checked: every fault test is a test of the barriers, too.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from elastic_train.launch.environment import TRACE_VARIABLE
from elastic_train.telemetry.barriers import format_barriers, verify_barriers
from elastic_train.telemetry.blocks import DIRECTORY

ROOT = Path(__file__).resolve().parents[2]
FAULTY = ROOT / "tests" / "multiprocess" / "recipes" / "faulty.py"
DEADLINE_S = 120.0

UNSAVED = ("--set", "checkpoint.keep=0")
"""For jobs whose checkpoints show nothing: each first one costs a process that imports for seconds."""

KNOWN_STEPS = 300
"""Of how many steps one undisturbed run tells what they come to; few tests take more."""


def plain_run(
    run_dir: Path,
    steps: int,
    *options: str,
    recipe: Path = FAULTY,
    exit_code: int = 0,
    environ: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The summary of an undisturbed run of so many steps in one plain process."""
    command = [sys.executable, str(recipe), "--steps", str(steps), "--run-dir", str(run_dir)]
    command += [*UNSAVED, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **(environ or {})}
    environment.pop("FAULTS", None)
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == exit_code, ended.stderr
    return json.loads((run_dir / "summary.json").read_text())


def undisturbed_after(steps: int) -> dict[str, str]:
    """Digests of parameters and state that `recipes/faulty.py` comes to in so many steps without any fault.

    Its steps do not depend on how many follow, so that one run of one plain process serves all tests of a session.
    """
    return _known_digests()[steps - 1] if steps <= KNOWN_STEPS else _digests_after(steps)[-1]


@functools.cache
def _known_digests() -> list[dict[str, str]]:
    return _digests_after(KNOWN_STEPS)


def _digests_after(steps: int) -> list[dict[str, str]]:
    """Of every step; those of the last one are compared with the run's own."""
    with tempfile.TemporaryDirectory() as directory:
        notes = Path(directory) / "digests.jsonl"
        summary = plain_run(Path(directory) / "run", steps, environ={"NOTE_DIGESTS": str(notes)})
        lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(summary[name] == lines[-1][name] for name in ("step", "params_sha256", "state_sha256"))
    return lines


class Job:
    """Starts `elastic-train run` in the background.

    Args:
      run_dir: of a new run, or of one that goes on.
      recipe, options: the command line.
      faults: what workers of `recipes/faulty.py` do to themselves.
      pace_s: how long its steps take at least.
      command: "run" or "coordinator".
      prefix: what the command is run by, as on a host of `network`.
      environ: variables besides.
      program: how Python is told to run the command.
    """

    def __init__(
        self,
        run_dir: Path,
        recipe: Path | str = FAULTY,
        *options: str,
        workers: int = 3,
        faults: Sequence[dict[str, Any]] = (),
        pace_s: float = 0.0,
        command: str = "run",
        prefix: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        program: Sequence[str] = ("-m", "elastic_train"),
    ) -> None:
        self.run_dir = run_dir
        self._seen: dict[int, psutil.Process] = {}
        line = [*prefix, sys.executable, *program, command, str(recipe), "--workers", str(workers)]
        environment = {**os.environ, "FAULTS": json.dumps(list(faults)), "PYTHONPATH": str(ROOT)}
        environment |= {"PACE_S": str(pace_s), TRACE_VARIABLE: "1", **(environ or {})}
        self._output = open(run_dir.with_suffix(".out"), "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*line, "--run-dir", str(run_dir), *options],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.note_processes()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for process in self._seen.values():
            if process.is_running():
                process.kill()
        self._output.close()
        if kind is None:
            self.check_barriers()

    def check_barriers(self) -> None:
        """Every list that a barrier gave is valid, and all members drew the same conclusions."""
        if any((self.run_dir / DIRECTORY).glob("*.jsonl")):
            report = verify_barriers(self.run_dir)
            assert not report.problems, format_barriers(report)

    # What it has written.

    @property
    def output(self) -> str:
        return self.run_dir.with_suffix(".out").read_text()

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The complete lines of a JSONL file in the run directory."""
        try:
            text = (self.run_dir / name).read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.lines("events.jsonl") if event["event"] == name]

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file in the run directory; empty if it is not there yet."""
        try:
            return json.loads((self.run_dir / name).read_text())
        except FileNotFoundError:
            return {}

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def logs(self) -> str:
        """The ends of all workers' logs, for the message of a test that fails."""
        parts = [f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted((self.run_dir / "logs").glob("*"))]
        return "\n".join([self.output[-3000:], *parts])

    # Waiting.

    def wait_for(self, what: str, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        """Polls until `condition` gives something true, and returns it."""
        end = time.monotonic() + deadline_s
        while not (found := condition()):
            if self.process.poll() is not None and not condition():
                raise AssertionError(f"the job ended while waiting for {what}\n{self.logs()}")
            if time.monotonic() > end:
                raise AssertionError(f"waited {deadline_s:g} s for {what}\n{self.logs()}")
            time.sleep(0.005)
        self.note_processes()
        return found

    def wait_step(self, step: int) -> None:
        self.wait_for(f"step {step}", lambda: any(line["step"] >= step for line in self.lines("ledger.jsonl")))

    def wait_event(self, name: str, count: int = 1, **fields: Any) -> dict[str, Any]:
        """The `count`th event of this name with these fields."""

        def found() -> dict[str, Any] | None:
            matching = [e for e in self.events(name) if all(e.get(key) == value for key, value in fields.items())]
            return matching[count - 1] if len(matching) >= count else None

        return self.wait_for(f"event {name} number {count} with {fields}", found)

    def wait_members(self, *slots: int, deadline_s: float = DEADLINE_S) -> dict[str, Any]:
        """Waits until a step is committed by exactly these slots."""

        def committed() -> dict[str, Any] | None:
            lines = self.lines("ledger.jsonl")
            return lines[-1] if lines and lines[-1]["workers"] == list(slots) else None

        return self.wait_for(f"a step committed by slots {slots}", committed, deadline_s)

    def finish(self, deadline_s: float = DEADLINE_S) -> int:
        """Waits for the end; returns the exit code."""
        end = time.monotonic() + deadline_s
        while True:
            self.note_processes()
            try:
                return self.process.wait(0.1)
            except subprocess.TimeoutExpired:
                if time.monotonic() > end:
                    raise AssertionError(f"the job did not end within {deadline_s:g} s\n{self.logs()}") from None

    # Processes.

    def note_processes(self) -> None:
        """Remembers all descendants, so that none can be forgotten when its parent is gone."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self._seen.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass

    def processes_left(self, deadline_s: float = 10.0) -> list[psutil.Process]:
        """Descendants that are still there; gives them a moment to be reaped."""
        return psutil.wait_procs(list(self._seen.values()), timeout=deadline_s)[1]

    def worker_pid(self, slot: int) -> int:
        """Process id of the newest start of a slot's worker."""
        started = [event for event in self.events("worker_started") if event["slot"] == slot]
        return started[-1]["pid"]

    def kill(self, slot: int, number: int = signal.SIGKILL) -> float:
        """Sends a signal to a slot's worker; returns the time, in seconds since the Unix epoch."""
        pid = self.worker_pid(slot)
        moment = time.time()
        os.kill(pid, number)
        return moment
