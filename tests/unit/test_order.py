"""Records of several members, let through once in order."""

from hypothesis import given
from hypothesis import strategies as st

from elastic_train.coordinator.order import RecordOrder


def records(*steps: int) -> list[dict[str, object]]:
    return [{"step": step} for step in steps]


def test_starts_at_any_step_and_holds_what_came_too_early() -> None:
    order = RecordOrder()
    assert order.add(records(7, 8)) == records(7, 8)
    assert order.add(records(11)) == []
    assert order.gap == (9, 10)
    assert order.acknowledged == 8
    assert order.add(records(10, 9)) == records(9, 10, 11)
    assert order.gap is None
    assert order.acknowledged == 11


def test_repeated_records_pass_and_change_nothing() -> None:
    order = RecordOrder()
    order.add(records(0, 1, 2))
    assert order.add(records(1, 2)) == records(1, 2)
    assert order.acknowledged == 2


def test_skip_gives_up_what_nobody_has() -> None:
    order = RecordOrder()
    order.add(records(0))
    order.add(records(5, 6, 9))
    assert order.skip() == records(5, 6)
    assert order.gap == (7, 8)


@given(st.permutations(list(range(1, 12))))
def test_any_order_comes_out_ascending(steps: list[int]) -> None:
    order = RecordOrder()
    released = order.add(records(0))
    for step in steps:
        released += order.add(records(step))
    assert released == records(*range(12))
