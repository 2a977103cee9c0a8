"""How often a coordinator is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_train.launch.supervisor import Restarts


@given(st.integers(0, 5), st.lists(st.floats(0.0, 10.0), max_size=40))
def test_no_window_holds_more_restarts_than_allowed(most: int, pauses: list[float]) -> None:
    restarts, now = Restarts(most, window_s=20.0), 0.0
    allowed: list[float] = []
    for pause in pauses:
        now += pause
        is_free = len([time for time in allowed if time > now - 20.0]) < most
        assert restarts.allow(now) == is_free
        if is_free:
            allowed.append(now)
