"""The table against a dictionary, after any puts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.membership.table import Table

KINDS = {"even": lambda value: value % 2 == 0, "large": lambda value: value > 50}
numbers = st.one_of(st.integers(0, 40), st.integers(0, 2**17))
puts = st.lists(st.tuples(numbers, st.integers(0, 100)), max_size=60)


@given(puts, puts)
def test_it_holds_what_a_dictionary_would_hold(first: list[tuple[int, int]], then: list[tuple[int, int]]) -> None:
    table, expected = Table(KINDS, dict(first)), dict(first)
    for number, value in then:
        before, held = table, dict(expected)
        table = table.put(number, value)
        expected[number] = value
        assert before == held and dict(before) == held, "the one before stays as it was"
    assert list(table.items()) == sorted(expected.items())
    assert len(table) == len(expected)
    for kind, is_of in KINDS.items():
        assert table.of(kind) == tuple(number for number, value in sorted(expected.items()) if is_of(value))


@given(puts, numbers)
def test_what_it_does_not_hold_is_missing(values: list[tuple[int, int]], number: int) -> None:
    table = Table(KINDS, dict(values))
    assert table.get(number) == dict(values).get(number)
    assert (number in table) == (number in dict(values))
    assert -1 not in table
    with pytest.raises(KeyError):
        table[2**40]


def test_a_number_below_zero_cannot_be_put() -> None:
    with pytest.raises(ValueError, match="from 0"):
        Table(KINDS).put(-1, 2)
