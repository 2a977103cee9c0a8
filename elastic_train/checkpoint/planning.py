"""Whether and from where a run goes on: found out before any worker starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elastic_train.checkpoint import places
from elastic_train.checkpoint.choose import newest_good
from elastic_train.checkpoint.differences import Kind, differences
from elastic_train.checkpoint.manifest import Manifest, refuse_others
from elastic_train.checkpoint.resume import Mode, Resume, checkpoint_directory
from elastic_train.config import CheckpointConfig
from elastic_train.errors import UsageError
from elastic_train.telemetry.records import is_run_directory


def plan(
    run_dir: Path,
    mode: Mode,
    config: CheckpointConfig,
    values: dict[str, Any],
    kinds: Callable[[], dict[str, str] | None],
) -> Resume | None:
    """Where the run in `run_dir` goes on; None if a new one begins there. Sets damaged checkpoints aside.

    Args:
      run_dir: the run directory.
      mode: "never", "auto" or "must".
      config: says where checkpoints are.
      values: the present settings, by dotted key.
      kinds: gives the model's leaves, `snapshot.leaf_kinds`; None if they cannot be told before it is built.

    Raises:
      UsageError: it cannot go on, or must not.
    """
    has_run = is_run_directory(run_dir)
    root = places.Path(checkpoint_directory(run_dir, config))
    damaged: list[str] = []
    with places.refuse_unreadable(root):
        has_checkpoints = bool(places.saved_steps(root))
        chosen = newest_good(root, damaged.append) if has_run or mode == "must" else None
    if not has_run and mode != "must":
        if has_checkpoints:
            raise UsageError(
                f"{root} holds checkpoints, but {run_dir} holds no run. To go on from them give --resume must; to "
                "begin anew, another --run-dir or checkpoint.path"
            )
        return None
    if chosen is None:
        _refuse_to_begin_again(run_dir, root, mode, damaged)
        return Resume(damaged=tuple(damaged))
    changed = _compare(chosen.path, chosen.manifest, values)
    if (now := kinds()) is not None:
        refuse_others(chosen.path, chosen.manifest, now)
    position = chosen.manifest.position
    return Resume(position.step, position.samples, str(chosen.path), position.records, tuple(damaged), tuple(changed))


def _refuse_to_begin_again(run_dir: Path, root: places.Path, mode: Mode, damaged: list[str]) -> None:
    found = "\n".join([*damaged, f"there is no good checkpoint in {root}"])
    if mode == "must":
        raise UsageError(f"{found}, and --resume must was given")
    summary = run_dir / "summary.json"
    if summary.exists() and json.loads(summary.read_text(encoding="utf-8")).get("status") == "done":
        raise UsageError(f"{found}, and {run_dir} holds a run that has ended; give another --run-dir")


def _compare(path: places.Path, manifest: Manifest, values: dict[str, Any]) -> list[str]:
    found = differences(manifest.run.config, values)
    refused = [f"  {difference}" for difference in found if difference.kind is Kind.REFUSED]
    if refused:
        raise UsageError(
            f"the run cannot go on from {path} with these settings:\n"
            + "\n".join(refused)
            + "\nUse the saved values, or give another --run-dir to begin anew."
        )
    return [str(difference) for difference in found]
