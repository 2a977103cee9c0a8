"""A small model whose shards take time but no processor: what a host sees of training on accelerators.

Workers of a test share a few processor cores, and a worker that starts needs a whole one for several seconds. Where
accelerators compute the steps, that costs the others nothing; where the same cores compute them, it slows them down.
This recipe is for measuring the first case without accelerators. Each sample takes `sample_s` seconds, in the step
itself, so a step that is taken again costs that time again, and a member with more shards takes longer.

With `sample_s = 0` the numbers are the same, and a replay takes milliseconds a step.
"""

import time
from dataclasses import dataclass

import jax
import numpy as np
import optax
from flax import nnx

import elastic_train as et


@dataclass(frozen=True, kw_only=True)
class PacedConfig(et.Config):
    """Attributes:
    sample_s: seconds that one sample takes.
    """

    steps: int = 1_000_000
    batch_size: int = 16  # two rows a shard: few waits, since each ends a little late on a busy machine
    width: int = 64
    prefetch: int = 0  # the time is to be spent in the step, not beside it
    sample_s: float = 0.025


class Source:
    """4096 samples of a fixed function, each after a wait."""

    def __init__(self, sample_s: float) -> None:
        self._sample_s = sample_s

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self._sample_s:
            time.sleep(self._sample_s)
        x = np.random.default_rng(index).standard_normal(8, dtype=np.float32)
        return {"x": x, "y": np.float32(np.sin(x.sum()))}


class Net(nnx.Module):
    """float[rows, 8] -> float[rows]; has batch statistics and dropout, so that all kinds of state are at stake."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))[:, 0]


class Paced(et.Trainer):
    """Fit a fixed function, slowly."""

    config: PacedConfig

    def model(self, rngs: nnx.Rngs) -> Net:
        return Net(self.config.width, rngs)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(self.schedule()))

    def schedule(self) -> optax.Schedule:
        return optax.cosine_decay_schedule(1e-2, 100_000)  # not the run's own length: runs of any length compare

    def loss(self, model: Net, batch, rngs: nnx.Rngs) -> jax.Array:
        return (model(batch["x"]) - batch["y"]) ** 2

    def train_data(self) -> Source:
        return Source(self.config.sample_s)


if __name__ == "__main__":
    et.main(Paced)
