"""What a run left, made ready to be gone on with: lines cut off in the middle are dropped, and steps that will be taken
again are moved out of the way."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
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
    """

    step: int = 0
    last_step: int = 0
    has_metrics: bool = False
    epoch: int = 0
    starts: dict[int, int] = field(default_factory=dict)
    time: float = 0.0


def cut_back(run_dir: Path, step: int) -> Past:
    """Makes the files of a run end with `step`, the checkpoint's. Call it while nobody writes them.

    What comes later in metrics.jsonl and ledger.jsonl, and an old summary, is kept in `replaced/`.

    Raises:
      OSError: a file cannot be written.
      UsageError: a line in the middle of a file is no JSON.
    """
    for name in ("events", "metrics", "ledger"):
        _drop_torn_line(run_dir / f"{name}.jsonl")
    ledger = read_lines(run_dir / "ledger.jsonl")
    last_step = max((line["step"] for line in ledger), default=0)
    for name in ("metrics", "ledger"):
        _move_lines(run_dir, f"{name}.jsonl", lambda line: line["step"] > step)
    summary = run_dir / "summary.json"
    if summary.exists():
        summary.rename(_free_name(run_dir, "summary.json"))
    events = read_lines(run_dir / "events.jsonl")
    starts: dict[int, int] = {}
    for event in events:
        if event["event"] == "worker_starting":
            starts[event["slot"]] = max(starts.get(event["slot"], 0), event["incarnation"] + 1)
    return Past(
        step=max((line["step"] for line in ledger if line["step"] <= step), default=0),
        last_step=last_step,
        has_metrics=bool(read_lines(run_dir / "metrics.jsonl")),
        epoch=max((event.get("epoch", 0) for event in events if event["event"] == "view_changed"), default=0),
        starts=starts,
        time=max((event["time"] for event in events), default=0.0),
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
