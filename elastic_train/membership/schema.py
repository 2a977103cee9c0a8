"""What a worker runs, as a flat mapping, and how a joiner may differ from the members: not at all. Pure.

Keys begin with what they are about:

- `state/…`: one per leaf of the training state, "float32[8,32]"
- `config/…`: one per setting
- `code/…`: one per file of the recipe's own code, a digest that ignores comments and layout. A file that only one side
  names is no difference: modules may be imported late.
- `versions/…`: of Python and of the packages that make the numbers
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Schema = Mapping[str, str]

MAX_SHOWN = 12
"""How many differences an event and a message name."""

ABSENT = "absent"

_ADVICE = {
    "code": "A file of the recipe has another content than when the members started: undo the change, or stop the run"
    " and start it again",
    "versions": "Other versions of packages compute other numbers: use the same on all hosts, and install none while a"
    " run goes on",
    "config": "Settings must be the same everywhere: undo the change to config.toml in the run directory, or give the"
    " agent of that host the job's own options",
    "state": "Code and settings are the same, and yet the model or the optimizer is not: they must not depend on the"
    " host, the time or the environment",
}


class Difference(NamedTuple):
    """One key, and what both sides have there."""

    key: str
    members: str
    joiner: str


def differences(members: Schema, joiner: Schema) -> list[Difference]:
    """Everything in which a joiner differs, in the order of what is likely to be the cause."""
    if members == joiner:
        return []
    found = []
    for key in sorted({*members, *joiner}, key=_rank):
        ours, theirs = members.get(key, ABSENT), joiner.get(key, ABSENT)
        if ours != theirs and not (key.startswith("code/") and ABSENT in (ours, theirs)):
            found.append(Difference(key, ours, theirs))
    return found


def describe(found: Sequence[Difference]) -> str:
    """The differences in words, and what to do about the likeliest cause."""
    named = "; ".join(f"{each.key}: {each.members} with the members, {each.joiner} here" for each in found[:MAX_SHOWN])
    more = f"; and {len(found) - MAX_SHOWN} more" if len(found) > MAX_SHOWN else ""
    return f"{named}{more}. {_ADVICE[_kind(found[0].key)]}."


def most_common(schemas: Sequence[Schema]) -> Schema:
    """What most of them say; on a tie, the first of these."""
    frozen = [tuple(sorted(schema.items())) for schema in schemas]
    return schemas[frozen.index(Counter(frozen).most_common(1)[0][0])]


def _kind(key: str) -> str:
    return key.partition("/")[0]


def _rank(key: str) -> tuple[int, bool, str]:
    """What is likely to be the cause comes first; of the state, the parameters, which the rest follows."""
    return tuple(_ADVICE).index(_kind(key)), not key.startswith("state/params/"), key
