"""Classify 8x8 images of handwritten digits with a small multilayer perceptron.

1797 real images, which come with scikit-learn as a file; about 98 % of the held-out ones are classified
correctly after a few seconds of training.

    elastic-train run recipes/digits_mlp.py --workers 3
"""

import csv
import gzip
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import elastic_train as et

REQUIRES = {"sklearn": "pip install 'elastic-train[recipes]'"}


@dataclass(frozen=True, kw_only=True)
class DigitsConfig(et.Config):
    """Attributes:
    width: size of the two hidden layers.
    learning_rate: its highest value; it falls to 0 along half a cosine.
    """

    steps: int = 300
    batch_size: int = 128
    eval_every: int = 100
    width: int = 128
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4


class MLP(nnx.Module):
    """float[rows, 64] -> float[rows, 10]: the logits of the ten digits."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.second = nnx.Linear(width, width, rngs=rngs)
        self.last = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        hidden = nnx.relu(self.first(image))
        return self.last(nnx.relu(self.second(hidden)))


class Digits(et.Trainer):
    """Classify 8x8 images of handwritten digits."""

    config: DigitsConfig
    requires = REQUIRES

    def model(self, rngs: nnx.Rngs) -> MLP:
        return MLP(self.config.width, rngs=rngs)

    def schedule(self) -> optax.Schedule:
        return optax.cosine_decay_schedule(self.config.learning_rate, self.config.steps)

    def optimizer(self) -> optax.GradientTransformation:
        return optax.adamw(self.schedule(), weight_decay=self.config.weight_decay)

    def loss(self, model: MLP, batch: dict[str, jax.Array], rngs: nnx.Rngs) -> tuple[jax.Array, dict[str, jax.Array]]:
        return score(model(batch["image"]), batch["label"])

    def train_data(self) -> et.DataSource:
        return load_digits("train")

    def eval_data(self) -> et.DataSource:
        return load_digits("test")

    def evaluate(self, model: MLP, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        losses, metrics = score(model(batch["image"]), batch["label"])
        return {"loss": losses, **metrics}


def score(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy, float[rows], and the accuracy: 1 where the largest logit is the label's, else 0."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses, {"accuracy": (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)}


def load_digits(split: str) -> et.ArraySource:
    """The images of `split`: "train" (four in five) or "test" (the rest), the same on every machine.

    Samples are {"image": float32[64] in 0 … 1, "label": int32}.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            f"the digits images are a file of scikit-learn, which is not installed: {REQUIRES['sklearn']}"
        )
    # Only the file is read: importing scikit-learn takes about a second, at every restart of a worker.
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt", newline="") as lines:
        table = np.array(list(csv.reader(lines)), dtype=np.float32)
    order = np.random.default_rng(0).permutation(len(table))
    num_train = len(table) * 4 // 5
    rows = table[order[:num_train] if split == "train" else order[num_train:]]
    return et.ArraySource(image=rows[:, :64] / 16, label=rows[:, 64].astype(np.int32))


if __name__ == "__main__":
    et.main(Digits)
