"""What a resumed run does differently from the one that was saved: its settings, key by key. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple


class Kind(StrEnum):
    """What another value means for the run that goes on."""

    SAFE = "safe"
    NUMBERS = "changes the numbers"
    REFUSED = "refused"


_SAFE = frozenset({"steps", "eval_every", "log_every", "tensorboard", "prefetch", "early_update"})
_SAFE_GROUPS = ("faults.", "checkpoint.")
_NUMBERS = frozenset({"faults.nonfinite", "faults.max_nonfinite_retries", "faults.max_skipped_steps"})

_REFUSED = {
    "seed": "the order of the samples follows from it: samples of the pass that was begun would come twice or never",
}

ABSENT = None
"""Stands for the value of a key that one side does not have."""


class Difference(NamedTuple):
    """One key. A recipe's own keys change the numbers, for all that is known."""

    key: str
    saved: Any
    present: Any
    kind: Kind

    def __str__(self) -> str:
        because = f" ({_REFUSED[self.key]})" if self.key in _REFUSED else ""
        return f"{self.key}: {_shown(self.saved)} -> {_shown(self.present)}: {self.kind}{because}"


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[Difference]:
    """All keys with another value, those first that weigh most."""
    found = [
        Difference(key, saved.get(key, ABSENT), present.get(key, ABSENT), classify(key))
        for key in sorted(saved.keys() | present.keys())
        if saved.get(key, ABSENT) != present.get(key, ABSENT)
    ]
    order = list(reversed(Kind))
    return sorted(found, key=lambda difference: order.index(difference.kind))


def classify(key: str) -> Kind:
    """What another value of the setting `key` means."""
    if key in _REFUSED:
        return Kind.REFUSED
    is_safe = key in _SAFE or (key.startswith(_SAFE_GROUPS) and key not in _NUMBERS)
    return Kind.SAFE if is_safe else Kind.NUMBERS


def _shown(value: Any) -> str:
    return "not there" if value is ABSENT else repr(value)
