"""Which kind of value belongs where in a run's files: what was changed by hand, or is damaged, is found before it is
shown. Pure.

A kind is written as

| kind | what belongs there |
|---|---|
| `int`, `float`, `str` | a whole number, a number that is finite, text |
| `None` | null |
| `frozenset` of texts | one of them |
| `[kind]` | a list of such |
| `{str: kind}` | an object, all of whose values are such |
| `{"name": kind, "other?": kind}` | an object with these fields, `other` only perhaps; it may have more |
| `(kind, kind)` | either |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

Kind = Any

OBJECT: Kind = {}
"""Any object."""

_MAX_SHOWN = 60


def of_events(kinds: Mapping[str, Mapping[str, Kind]]) -> Callable[[Mapping[str, Any]], Kind]:
    """For `read_lines`: what is read of each event, by its name, besides the name."""
    return lambda event: {"event": str, **kinds.get(str(event.get("event")), {})}


def what_is_wrong(value: object, kind: Kind, name: str = "") -> str:
    """The first place in `value` (as JSON has it) that is not of its kind, in words; "" if there is none.

    >>> what_is_wrong({"step": 3, "faults": [{"slot": "x"}]}, {"step": int, "faults": [{"slot": (int, None)}]})
    'faults[0].slot = "x": expected a whole number or null'
    >>> what_is_wrong({}, {"step": int})
    "lacks 'step'"
    """
    if isinstance(kind, dict) and isinstance(value, dict):
        return _in_object(value, kind, name)
    if isinstance(kind, list) and isinstance(value, list):
        found = (what_is_wrong(item, kind[0], f"{name}[{number}]") for number, item in enumerate(value))
        return next(filter(None, found), "")
    if isinstance(kind, tuple):
        found = [what_is_wrong(value, each, name) for each in kind]
        if "" in found:
            return ""
        # The one whose outer form fits, if there is one, tells more than that none does.
        inner = [text for each, text in zip(kind, found, strict=True) if type(each) is type(value)]
        if inner and isinstance(value, dict | list):
            return inner[0]
    elif _is(value, kind):
        return ""
    shown = json.dumps(value)
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}…"
    return f"{name + ' = ' if name else ''}{shown}: expected {describe(kind)}"


def describe(kind: Kind) -> str:
    """A kind in words."""
    if isinstance(kind, tuple):
        return " or ".join(dict.fromkeys(map(describe, kind)))
    if isinstance(kind, frozenset):
        return f"one of {', '.join(sorted(kind))}"
    if isinstance(kind, dict | list):
        return "an object" if isinstance(kind, dict) else "a list"
    return {int: "a whole number", float: "a number", str: "text", None: "null"}[kind]


def _in_object(value: dict[str, Any], kind: dict[Any, Kind], name: str) -> str:
    inside = f"{name}." if name else ""
    if str in kind:
        found = (what_is_wrong(item, kind[str], f"{inside}{key}") for key, item in value.items())
        return next(filter(None, found), "")
    for key, each in kind.items():
        field = key.removesuffix("?")
        if field not in value:
            if key == field:
                return f"{name + ' ' if name else ''}lacks {field!r}"
        elif wrong := what_is_wrong(value[field], each, f"{inside}{field}"):
            return wrong
    return ""


def _is(value: object, kind: Kind) -> bool:
    if kind is None:
        return value is None
    if isinstance(kind, frozenset):
        return isinstance(value, str) and value in kind
    if kind is float:
        return type(value) in (int, float) and _is_finite(value)
    return type(value) is kind


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number of hundreds of digits
        return False
