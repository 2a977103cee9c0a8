"""Classify 8x8 images of handwritten digits with a small convolutional network.

The network has batch statistics, which change in every step without being trained, and dropout, which
draws random numbers in every step. Both stay exact when workers die and return.

    elastic-train run recipes/digits_cnn.py --workers 3
"""

from dataclasses import dataclass

import jax
import optax
from flax import nnx

import elastic_train as et
from recipes.digits_mlp import REQUIRES, load_digits, score


@dataclass(frozen=True, kw_only=True)
class DigitsCNNConfig(et.Config):
    """Attributes:
    channels: of the first convolution; the second has twice as many.
    dropout: share of the features before the last layer that is set to zero.
    learning_rate: its highest value; it falls to 0 along half a cosine.
    clip_norm: gradients with a larger norm are scaled down to it.
    """

    steps: int = 200
    batch_size: int = 128
    eval_every: int = 100
    channels: int = 16
    dropout: float = 0.2
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    clip_norm: float = 1.0


class CNN(nnx.Module):
    """float[rows, 64] -> float[rows, 10]: the logits of the ten digits."""

    def __init__(self, channels: int, dropout: float, *, rngs: nnx.Rngs) -> None:
        # A momentum of 0.9, not 0.99: a run has a few hundred steps only.
        self.first = nnx.Conv(1, channels, (3, 3), use_bias=False, rngs=rngs)
        self.first_norm = nnx.BatchNorm(channels, momentum=0.9, rngs=rngs)
        self.second = nnx.Conv(channels, 2 * channels, (3, 3), strides=2, use_bias=False, rngs=rngs)
        self.second_norm = nnx.BatchNorm(2 * channels, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(dropout)
        self.last = nnx.Linear(4 * 4 * 2 * channels, 10, rngs=rngs)

    def __call__(self, image: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        rows = image.shape[0]
        features = nnx.relu(self.first_norm(self.first(image.reshape(rows, 8, 8, 1))))
        features = nnx.relu(self.second_norm(self.second(features)))
        return self.last(self.dropout(features.reshape(rows, -1), rngs=rngs))


class DigitsCNN(et.Trainer):
    """Classify 8x8 images of handwritten digits, with batch statistics and dropout."""

    config: DigitsCNNConfig
    requires = REQUIRES

    def model(self, rngs: nnx.Rngs) -> CNN:
        return CNN(self.config.channels, self.config.dropout, rngs=rngs)

    def schedule(self) -> optax.Schedule:
        return optax.cosine_decay_schedule(self.config.learning_rate, self.config.steps)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.config.clip_norm),
            optax.adamw(self.schedule(), weight_decay=self.config.weight_decay),
        )

    def loss(self, model: CNN, batch: dict[str, jax.Array], rngs: nnx.Rngs) -> tuple[jax.Array, dict[str, jax.Array]]:
        return score(model(batch["image"], rngs), batch["label"])

    def train_data(self) -> et.DataSource:
        return load_digits("train")

    def eval_data(self) -> et.DataSource:
        return load_digits("test")

    def evaluate(self, model: CNN, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        losses, metrics = score(model(batch["image"]), batch["label"])
        return {"loss": losses, **metrics}


if __name__ == "__main__":
    et.main(DigitsCNN)
