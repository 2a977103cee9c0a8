"""Predict the next byte of English text with a small transformer.

The text is the reference of the Python language that ships inside Python (`pydoc_data.topics`), close to
half a million characters; it differs between Python versions, so compare losses within one version only.

    elastic-train run recipes/byte_lm.py --workers 3
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import elastic_train as et
from elastic_train.data.source import TokenSource


@dataclass(frozen=True, kw_only=True)
class ByteLMConfig(et.Config):
    """Attributes:
    context: length of a training sample in bytes.
    width: size of a layer's features; `heads` must divide it.
    learning_rate: its highest value, reached after `warmup_steps`; then it falls along half a cosine.
    clip_norm: gradients with a larger norm are scaled down to it.
    """

    steps: int = 500
    batch_size: int = 16
    eval_every: int = 250
    context: int = 64
    layers: int = 2
    width: int = 64
    heads: int = 4
    dropout: float = 0.1
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    clip_norm: float = 1.0


class Block(nnx.Module):
    """float[rows, length, width] -> the same: attention to earlier bytes, then a two-layer perceptron."""

    def __init__(self, config: ByteLMConfig, *, rngs: nnx.Rngs) -> None:
        width = config.width
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.query_key_value = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp_in = nnx.Linear(width, 4 * width, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, hidden: jax.Array, rngs: nnx.Rngs | None) -> jax.Array:
        rows, length, width = hidden.shape
        projected = self.query_key_value(self.attention_norm(hidden))
        heads = projected.reshape(rows, length, 3, self.heads, width // self.heads)
        query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        attended = self.attention_out(attended.reshape(rows, length, width))
        hidden = hidden + self.dropout(attended, rngs=rngs)
        updated = self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(hidden))))
        return hidden + self.dropout(updated, rngs=rngs)


class Transformer(nnx.Module):
    """int[rows, length] -> float[rows, length, 256]: the logits of each next byte."""

    def __init__(self, config: ByteLMConfig, *, rngs: nnx.Rngs) -> None:
        self.bytes = nnx.Embed(256, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.context, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.logits = nnx.Linear(config.width, 256, rngs=rngs)

    def __call__(self, tokens: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        hidden = self.bytes(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden, rngs)
        return self.logits(self.norm(hidden))


class ByteLM(et.Trainer):
    """Predict the next byte of the Python reference."""

    config: ByteLMConfig

    def model(self, rngs: nnx.Rngs) -> Transformer:
        return Transformer(self.config, rngs=rngs)

    def schedule(self) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.config.learning_rate,
            warmup_steps=min(self.config.warmup_steps, self.config.steps // 2),
            decay_steps=self.config.steps,
        )

    def optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.config.clip_norm),
            optax.adamw(self.schedule(), weight_decay=self.config.weight_decay),
        )

    def loss(self, model: Transformer, batch: dict[str, jax.Array], rngs: nnx.Rngs) -> jax.Array:
        return next_byte_loss(model(batch["tokens"][:, :-1], rngs), batch["tokens"])

    def train_data(self) -> et.DataSource:
        text = python_reference()
        return TokenSource(text[: len(text) * 9 // 10], self.config.context)

    def eval_data(self) -> et.DataSource:
        text = python_reference()
        return TokenSource(text[len(text) * 9 // 10 :], self.config.context)

    def evaluate(self, model: Transformer, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        losses = next_byte_loss(model(batch["tokens"][:, :-1]), batch["tokens"])
        return {"loss": losses, "bits_per_byte": losses / jnp.log(2.0)}


def next_byte_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """float[rows]: mean over a row's bytes, of which every row has equally many."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(axis=-1)


def python_reference() -> np.ndarray:
    """uint8[bytes]: all topics of Python's built-in help, in alphabetical order."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.frombuffer(text.encode(), dtype=np.uint8)


if __name__ == "__main__":
    et.main(ByteLM)
