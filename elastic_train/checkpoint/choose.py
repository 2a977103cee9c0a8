"""The newest good checkpoint. Damaged ones are set aside, never deleted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from elastic_train.checkpoint import places
from elastic_train.checkpoint.manifest import Manifest
from elastic_train.checkpoint.places import Path
from elastic_train.checkpoint.verify import Damage, find_damage

MAX_SHOWN = 5


class Chosen(NamedTuple):
    """A checkpoint that was read as a whole and is good."""

    path: Path
    manifest: Manifest


def newest_good(root: Path, note: Callable[[str], None]) -> Chosen | None:
    """The newest checkpoint in `root` that is as it was written; None if there is none.

    Args:
      root: the checkpoint directory; it need not exist.
      note: told in words what was set aside, and why.

    Raises:
      OSError: a checkpoint cannot be read or renamed. It may be good: nothing older is used in its place.
    """
    for step in reversed(places.saved_steps(root)):
        path = places.checkpoint(root, step)
        manifest, damages = find_damage(path)
        if manifest is not None and not damages:
            return Chosen(path, manifest)
        set_aside(path, damages, note)
    return None


def set_aside(path: Path, damages: list[Damage], note: Callable[[str], None]) -> None:
    """Renames a damaged checkpoint and says so."""
    aside = places.set_aside(path)
    shown = [f"  {damage}" for damage in damages[:MAX_SHOWN]]
    if len(damages) > MAX_SHOWN:
        shown.append(f"  and {len(damages) - MAX_SHOWN} more")
    note("\n".join([f"checkpoint {path.name} is damaged: it is kept as {aside}, and not used", *shown]))
