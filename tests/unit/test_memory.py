"""How many states a device is said to have room for."""

import math

import pytest

import elastic_train as et
from elastic_train.step.memory import num_states, states_with_room


@pytest.mark.parametrize(
    ("num_partials", "room_bytes", "expected"),
    [
        (1, 3 * 100 + 4 * 10, 3),
        (1, 3 * 100 + 4 * 10 - 1, 2),
        (1, 2 * 100 + 4 * 10 - 1, 1),
        (2, 3 * 100 + 4 * 10, 2),  # a second partial sum takes as much again, but for what they add up to
        (2, 3 * 100 + 7 * 10, 3),
        (2, 2 * 100 + 7 * 10 - 1, 1),
        (1, 0, 1),  # where a device does not say how much it has
    ],
)
def test_states_have_room_beside_all_partial_sums_that_a_member_may_bring(num_partials, room_bytes, expected):
    assert states_with_room(100, 10, num_partials, room_bytes) == expected


@pytest.mark.parametrize(
    ("early_update", "room_bytes", "expected"),
    [
        ("auto", 0, 1),
        ("auto", 2 * 100 + 7 * 10, 2),  # of 8 shards a member may bring two partial sums
        ("auto", math.inf, 3),  # the host's own memory
        ("always", 0, 2),
        ("always", math.inf, 3),
        ("never", math.inf, 1),
    ],
)
def test_settings_decide_whether_room_is_used(early_update, room_bytes, expected):
    assert num_states(et.Config(shards=8, early_update=early_update), 100, 10, room_bytes) == expected
