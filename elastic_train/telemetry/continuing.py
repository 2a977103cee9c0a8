"""What a run left, made ready to be gone on with: lines cut off in the middle are dropped, and steps that will be taken
again are moved out of the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic_train.telemetry.json_files import read_lines

REPLACED = "replaced"
"""Directory for what a resumed run takes the place of."""


@dataclass(frozen=True)
class Past:
    """What the earlier parts of a run say.

    Attributes:
      step: the last step of the ledger that counts.
      last_step: the last one that was committed; those after `step` are taken again.
      has_metrics: metrics.jsonl has lines.
      epoch: the newest version of the member list.
      starts: how often each slot's worker was started.
      time: of the last event.
      logged_step: the last step in metrics.jsonl.
      recovered: epochs whose event `recovered` was written.
      generation: the newest one; -1 if there was none.

    And of the part that goes on, if only its coordinator died:

      saved_step: the newest one that was saved.
      workers: how many slots the job was given last; 0 if that is not known.
      drained, given_up: slots that are not filled any more.
      failures: how often each slot's worker has ended since it last took part.
      stop_asked: why the members were asked to stop; empty if they were not.
      end: the event of that name that ended the last part; None if it was broken off.
    """

    step: int = 0
    last_step: int = 0
    has_metrics: bool = False
    epoch: int = 0
    starts: dict[int, int] = field(default_factory=dict)
    time: float = 0.0
    logged_step: int = 0
    recovered: frozenset[int] = frozenset()
    saved_step: int = 0
    generation: int = -1
    workers: int = 0
    drained: frozenset[int] = frozenset()
    given_up: frozenset[int] = frozenset()
    failures: dict[int, int] = field(default_factory=dict)
    stop_asked: str = ""
    end: dict[str, Any] | None = None


def cut_back(run_dir: Path, step: int) -> Past:
    """Makes the files of a run end with `step`, the checkpoint's. Call it while nobody writes them.

    What comes later in metrics.jsonl and ledger.jsonl, and an old summary with its page, is kept in `replaced/`.

    Raises:
      OSError: a file cannot be written.
      UsageError: a line in the middle of a file is no JSON.
    """
    last_step = _repair(run_dir)
    for name in ("metrics", "ledger"):
        _move_lines(run_dir, f"{name}.jsonl", lambda line: line["step"] > step)
    for name in ("summary.json", "report.html"):
        if (run_dir / name).exists():
            (run_dir / name).rename(_free_name(run_dir, name))
    return _read_past(run_dir, step, last_step, is_same_part=False)


def go_on(run_dir: Path) -> Past:
    """Makes the files of a job whose coordinator died ready for the next one: whole lines stay. Raises as `cut_back`.

    Both files of steps are written together, and broken off at different ones. Members send again what they do not know
    to be in both.
    """
    last_step = _repair(run_dir)
    _move_lines(run_dir, "metrics.jsonl", lambda line: line["step"] > last_step)
    return _read_past(run_dir, last_step, last_step, is_same_part=True)


def _repair(run_dir: Path) -> int:
    """Drops lines that were cut off; the last step of the ledger."""
    for name in ("events", "metrics", "ledger"):
        _drop_torn_line(run_dir / f"{name}.jsonl")
    return max((line["step"] for line in read_lines(run_dir / "ledger.jsonl")), default=0)


def _read_past(run_dir: Path, step: int, last_step: int, is_same_part: bool) -> Past:
    ledger, metrics, events = (read_lines(run_dir / f"{name}.jsonl") for name in ("ledger", "metrics", "events"))
    starts: dict[int, int] = {}
    for event in events:
        if event["event"] == "worker_starting":
            starts[event["slot"]] = max(starts.get(event["slot"], 0), event["incarnation"] + 1)
    return replace(
        _last_part(events) if is_same_part else Past(),
        step=max((line["step"] for line in ledger if line["step"] <= step), default=0),
        last_step=last_step,
        has_metrics=bool(metrics),
        epoch=max((event.get("epoch", 0) for event in events if event["event"] == "view_changed"), default=0),
        starts=starts,
        time=max((event["time"] for event in events), default=0.0),
        logged_step=max((line["step"] for line in metrics), default=0),
        recovered=frozenset(event["epoch"] for event in events if event["event"] == "recovered"),
        generation=max((event["generation"] for event in events if event["event"] == "generation_began"), default=-1),
    )


def _last_part(events: Sequence[Mapping[str, Any]]) -> Past:
    """What a coordinator knew that is not in the files of steps. Pure."""
    saved_step, workers, stop_asked = 0, 0, ""
    left: dict[str, set[int]] = {"drain_asked": set(), "slot_given_up": set()}
    failures: dict[int, int] = {}
    end = None
    for event in events:
        match event["event"]:
            case "job_started":
                workers, stop_asked, end, failures = event.get("workers", 0), "", None, {}
                left = {name: set() for name in left}
            case "checkpoint_saved":
                saved_step = max(saved_step, event["step"])
            case "drain_asked" | "slot_given_up" as name:
                left[name].add(event["slot"])
            case "resized":
                new = set(range(event["before"], event["workers"]))
                left = {name: slots - new for name, slots in left.items()}
                left["drain_asked"] |= set(range(event["workers"], event["before"]))
                workers = event["workers"]
            case "restart_scheduled":
                failures[event["slot"]] = event["failures"]
            case "recovered":
                failures = {slot: number for slot, number in failures.items() if slot not in event["came"]}
            case "stop_asked":
                stop_asked = event["reason"]
            case "end":
                end = dict(event)
    return Past(
        saved_step=saved_step,
        workers=workers,
        drained=frozenset(left["drain_asked"]),
        given_up=frozenset(left["slot_given_up"]),
        failures=failures,
        stop_asked=stop_asked,
        end=end,
    )


def _drop_torn_line(path: Path) -> None:
    """Whoever wrote it was killed in the middle of a line."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def _move_lines(run_dir: Path, name: str, is_replaced: Callable[[dict[str, Any]], bool]) -> None:
    """The copy is there before the lines are gone."""
    path = run_dir / name
    if not path.exists():
        return
    kept: list[str] = []
    moved: list[str] = []
    for text in path.read_text(encoding="utf-8").splitlines(keepends=True):
        (moved if is_replaced(json.loads(text)) else kept).append(text)
    if moved:
        _write(_free_name(run_dir, name), moved)
        temporary = path.with_name(f".{name}.{os.getpid()}")
        _write(temporary, kept)
        temporary.rename(path)


def _write(path: Path, lines: list[str]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _free_name(run_dir: Path, name: str) -> Path:
    (run_dir / REPLACED).mkdir(exist_ok=True)
    stem, _, suffix = name.partition(".")
    number = 1
    while (path := run_dir / REPLACED / f"{stem}-{number}.{suffix}").exists():
        number += 1
    return path
