"""What a checkpoint says of itself: where training was, the digest of every leaf and of every file. Pure.

A checkpoint counts if its manifest is there and is, byte for byte, what was written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elastic_train.errors import UsageError

SCHEMA = 1
"""Version of this form."""

NAME = "manifest.json"

MAX_SHOWN = 20
"""How many leaves a message names."""


class ManifestError(Exception):
    """A manifest is not what was written, or of a version that is not known. The message says why."""


def kind_of(name: str, shape: Iterable[int]) -> str:
    """What must be the same of a leaf here and there: its dtype, or the name of its random key's, and its shape."""
    return f"{name}[{', '.join(map(str, shape))}]"


@dataclass(frozen=True)
class Leaf:
    """One array of the state.

    Attributes:
      dtype: name of its dtype; that of the key data for random keys.
      shape: of the array that is stored.
      sha256: of path, dtype, shape and bytes, as `digests.add_leaf` has it.
      broken: it holds NaN; a parameter may not hold infinities either.
      random_key: name of the implementation, if these are random keys; else empty.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    broken: bool = False
    random_key: str = ""

    @property
    def kind(self) -> str:
        """What must be the same in the model that loads it."""
        return kind_of(self.random_key or self.dtype, self.shape)


@dataclass(frozen=True)
class File:
    """One file of a checkpoint. `leaf` is the key path of the array it belongs to, or empty."""

    num_bytes: int
    sha256: str
    leaf: str = ""


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where training was when the state was saved.

    Attributes:
      step, samples: completed updates; samples consumed, which is the position in the data.
      pass_size: samples of a pass.
      epoch, generation, workers: the members that had committed the step.
      metrics: newest means, those of the newest evaluation among them ("eval_" in front).
      records: JSON of the records of steps that may not be on disk yet, oldest first.
    """

    step: int
    samples: int
    pass_size: int
    epoch: int
    generation: int
    workers: tuple[int, ...]
    metrics: dict[str, float]
    records: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What was trained.

    Attributes:
      trainer: name of the class.
      config: every setting, by dotted key.
      config_digest: over class and settings.
      versions: of the packages that the numbers depend on.
    """

    trainer: str
    config: dict[str, Any]
    config_digest: str
    versions: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The whole. `time` is in seconds since the Unix epoch; `leaves` go by key path, `files` by relative path."""

    position: Position
    run: Run
    leaves: dict[str, Leaf]
    files: dict[str, File]
    time: float

    @property
    def step(self) -> int:
        return self.position.step

    @property
    def num_bytes(self) -> int:
        """Of all files but the manifest."""
        return sum(file.num_bytes for file in self.files.values())

    @property
    def broken(self) -> list[str]:
        """Leaves that are not finite."""
        return [path for path, leaf in self.leaves.items() if leaf.broken]


def dump(manifest: Manifest) -> str:
    """The manifest as JSON, with a digest over all of it."""
    content = {"schema": SCHEMA, **dataclasses.asdict(manifest)}
    return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"


def parse(text: str) -> Manifest:
    """Inverse of `dump`. Raises ManifestError if `text` is anything else than what `dump` gave."""
    try:
        content = json.loads(text)
        if not isinstance(content, dict):
            raise ManifestError("it holds no JSON object")
        if content.get("schema", SCHEMA) > SCHEMA:
            raise ManifestError(f"its form is version {content['schema']}; this elastic_train knows up to {SCHEMA}")
        expected, found = content.pop("sha256", None), _digest(content)
        if expected != found:
            raise ManifestError(f"expected sha256 {expected}, found {found}")
        manifest = Manifest(
            position=Position(
                **{
                    **content["position"],
                    "workers": tuple(content["position"]["workers"]),
                    "records": tuple(content["position"]["records"]),
                }
            ),
            run=Run(**content["run"]),
            leaves={k: Leaf(**{**leaf, "shape": tuple(leaf["shape"])}) for k, leaf in content["leaves"].items()},
            files={path: File(**file) for path, file in content["files"].items()},
            time=content["time"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(f"it cannot be read: {error!r}") from error
    if dump(manifest) != text:
        raise ManifestError("it is not byte for byte what was written")
    return manifest


def _digest(content: Mapping[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def other_leaves(saved: Mapping[str, Leaf], present: Mapping[str, str]) -> list[str]:
    """How the leaves of a checkpoint differ from those of a model, one line each; none if they fit.

    Args:
      saved: of the checkpoint.
      present: the model's, by key path, each as `Leaf.kind` has it.
    """
    lines = []
    for path in sorted(saved.keys() | present.keys()):
        if path not in present:
            lines.append(f"{path}: saved as {saved[path].kind}; the model has no such leaf")
        elif path not in saved:
            lines.append(f"{path}: {present[path]} in the model; not in the checkpoint")
        elif saved[path].kind != present[path]:
            lines.append(f"{path}: saved as {saved[path].kind}; {present[path]} in the model")
    return lines


def refuse_others(path: object, manifest: Manifest, kinds: Mapping[str, str]) -> None:
    """Raises UsageError unless the leaves of a checkpoint are those of the model, `snapshot.leaf_kinds` of it."""
    lines = other_leaves(manifest.leaves, kinds)
    if lines:
        more = [f"  and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
        raise UsageError(
            f"the checkpoint {path} is not one of this model and optimizer:\n"
            + "\n".join([*(f"  {line}" for line in lines[:MAX_SHOWN]), *more])
            + "\nUse the recipe and settings it was saved with, or give another --run-dir to begin anew."
        )


def newly_broken(leaves: Mapping[str, Leaf], before: Mapping[str, Leaf]) -> list[str]:
    """Leaves that are not finite, and were so in the checkpoint before; none if there was none before."""
    if not before:
        return []
    return [path for path, leaf in leaves.items() if leaf.broken and not (path in before and before[path].broken)]
