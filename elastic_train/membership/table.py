"""A mapping from small whole numbers that is never changed; a changed one shares nearly all with it. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")
Kinds = Mapping[str, Callable[[Value], bool]]

BITS = 5
WIDTH = 1 << BITS
_EMPTY: tuple[Any, ...] = (None,) * WIDTH


class Table(Mapping[int, Value], Generic[Value]):
    """Values by number, in ascending order. No value is None.

    A tree whose nodes have `WIDTH` children: `put` copies one node of each level, two for a thousand values. Of each
    kind of values it knows the numbers, so that nobody has to walk over all to find some or to count them; a value that
    changes, but not its kinds, costs nothing there.

    Args:
      kinds: which values are of which kind, by the kind's name.
      values: what it holds.

    >>> table = Table({"even": lambda value: value % 2 == 0}, {3: 8, 1: 7})
    >>> dict(table.put(2, 6)), table.put(2, 6).of("even"), dict(table)
    ({1: 7, 2: 6, 3: 8}, (2, 3), {1: 7, 3: 8})
    """

    __slots__ = ("_height", "_kinds", "_len", "_numbers", "_root")

    def __init__(self, kinds: Kinds[Value], values: Mapping[int, Value] | None = None) -> None:
        self._kinds = kinds
        self._root: tuple[Any, ...] = _EMPTY
        self._height = 0  # of the root; leaves, whose children are values, have 0
        self._len = 0
        self._numbers: dict[str, tuple[int, ...]] = dict.fromkeys(kinds, ())
        for number, value in (values or {}).items():
            self._put(number, value)

    def put(self, number: int, value: Value) -> Table[Value]:
        """A table that holds `value`, too, in place of what it had there."""
        after: Table[Value] = Table.__new__(Table)
        after._kinds, after._root, after._height, after._len = self._kinds, self._root, self._height, self._len
        after._numbers = self._numbers
        after._put(number, value)
        return after

    def of(self, kind: str) -> tuple[int, ...]:
        """The numbers of all values of a kind, in ascending order. Costs nothing."""
        return self._numbers[kind]

    def __getitem__(self, number: int) -> Value:
        node: Any = self._root if 0 <= number < WIDTH << BITS * self._height else None
        for level in range(self._height, -1, -1):
            if node is None:
                break
            node = node[number >> BITS * level & WIDTH - 1]
        if node is None:
            raise KeyError(number)
        return node

    def __iter__(self) -> Iterator[int]:
        return (number for number, _ in _walk(self._root, self._height, 0))

    def __len__(self) -> int:
        return self._len

    def __repr__(self) -> str:
        return f"Table({dict(self)})"

    def _put(self, number: int, value: Value) -> None:
        """While nobody else knows this table."""
        if number < 0 or value is None:
            raise ValueError(f"a table holds values by numbers from 0; got {value!r} for {number}")
        while number >= WIDTH << BITS * self._height:
            self._root = (self._root, *_EMPTY[1:])
            self._height += 1
        before = self.get(number)
        self._len += before is None
        self._root = _with(self._root, self._height, number, value)
        for kind, is_of in self._kinds.items():
            was, now = before is not None and is_of(before), is_of(value)
            if was != now:
                numbers = self._numbers[kind]
                place = bisect_left(numbers, number)
                new = (number,) if now else ()
                self._numbers = {**self._numbers, kind: (*numbers[:place], *new, *numbers[place + was :])}


def _with(node: tuple[Any, ...] | None, level: int, number: int, value: Any) -> tuple[Any, ...]:
    children = list(node or _EMPTY)
    place = number >> BITS * level & WIDTH - 1
    children[place] = value if level == 0 else _with(children[place], level - 1, number, value)
    return tuple(children)


def _walk(node: tuple[Any, ...], level: int, first: int) -> Iterator[tuple[int, Any]]:
    for place, child in enumerate(node):
        if child is not None:
            number = first + (place << BITS * level)
            if level == 0:
                yield number, child
            else:
                yield from _walk(child, level - 1, number)
