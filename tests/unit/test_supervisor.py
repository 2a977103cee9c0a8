"""How often a coordinator is started again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.launch.coordinator_process import node_ids
from elastic_train.launch.job import _resized
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


@pytest.mark.parametrize(("workers", "expected"), [(1, 255), (8, 256), (16, 512), (64, 512), (1000, 4000)])
def test_many_workers_do_not_wait_for_node_ids_to_be_registered(workers: int, expected: int) -> None:
    assert node_ids(workers) == expected


@pytest.mark.parametrize(
    ("before", "given", "default", "expected"),
    [
        ({"workers": 3, "workers_asked": 2}, 2, 2, 3),
        ({"workers": 3, "workers_asked": 2}, 4, 4, 4),
        ({"workers": 3, "workers_asked": 2}, None, 1, 3),
        ({"workers": 2, "workers_asked": 2}, None, 1, 1),
        ({"workers_asked": 2}, 2, 2, 2),
        ({"workers": "many", "workers_asked": 2}, 2, 2, 2),
        ({}, None, 1, 1),
    ],
)
def test_the_number_a_job_was_resized_to_stays(
    before: dict[str, object], given: int | None, default: int, expected: int
) -> None:
    assert _resized(before, given, default) == expected
