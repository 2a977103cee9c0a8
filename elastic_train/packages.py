"""Optional packages: which of those that a recipe and its settings need are not installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from elastic_train.checkpoint import places
from elastic_train.errors import UsageError
from elastic_train.telemetry.trackers import check_trackers

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer


def missing(trainer: type[Trainer], settings: Mapping[str, Any]) -> list[str]:
    """What is missing, and how it is installed: in sentences.

    Args:
      trainer: the recipe's class.
      settings: values of the settings that are known; what one that is not there would need is not looked for.
    """
    checkpoint = settings.get("checkpoint")
    checks = (
        partial(_check_modules, trainer),
        partial(check_trackers, settings.get("tensorboard", False)),
        # On hosts that only join a job, too: any of them may be the one that saves.
        partial(places.require_client, places.Path((checkpoint and checkpoint.path) or "")),
    )
    return [text for each in checks if (text := _refusal(each))]


def _check_modules(trainer: type[Trainer]) -> None:
    """Raises UsageError if a module is not there that the recipe says it needs."""
    requires = trainer.requires
    texts = (each for pair in requires.items() for each in pair) if isinstance(requires, Mapping) else (None,)
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(
            f"{trainer.__name__}.requires = {requires!r}: expected a dict from the names of modules to how they are "
            'installed; write for example {"sklearn": "pip install scikit-learn"}'
        )
    lacking = [f"{name} ({how})" for name, how in requires.items() if not _is_there(name)]
    if lacking:
        raise UsageError(f"{trainer.__name__} needs what is not installed: {', '.join(lacking)}")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # the package that it is part of is not there; or it is no name of a module
        return False


def _refusal(check: Callable[[], None]) -> str:
    """What a check says; empty if it lets pass."""
    try:
        check()
    except UsageError as error:
        return str(error)
    return ""
