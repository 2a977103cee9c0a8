"""A receiver gets, bit for bit, what the donors hold: of every dtype, and of leaves that are sent in pieces."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from elastic_train.membership.heal import Healer
from elastic_train.state import key_path_leaves, sha256_of_leaves

DEVICE = jax.local_devices()[0]


def state(seed: int) -> dict:
    return {
        "large": jax.random.normal(jax.random.key(seed), (7, 41)),
        "keys": jax.random.split(jax.random.key(seed), 40),
        "key": jax.random.key(seed + 1, impl="rbg"),
        "bool": jax.random.bernoulli(jax.random.key(seed), shape=(301,)),
        "bfloat16": jnp.full((3, 2), seed, jnp.bfloat16),
        "scalar": jnp.int32(seed),
        "empty": jnp.zeros((0, 4)),
    }


def digest(tree: dict) -> str:
    return sha256_of_leaves(key_path_leaves(tree))


def exchange(pack_bytes: int, stripe_bytes: int, num_donors: int) -> dict:
    """What a receiver holds after a transfer from `num_donors` members; it has the last rank."""
    healer = Healer(state(0), DEVICE, pack_bytes, stripe_bytes)
    donors = list(range(num_donors))
    sent: list[list[np.ndarray]] = []
    for rank in donors:
        mine: list[np.ndarray] = []
        sent.append(mine)

        def spread(row: jax.Array, mine: list[np.ndarray] = mine) -> Sequence[jax.Array]:
            mine.append(np.asarray(row[0]))
            return []

        donor = state(5)
        assert digest(healer.run(spread, donor, donors, rank, False)) == digest(state(5))
    stripes = zip(*sent, strict=True)

    def receive(row: jax.Array) -> Sequence[jax.Array]:
        return [*map(jnp.asarray, next(stripes)), row[0]]

    healed = healer.run(receive, state(9), donors, num_donors, True)
    assert next(stripes, None) is None
    return healed


@pytest.mark.parametrize(
    ("pack_bytes", "stripe_bytes", "num_donors"), [(1 << 20, 1 << 20, 1), (256, 256, 1), (256, 100, 2), (96, 40, 3)]
)
def test_a_receiver_gets_every_bit(pack_bytes: int, stripe_bytes: int, num_donors: int) -> None:
    healed, expected = exchange(pack_bytes, stripe_bytes, num_donors), state(5)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), healed) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), expected
    )
    assert digest(healed) == digest(expected)
