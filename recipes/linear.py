"""Learn one weight: y = 10 x + noise.

The smallest recipe there is. Steps take well under a millisecond of arithmetic, so a run shows what the
framework itself costs.

    elastic-train run recipes/linear.py --workers 3
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import elastic_train as et


@dataclass(frozen=True, kw_only=True)
class LinearConfig(et.Config):
    """Attributes:
    learning_rate: the inputs reach 300, so the loss is steep; 4e-5 would already diverge.
    data_seed: start of the training data; `seed` decides only the initial weight and the order.
    """

    steps: int = 200
    batch_size: int = 40
    learning_rate: float = 1e-6
    data_seed: int = 42


class Slope(nnx.Module):
    """float[rows] -> float[rows]: x times one weight."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (1,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.weight[...]


class Linear(et.Trainer):
    """Fit a line through the origin with gradient descent."""

    config: LinearConfig

    def model(self, rngs: nnx.Rngs) -> Slope:
        return Slope(rngs=rngs)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.sgd(self.config.learning_rate)

    def loss(self, model: Slope, batch: dict[str, jax.Array], rngs: nnx.Rngs) -> jax.Array:
        return jnp.square(model(batch["x"]) - batch["y"])

    def train_data(self) -> et.DataSource:
        generator = np.random.default_rng(self.config.data_seed)
        x = generator.permutation(np.arange(-300.0, 300.0)).astype(np.float32)
        noise = generator.standard_normal(x.shape, dtype=np.float32)
        return et.ArraySource(x=x, y=10 * x + noise)


if __name__ == "__main__":
    et.main(Linear)
