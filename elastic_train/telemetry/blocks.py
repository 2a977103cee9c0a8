"""What members write about the barriers they enter and leave, and reading it back.

A worker that is traced appends to `blocks/SLOT-INCARNATION.jsonl` in the run directory. Each line is one write without
a buffer, so that a SIGKILL loses nothing that came before it. Times are those of CLOCK_MONOTONIC, which all processes
of one host share; `clock` names the host's boot, since the clocks of two hosts cannot be compared.

| line | when | fields besides `line` and `time` |
|---|---|---|
| `process` | once, before it can be a member | job, generation, slot, incarnation, node, clock, unix_time, pid |
| `enter` | before the request | epoch, number (of this epoch's barriers, from 0), nodes (asked for) |
| `exit` | after the reply | epoch, number, nodes (the list); null if the service refused |
| `concluded` | when the block that it ends is judged | epoch, number, verdict, step, and `next_epoch`, `next_nodes` |

An epoch's barrier 0 is `live_devices`'s first entry. Each further one is an exit; the entry of the next block sends
nothing, since it takes the list of the exit before.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_train.errors import UsageError
from elastic_train.membership.execution import Enter, Event, Exit, Fail, Process
from elastic_train.membership.group import Identity, View
from elastic_train.membership.semantics import without_fenced
from elastic_train.telemetry.json_files import CHANGED, read_lines
from elastic_train.telemetry.kinds import Kind, of_events
from elastic_train.telemetry.records import is_written

DIRECTORY = "blocks"


# Writing ----------------------------------------------------------------------------------------------------


class BlockTrace:
    """Writes one worker's lines. Used by one thread.

    Args:
      run_dir: the run directory.
      me: this worker.
      secret: the job's; it tells apart what two jobs wrote into one directory. Only a digest of it is written.
      generation: whose node ids these are.

    Raises OSError if the file cannot be written.
    """

    def __init__(self, run_dir: Path, me: Identity, secret: str, generation: int = 0) -> None:
        directory = run_dir / DIRECTORY
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{me.slot}-{me.incarnation}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._view = View(0, ())
        self._number = -1
        job = hashlib.sha256(secret.encode()).hexdigest()[:8]
        about = {"clock": _clock_name(), "unix_time": time.time(), "pid": os.getpid()}
        self._write("process", job=job, generation=generation, **me._asdict(), **about)

    def begin(self, view: View) -> None:
        """The barriers that follow are those of this view."""
        self._view, self._number = view, -1

    def enter(self) -> None:
        """The request is about to be sent."""
        self._number += 1
        self._write("enter", **self._barrier, nodes=self._view.nodes)

    def exit(self, nodes: Collection[int] | None) -> None:
        """The reply has come: the nodes that are live; None if there is none, but an error."""
        self._write("exit", **self._barrier, nodes=None if nodes is None else sorted(nodes))

    def concluded(self, verdict: str, following: View | None, step: int | None) -> None:
        """What this member makes of the block.

        Args:
          verdict: its name.
          following: the next view, if there is one.
          step: the step that a commit would complete, if the block was for one.
        """
        after = {} if following is None else {"next_epoch": following.epoch, "next_nodes": following.nodes}
        self._write("concluded", **self._barrier, verdict=verdict, step=step, **after)

    @property
    def _barrier(self) -> dict[str, int]:
        return {"epoch": self._view.epoch, "number": self._number}

    def _write(self, line: str, **fields: Any) -> None:
        text = json.dumps({"line": line, "time": time.monotonic(), **fields}) + "\n"
        os.write(self._file, text.encode())


def _clock_name() -> str:
    """Equal on all processes that share a monotonic clock: this boot, and this time namespace."""
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    with contextlib.suppress(OSError):  # a kernel without time namespaces
        parts.append(os.readlink("/proc/self/ns/time"))
    return " ".join(parts)


# Reading ----------------------------------------------------------------------------------------------------

_BARRIER = {"epoch": int, "number": int}
_LINES = {
    "process": {
        "job": str,
        "generation?": int,
        "slot": int,
        "incarnation": int,
        "node": int,
        "clock": str,
        "unix_time": float,
    },
    "enter": {**_BARRIER, "nodes": [int]},
    "exit": {**_BARRIER, "nodes": ([int], None)},
    "concluded": {**_BARRIER, "verdict": str, "step": (int, None)},
}
_DEATH = {"time": float, "slot": int, "incarnation": int, "node": int}
_DEATHS = {"worker_died": _DEATH, "worker_exited": _DEATH}


def _kind_of(line: Mapping[str, Any]) -> Kind:
    """What is read of a member's line, as `kinds` has it."""
    following = {"next_epoch": int, "next_nodes": [int]} if "next_epoch" in line else {}
    return {"line": frozenset(_LINES), "time": float, **_LINES.get(str(line.get("line")), {}), **following}


@dataclass(frozen=True)
class Member:
    """A worker's name in a list: as messages call it."""

    job: str
    node: int
    slot: int | None = None
    incarnation: int | None = None

    def __str__(self) -> str:
        known = "" if self.slot is None else f" (slot {self.slot}, incarnation {self.incarnation})"
        return f"node {self.node}{known}"


@dataclass(frozen=True)
class Barrier:
    """Which barrier: the same on all its members."""

    job: str
    epoch: int
    nodes: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"barrier {self.number} of epoch {self.epoch}"


@dataclass(frozen=True)
class Conclusion:
    """What one member made of a block."""

    member: Member
    barrier: Barrier
    verdict: str
    step: int | None
    following: tuple[int, tuple[int, ...]] | None  # epoch and nodes of the next view


@dataclass(frozen=True)
class Blocks:
    """What the members of a run did at their barriers.

    Attributes:
      processes: one per start of a worker, as the checker takes them. All have failed, unless the job still runs.
      conclusions: in no order.
      members: every worker that has written lines.
      num_fenced: events left out because their worker had been declared dead before.
    """

    processes: tuple[Process, ...]
    conclusions: tuple[Conclusion, ...]
    members: frozenset[Member]
    num_fenced: int


def read_blocks(run_dir: Path) -> Blocks:
    """Reads what the members wrote, and who died from events.jsonl.

    When a worker failed is not known: after the last of its own lines, at some time. That is all that the semantics
    wants to know. A reply that leaves its receiver out tells it that it counts as dead: like one that was refused, it
    hands out no list. What it wrote after the coordinator had declared it dead is left out
    (`semantics.without_fenced`); the two times are compared as Unix times, which on several hosts is as good as their
    clocks.

    Raises:
      UsageError: a file was changed.
    """
    starts: list[tuple[Mapping[str, Any], list[dict[str, Any]]]] = []
    running = is_written(run_dir)
    paths = sorted((run_dir / DIRECTORY).glob("*.jsonl"))
    # While members go on writing, a list may be read before the entries of others that it rests on. So only those lists
    # count that were there before any file is read for good.
    num_lines = {path: len(read_lines(path)) for path in paths} if running else {}
    for path in paths:
        worker = _of_path(path)
        for number, line in enumerate(read_lines(path, _kind_of)):
            if line["line"] == "exit" and number >= num_lines.get(path, number + 1):
                continue
            if line["line"] == "process":
                # Node ids begin anew in each generation, so each is a job of its own here.
                starts.append(({**line, "job": f"{line['job']}/{line.get('generation', 0)}"}, []))
            elif not starts or (starts[-1][0]["slot"], starts[-1][0]["incarnation"]) != worker:
                raise UsageError(f"{path} does not begin with a line 'process' of its worker; {CHANGED}")
            else:
                starts[-1][1].append(line)
    names = {
        (start["job"], start["node"]): Member(start["job"], start["node"], start["slot"], start["incarnation"])
        for start, _ in starts
    }
    deaths = _deaths(run_dir)
    newest = max((start.get("generation", 0) for start, _ in starts), default=0)
    processes, conclusions, num_fenced = [], [], 0
    for start, lines in starts:
        events, concluded = _events(start["job"], names, names[start["job"], start["node"]], lines)
        death = next((t for t in deaths.get(_identity(start), ()) if t >= start["unix_time"]), None)
        process = Process(names[start["job"], start["node"]], tuple(events), start["clock"])
        if death is not None:
            fenced = without_fenced(process, death - start["unix_time"] + start["time"])
            num_fenced += len(process.events) - len(fenced.events)
            process = fenced
        if death is not None or not running or start.get("generation", 0) < newest:
            process = Process(process.name, (*process.events, Fail(0.0)), process.clock)
        processes.append(process)
        conclusions += concluded
    return Blocks(tuple(processes), tuple(conclusions), frozenset(names.values()), num_fenced)


def _of_path(path: Path) -> tuple[int, int]:
    slot, _, incarnation = path.stem.partition("-")
    if not (slot.isdecimal() and incarnation.isdecimal()):
        raise UsageError(f"{path} is not named as a run does it, SLOT-INCARNATION.jsonl; rename it, or take it away")
    return int(slot), int(incarnation)


def _identity(line: Mapping[str, Any]) -> Identity:
    return Identity(line["slot"], line["incarnation"], line["node"])


def _deaths(run_dir: Path) -> dict[Identity, list[float]]:
    """When each worker was declared dead, in seconds since the Unix epoch. JAX's service had been told before."""
    deaths: dict[Identity, list[float]] = defaultdict(list)
    for event in read_lines(run_dir / "events.jsonl", of_events(_DEATHS)):
        if event["event"] in _DEATHS:
            deaths[_identity(event)].append(event["time"])
    return deaths


def _events(
    job: str, names: Mapping[tuple[str, int], Member], me: Member, lines: list[dict[str, Any]]
) -> tuple[list[Event], list[Conclusion]]:
    @functools.cache
    def members(nodes: tuple[int, ...]) -> frozenset[Member]:
        return frozenset(names.get((job, node), Member(job, node)) for node in nodes)

    events: list[Event] = []
    concluded: list[Conclusion] = []
    asked: tuple[int, ...] = ()
    for line in lines:
        match line["line"]:
            case "enter":
                asked = tuple(line["nodes"])
                barrier = Barrier(job, line["epoch"], asked, line["number"])
                events.append(Enter(line["time"], members(asked), barrier))
            case "exit" if line["nodes"] is not None and me.node in line["nodes"]:
                events.append(Exit(line["time"], members(tuple(line["nodes"]))))
            case "concluded":
                barrier = Barrier(job, line["epoch"], asked, line["number"])
                following = (line["next_epoch"], tuple(line["next_nodes"])) if "next_epoch" in line else None
                concluded.append(Conclusion(me, barrier, line["verdict"], line["step"], following))
    return events, concluded
