"""A GPT of adjustable size, for GPUs.

The tokens are made up from their ids, so no data set is needed; see `SyntheticTokens`. Parameters are
float32, arithmetic is bfloat16. The default size fits a test on a CPU; `configs/` has the usual ones:

    elastic-train run recipes/gpt.py --workers 4 --config configs/gpt_124m.toml
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import elastic_train as et
from elastic_train.config import require

Attention = Literal["auto", "xla", "cudnn"]


@dataclass(frozen=True, kw_only=True)
class GPTConfig(et.Config):
    """Attributes:
    context: length of a training sample in tokens.
    width: size of a layer's features; `heads` must divide it.
    attention: "cudnn" is flash attention on NVIDIA GPUs, "xla" runs everywhere; "auto" is the
      former on a GPU, else the latter.
    learning_rate: its highest value, reached after `warmup_steps`; then it falls along half a cosine.
    clip_norm: gradients with a larger norm are scaled down to it.
    num_samples: size of the made-up data set.
    """

    steps: int = 100
    batch_size: int = 8
    layers: int = 2
    width: int = 64
    heads: int = 2
    vocab: int = 256
    context: int = 64
    attention: Attention = "auto"
    learning_rate: float = 6e-4
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    num_samples: int = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.width % self.heads == 0, "heads", self.heads, f"must divide width ({self.width})")
        require(self.attention in ("auto", "xla", "cudnn"), "attention", self.attention, "use auto, xla or cudnn")


class Blocks(nnx.Module):
    """All layers. Every parameter has a leading dimension for the layer, so one compiled block serves all.

    float32[rows, context, width] -> the same.
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        layers, width = config.layers, config.width
        # Each layer adds to the residual stream twice; the sum should not grow with the number of layers.
        into_residual = 0.02 / np.sqrt(2 * layers)
        self.attention_norm = nnx.Param(jnp.ones((layers, width)))
        self.query_key_value = normal(rngs, (layers, width, 3 * width), 0.02)
        self.attention_out = normal(rngs, (layers, width, width), into_residual)
        self.mlp_norm = nnx.Param(jnp.ones((layers, width)))
        self.mlp_in = normal(rngs, (layers, width, 4 * width), 0.02)
        self.mlp_out = normal(rngs, (layers, 4 * width, width), into_residual)
        self.heads = config.heads
        self.attention: Attention = config.attention

    def __call__(self, hidden: jax.Array) -> jax.Array:
        weights = {
            name: getattr(self, name)[...]
            for name in (
                "attention_norm",
                "query_key_value",
                "attention_out",
                "mlp_norm",
                "mlp_in",
                "mlp_out",
            )
        }
        block = partial(block_forward, heads=self.heads, implementation=attention_implementation(self.attention))
        # Matrix products are kept for the backward pass; everything cheaper is computed a second time.
        block = jax.checkpoint(block, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        hidden, _ = jax.lax.scan(lambda carry, layer: (block(carry, layer), None), hidden, weights)
        return hidden


def block_forward(
    hidden: jax.Array, weights: dict[str, jax.Array], *, heads: int, implementation: Literal["xla", "cudnn"]
) -> jax.Array:
    """One layer: attention to earlier tokens, then a two-layer perceptron. bfloat16[rows, context, width]."""
    rows, context, width = hidden.shape
    cast = {name: weight.astype(hidden.dtype) for name, weight in weights.items()}
    projected = rms_norm(hidden, weights["attention_norm"]) @ cast["query_key_value"]
    query, key, value = (
        part.reshape(rows, context, heads, width // heads) for part in jnp.split(projected, 3, axis=-1)
    )
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=implementation)
    hidden = hidden + attended.reshape(rows, context, width) @ cast["attention_out"]
    expanded = jax.nn.gelu(rms_norm(hidden, weights["mlp_norm"]) @ cast["mlp_in"])
    return hidden + expanded @ cast["mlp_out"]


def rms_norm(hidden: jax.Array, scale: jax.Array) -> jax.Array:
    """`hidden` divided by its root mean square, in float32, times `scale`; in the dtype of `hidden`."""
    precise = hidden.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(precise), axis=-1, keepdims=True)
    return (precise * jax.lax.rsqrt(mean_square + 1e-6) * scale).astype(hidden.dtype)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], deviation: float) -> nnx.Param:
    return nnx.Param(deviation * jax.random.normal(rngs.params(), shape))


def attention_implementation(choice: Attention) -> Literal["xla", "cudnn"]:
    if choice != "auto":
        return choice
    return "cudnn" if jax.default_backend() == "gpu" else "xla"


class GPT(nnx.Module):
    """int[rows, context] -> bfloat16[rows, context, vocab]: the logits of each next token."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.tokens = normal(rngs, (config.vocab, config.width), 0.02)
        self.positions = normal(rngs, (config.context, config.width), 0.02)
        self.blocks = Blocks(config, rngs=rngs)
        self.norm = nnx.Param(jnp.ones(config.width))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        hidden = (self.tokens[...][tokens] + self.positions[...]).astype(jnp.bfloat16)
        hidden = rms_norm(self.blocks(hidden), self.norm[...])
        return hidden @ self.tokens[...].T.astype(jnp.bfloat16)


class GPTPretraining(et.Trainer):
    """Predict the next token of made-up text."""

    config: GPTConfig

    def model(self, rngs: nnx.Rngs) -> GPT:
        return GPT(self.config, rngs=rngs)

    def schedule(self) -> optax.Schedule:
        return optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=self.config.learning_rate,
            warmup_steps=min(self.config.warmup_steps, self.config.steps // 2),
            decay_steps=self.config.steps,
            end_value=0.1 * self.config.learning_rate,
        )

    def optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.config.clip_norm),
            optax.adamw(self.schedule(), b2=0.95, weight_decay=self.config.weight_decay),
        )

    def loss(self, model: GPT, batch: dict[str, jax.Array], rngs: nnx.Rngs) -> jax.Array:
        logits = model(batch["tokens"][:, :-1]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:])
        return losses.mean(axis=-1)

    def train_data(self) -> et.DataSource:
        return SyntheticTokens(self.config.num_samples, self.config.context, self.config.vocab)


class SyntheticTokens:
    """Made-up text: sample `i` is {"tokens": int32[length + 1]}, computed from `i` alone.

    Each token is its predecessor plus 1, 2, 3 or 4, modulo `vocab`. So there is something to learn, slowly
    for a large `vocab`, and the lowest possible loss is known: ln 4 = 1.386.
    """

    def __init__(self, num_samples: int, length: int, vocab: int) -> None:
        self._num_samples = num_samples
        self._length = length
        self._vocab = vocab

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"tokens": self.batch(np.array([range(len(self))[index]]))["tokens"][0]}

    def batch(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        counters = ids.astype(np.uint64)[:, None] * np.uint64(self._length + 1)
        bits = splitmix64(counters + np.arange(self._length + 1, dtype=np.uint64))
        first = bits[:, :1] % np.uint64(self._vocab)
        increments = (bits[:, 1:] >> np.uint64(62)) + np.uint64(1)
        tokens = np.cumsum(np.concatenate([first, increments], axis=1), axis=1) % np.uint64(self._vocab)
        return {"tokens": tokens.astype(np.int32)}


def splitmix64(counters: np.ndarray) -> np.ndarray:
    """Well-mixed uint64 of each uint64 counter: SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = (counters + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


if __name__ == "__main__":
    et.main(GPTPretraining)
