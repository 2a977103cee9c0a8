"""What `elastic-train checkpoint ls`, `verify` and `diff` print. All raise UsageError if checkpoints cannot be read."""

from __future__ import annotations

import time
from pathlib import Path

from elastic_train.checkpoint import places
from elastic_train.checkpoint.differences import differences
from elastic_train.checkpoint.manifest import Manifest, ManifestError
from elastic_train.checkpoint.resume import checkpoint_directory
from elastic_train.checkpoint.verify import find_damage
from elastic_train.config import CheckpointConfig
from elastic_train.errors import UsageError
from elastic_train.telemetry.run_files import read_config, require_run_directory

MAX_SHOWN = 20


def root_of(run_dir: Path) -> places.Path:
    """The checkpoint directory of the run in `run_dir`. Raises UsageError if that is no run directory."""
    require_run_directory(run_dir)
    path = read_config(run_dir).get("checkpoint.path", "none")
    return places.Path(checkpoint_directory(run_dir, CheckpointConfig(path=None if path == "none" else path)))


def path_of(run_dir: Path, step: int | None) -> places.Path:
    """The checkpoint of `step`, or the newest one. Raises UsageError if there is none, or that cannot be known."""
    root = root_of(run_dir)
    with places.refuse_unreadable(root):
        steps = places.saved_steps(root)
    if step is None and steps:
        step = steps[-1]
    if step not in steps or step is None:
        known = f"; there are those of steps {', '.join(map(str, steps))}" if steps else "; there is none at all"
        raise UsageError(f"{root} holds no checkpoint{'' if step is None else f' of step {step}'}{known}")
    return places.checkpoint(root, step)


def listing(run_dir: Path) -> str:
    """A table of all checkpoints, and of what was set aside. Reads the manifests alone."""
    root = root_of(run_dir)
    with places.refuse_unreadable(root):
        return _listing(root)


def _listing(root: places.Path) -> str:
    rows = [("step", "samples", "saved", "size", "workers", "remark")]
    for step in places.saved_steps(root):
        try:
            manifest = places.read_manifest(places.checkpoint(root, step))
        except ManifestError as error:
            rows.append((str(step), "", "", "", "", f"damaged: its manifest: {error}"))
            continue
        position = manifest.position
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
        remark = f"not finite: {', '.join(manifest.broken[:3])}" if manifest.broken else ""
        size = _size(manifest.num_bytes)
        rows.append((str(step), str(position.samples), saved, size, str(len(position.workers)), remark))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["no checkpoint yet"] if len(rows) == 1 else []
    lines += [f"set aside: {path}" for path in places.damaged(root)]
    return "\n".join([str(root), *lines])


def _size(num_bytes: int) -> str:
    if num_bytes < 1e3:
        return f"{num_bytes} B"
    return f"{num_bytes / 1e3:.1f} kB" if num_bytes < 999_950 else f"{num_bytes / 1e6:.1f} MB"


def verification(run_dir: Path, step: int | None) -> tuple[bool, str]:
    """Reads one checkpoint, or all, as a whole: whether all are good, and what was found. Changes nothing."""
    root = root_of(run_dir)
    with places.refuse_unreadable(root):
        steps = places.saved_steps(root) if step is None else [int(path_of(run_dir, step).name)]
        if not steps:
            raise UsageError(f"{root} holds no checkpoint")
        return _verification(root, steps)


def _verification(root: places.Path, steps: list[int]) -> tuple[bool, str]:
    lines, are_good = [], True
    for number in steps:
        manifest, damages = find_damage(places.checkpoint(root, number))
        if manifest is not None and not damages:
            lines.append(f"{number}: good ({len(manifest.files)} files, {_size(manifest.num_bytes)})")
            continue
        are_good = False
        lines.append(f"{number}: DAMAGED")
        lines += [f"  {damage}" for damage in damages[:MAX_SHOWN]]
        if len(damages) > MAX_SHOWN:
            lines.append(f"  and {len(damages) - MAX_SHOWN} more")
    return are_good, "\n".join(lines)


def comparison(run_dir: Path, one: int | None, other: int | None, other_dir: Path | None) -> tuple[bool, str]:
    """Compares two checkpoints by their manifests: whether all leaves have the same digests, and what differs."""
    if (one, other, other_dir) == (None, None, None):
        one = _before_the_newest(run_dir)
    paths = path_of(run_dir, one), path_of(other_dir or run_dir, other)
    try:
        with places.refuse_unreadable(paths[0].parent):
            first = places.read_manifest(paths[0])
        with places.refuse_unreadable(paths[1].parent):
            second = places.read_manifest(paths[1])
    except ManifestError as error:
        raise UsageError(f"a manifest of {paths[0]} or {paths[1]} is damaged: {error}") from error
    lines = [f"{paths[0]}: step {first.step}", f"{paths[1]}: step {second.step}"]
    changed = _other_leaves(first, second)
    total = len(first.leaves.keys() | second.leaves.keys())
    lines.append(f"leaves: {total - len(changed)} of {total} are equal")
    lines += [f"  {line}" for line in changed[:MAX_SHOWN]]
    if len(changed) > MAX_SHOWN:
        lines.append(f"  and {len(changed) - MAX_SHOWN} more")
    settings = differences(first.run.config, second.run.config)
    lines += ["settings:", *(f"  {difference}" for difference in settings)] if settings else []
    return not changed, "\n".join(lines)


def _before_the_newest(run_dir: Path) -> int:
    root = root_of(run_dir)
    with places.refuse_unreadable(root):
        steps = places.saved_steps(root)
    if len(steps) < 2:
        raise UsageError(f"{root} holds fewer than two checkpoints; name those of another run with --other-dir")
    return steps[-2]


def _other_leaves(first: Manifest, second: Manifest) -> list[str]:
    lines = []
    for path in sorted(first.leaves.keys() | second.leaves.keys()):
        one, other = first.leaves.get(path), second.leaves.get(path)
        if one is None or other is None:
            lines.append(f"{path}: only in the {'second' if one is None else 'first'}")
        elif one.kind != other.kind:
            lines.append(f"{path}: {one.kind} and {other.kind}")
        elif one.sha256 != other.sha256:
            lines.append(f"{path}: other values ({one.kind}; sha256 {one.sha256[:12]} and {other.sha256[:12]})")
    return lines
