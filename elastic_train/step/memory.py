"""How many training states a device holds beside each other, which decides when a step's update is queued. Pure."""

from __future__ import annotations

from elastic_train.config import Config
from elastic_train.step.plan import partials, run_of


def num_states(config: Config, state_bytes: int, sum_bytes: int, room_bytes: float) -> int:
    """How many states are held beside each other: 1, 2 (those before and after a step) or 3 (and one that is copied).

    Args:
      config: whether the update may be queued before it is known whether the step counts; the shards.
      state_bytes, sum_bytes: size of a state; of a partial sum.
      room_bytes: how much memory may be taken in all; infinite where it is the host's.
    """
    if config.early_update == "never":
        return 1
    # Under `per_worker` each member is one shard.
    num_partials = 1 if config.batch_policy == "per_worker" else most_partials(config.shards)
    fitting = states_with_room(state_bytes, sum_bytes, num_partials, room_bytes)
    return max(2, fitting) if config.early_update == "always" else fitting


def states_with_room(state_bytes: int, sum_bytes: int, num_partials: int, room_bytes: float) -> int:
    """How many states have room beside an exchange, from 1 to 3; 1 also if there is no room for a single one.

    Args:
      state_bytes, sum_bytes: size of a state; of a partial sum.
      num_partials: how many partial sums a member brings at the most.
      room_bytes: how much memory may be taken in all.
    """
    # Each partial sum is there three times: as it is, as it is sent, and received. What they add up to is there once.
    exchange = (3 * num_partials + 1) * sum_bytes
    return next((number for number in (3, 2) if number * state_bytes + exchange <= room_bytes), 1)


def most_partials(num_shards: int) -> int:
    """The largest number of partials that a member can have, whatever the number of members.

    >>> [most_partials(num_shards) for num_shards in (1, 4, 8, 32)]
    [1, 1, 2, 4]
    """
    most = 1
    # With half as many members as shards or more, runs are single shards and pairs that are a subtree each.
    for members in range(1, (num_shards + 1) // 2):
        if _most_in_any_run(-(-num_shards // members)) <= most:
            break  # the runs of more members are no longer
        runs = [run_of(num_shards, members, rank) for rank in range(members)]
        most = max(most, *(len(partials(run.start, run.stop, num_shards)) for run in runs))
    return most


def _most_in_any_run(size: int) -> int:
    """No run of `size` shards, wherever it lies, has more partials: their sizes are powers of two (all but the last
    one's in a run that ends with the batch), ascend and then descend, and each occurs on either side once at the most.

    >>> [_most_in_any_run(size) for size in (1, 2, 3, 4, 6, 9, 10)]
    [1, 2, 2, 3, 4, 4, 5]
    """
    number = smallest = 0
    while (smallest := smallest + (1 << number // 2)) <= size:  # 1 + 1 + 2 + 2 + 4 + 4 + …
        number += 1
    return number
