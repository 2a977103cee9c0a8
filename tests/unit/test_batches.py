"""Batch policies: how large a step's batch is, how it is cut, and what a growing batch may do to the learning rate."""

from dataclasses import dataclass, replace

import numpy as np
import optax
import pytest
from flax import nnx

import elastic_train as et
from elastic_train.config import ConfigError
from elastic_train.data.batches import batches
from elastic_train.plain import fit_alone


def consumed(policy: str, steps: list[int], batch_size: int = 6) -> list[int]:
    """All sample ids of steps taken by so many members each, in the order of their positions."""
    cut = batches(policy, 25, batch_size, 3, seed=1)
    ids, position = [], 0
    for members in steps:
        for shard in range(cut.num_shards(members)):
            rows, weight = cut.shard_ids(position, shard)
            assert len(rows) == len(weight) == cut.rows
            ids += rows[weight > 0].tolist()
        position += cut.size(members)
    assert len(ids) == position
    return ids


def test_fixed_batches_do_not_depend_on_the_members():
    assert consumed("fixed", [1, 2, 3, 1]) == consumed("fixed", [3, 3, 3, 3])


def test_per_worker_batches_grow_with_the_members():
    cut = batches("per_worker", 25, 6, 3, seed=1)
    assert [cut.size(members) for members in (1, 2, 5)] == [6, 12, 30]
    assert [cut.num_shards(members) for members in (1, 2, 5)] == [1, 2, 5]


@pytest.mark.parametrize("policy", ["fixed", "per_worker"])
def test_every_sample_once_per_pass_whoever_takes_part(policy):
    ids = consumed(policy, [2, 1, 3, 3, 1, 2, 2, 3, 1, 1, 2])
    for start in range(0, len(ids) - 25, 25):
        assert sorted(ids[start : start + 25]) == list(range(25))


def test_both_policies_take_the_samples_in_one_order():
    fixed, per_worker = consumed("fixed", [1] * 8), consumed("per_worker", [1, 2, 1, 3, 1])
    assert fixed == per_worker


@dataclass(frozen=True, kw_only=True)
class MeanConfig(et.Config):
    steps: int = 3
    batch_size: int = 4
    shards: int = 4


class Scalar(nnx.Module):
    def __init__(self) -> None:
        self.value = nnx.Param(np.zeros((), np.float32))


class Mean(et.Trainer):
    """The gradient is always one, so the parameter is minus the sum of the learning rates."""

    config: MeanConfig

    def model(self, rngs):
        return Scalar()

    def optimizer(self):
        return optax.sgd(0.5)

    def loss(self, model, batch, rngs):
        return model.value[...] + 0 * batch["x"]

    def train_data(self):
        return et.ArraySource(x=np.zeros(16, np.float32))


class Scaled(Mean):
    def learning_rate_scale(self, batch_size):
        return batch_size / 2


def test_updates_are_scaled_only_on_request():
    config = MeanConfig(batch_policy="per_worker", shards=8)
    assert float(fit_alone(Mean(config)).state.params["value"]) == -1.5
    assert float(fit_alone(Scaled(config)).state.params["value"]) == -3.0


def test_shards_limit_the_batch_size_only_where_they_play_a_part():
    replace(MeanConfig(batch_policy="per_worker", shards=8), batch_size=1)
    with pytest.raises(ConfigError, match=r"batch_size = 4: must be at least shards \(8\)"):
        MeanConfig(shards=8)
    with pytest.raises(ConfigError, match="batch_policy = 'each'"):
        MeanConfig(batch_policy="each")  # type: ignore[arg-type]
