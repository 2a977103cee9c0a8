"""The result is right, not only repeatable: it equals a plain JAX and Optax loop written here."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import elastic_train as et
from elastic_train.data.sampler import Sampler
from elastic_train.plain import Nobody, fit_alone
from elastic_train.step.model import parts_of

NUM_SAMPLES = 200


@dataclass(frozen=True, kw_only=True)
class RegressionConfig(et.Config):
    steps: int = 12
    batch_size: int = 24
    dtype: str = "float32"


class Net(nnx.Module):
    def __init__(self, dtype, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(5, 16, rngs=rngs, param_dtype=dtype, dtype=dtype)
        self.second = nnx.Linear(16, 1, rngs=rngs, param_dtype=dtype, dtype=dtype)

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))[:, 0]


def samples(dtype: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    x = generator.standard_normal((NUM_SAMPLES, 5))
    return {"x": x.astype(dtype), "y": np.sin(x.sum(axis=1)).astype(dtype)}


class Regression(et.Trainer):
    config: RegressionConfig

    def model(self, rngs):
        return Net(jnp.dtype(self.config.dtype), rngs)

    def optimizer(self):
        return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))

    def loss(self, model, batch, rngs):
        return jnp.square(model(batch["x"]) - batch["y"])

    def train_data(self):
        return et.ArraySource(**samples(self.config.dtype))


def plain_loop(config: RegressionConfig, num_samples: int = NUM_SAMPLES):
    """Parameters after a loop that knows nothing of shards. Adds no rounding of its own: sum, then divide once."""
    trainer = Regression(config)
    graphdef, template = nnx.split(trainer.model(nnx.Rngs(config.seed)), nnx.Param)
    # Plain dicts, as the framework holds them: the clipped norm is a sum over leaves, in the tree's order.
    state = nnx.to_pure_dict(template)
    transform = trainer.optimizer()
    data = samples(config.dtype)

    def loss_sum(params, batch):
        values = jax.tree.map(lambda leaf: leaf, template)
        nnx.replace_by_pure_dict(values, params)
        model = nnx.merge(graphdef, values)
        return jnp.sum(jnp.square(model(batch["x"]) - batch["y"]))

    @jax.jit
    def gradients(params, batch):
        return jax.grad(loss_sum)(params, batch)

    @jax.jit
    def update(params, opt_state, grads, count):
        # An argument, not a constant: XLA turns a division by a constant into a product, which rounds differently.
        updates, opt_state = transform.update(jax.tree.map(lambda g: g / count, grads), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = transform.init(state)
    count = jnp.asarray(config.batch_size, config.dtype)
    sampler = Sampler(num_samples, config.batch_size, 1, config.seed)
    for step in range(config.steps):
        ids, weight = sampler.shard_ids(step * config.batch_size, 0)
        assert weight.all()
        batch = {name: values[ids] for name, values in data.items()}
        state, opt_state = update(state, opt_state, gradients(state, batch), count)
    return state


def leaves(tree) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_one_shard_equals_a_plain_loop_bit_for_bit():
    config = RegressionConfig(shards=1)
    ours = fit_alone(Regression(config)).state.params
    for mine, theirs in zip(leaves(ours), leaves(plain_loop(config)), strict=True):
        assert mine.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("num_shards", [2, 5, 7, 8, 24])
def test_many_shards_equal_it_within_rounding(num_shards):
    config = RegressionConfig(shards=num_shards)
    ours = fit_alone(Regression(config)).state.params
    # A gradient is a sum of 24 terms: reordered, it moves by at most 24 rounding units of the sum of magnitudes.
    # Adam divides by the gradient's own size, so one step moves a weight by at most its rate times that relative
    # change (taken here with a condition number of 50), and 12 steps add up.
    unit = np.finfo(np.float32).eps
    tolerance = config.steps * 1e-2 * config.batch_size * unit * 50
    for mine, theirs in zip(leaves(ours), leaves(plain_loop(config)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=tolerance)


@pytest.fixture
def double_precision():
    """Not `jax.enable_x64`, which holds for this thread only: some programs are compiled in another one."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("num_shards", [1, 5, 8])
def test_in_double_precision_it_equals_it_to_1e_12(num_shards, double_precision):
    config = RegressionConfig(shards=num_shards, dtype="float64")
    ours = fit_alone(Regression(config)).state.params
    for mine, theirs in zip(leaves(ours), leaves(plain_loop(config)), strict=True):
        assert mine.dtype == np.float64
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


class Recorder(Nobody):
    def __init__(self) -> None:
        self.records: list[dict] = []

    def record(self, record, flush=False, send=True):
        self.records.append(record)


def test_uneven_shards_weigh_every_sample_once():
    """24 samples on 7 shards: some shards are padded. The mean loss of the first step must be that of 24 samples."""
    config = RegressionConfig(shards=7, steps=1)
    outside = Recorder()
    fit_alone(Regression(config), outside)
    model = Regression(config).model(nnx.Rngs(config.seed))
    ids = Sampler(NUM_SAMPLES, 24, 1, 0).shard_ids(0, 0)[0]
    data = samples("float32")
    expected = np.mean(np.square(np.asarray(model(data["x"][ids])) - data["y"][ids]))
    assert outside.records[0]["loss"] == pytest.approx(expected, rel=1e-5)


class Weighing(Regression):
    """Weighs its samples by itself, each by its own `y`; padding rows would show, since they repeat a sample."""

    def loss(self, model, batch, rngs):
        values, weights = super().loss(model, batch, rngs), 2 + batch["y"]
        return et.WeightedSum(values * weights, weights), {"y": et.WeightedSum(weights, jnp.ones_like(weights))}

    def eval_data(self):
        return et.ArraySource(**{name: values[:101] for name, values in samples(self.config.dtype).items()})


def test_padding_rows_count_in_no_sum_that_a_trainer_weighs_by_itself():
    config = RegressionConfig(shards=7, steps=1)
    outside = Recorder()
    result = fit_alone(Weighing(config), outside)
    ids = Sampler(NUM_SAMPLES, 24, 1, 0).shard_ids(0, 0)[0]
    x, y = samples("float32").values()
    model = Weighing(config).model(nnx.Rngs(config.seed))
    expected = np.average(np.square(np.asarray(model(x[ids])) - y[ids]), weights=2 + y[ids])
    assert outside.records[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert outside.records[0]["y"] == pytest.approx(np.mean(2 + y[ids]), rel=1e-6)
    assert result.metrics["eval_y"] == pytest.approx(np.mean(2 + y[:101]), rel=1e-6)


class SumsOfAll(Weighing):
    def loss(self, model, batch, rngs):
        loss, metrics = super().loss(model, batch, rngs)
        return et.WeightedSum(jnp.sum(loss.value), jnp.sum(loss.weight)), metrics


class SumsOfAllWithoutEvaluation(SumsOfAll):
    def eval_data(self):
        return None


def test_sums_of_all_samples_are_refused_where_there_are_padding_rows():
    with pytest.raises(ValueError, match=r"loss\(\): a WeightedSum of two scalars counts padding rows"):
        fit_alone(SumsOfAll(RegressionConfig(shards=7, steps=1)))
    with pytest.raises(ValueError, match=r"evaluate\(\), metric 'loss': a WeightedSum of two scalars"):
        fit_alone(SumsOfAll(RegressionConfig(shards=8, steps=1)))
    outside = Recorder()
    fit_alone(SumsOfAllWithoutEvaluation(RegressionConfig(shards=8, steps=1)), outside)
    same = Recorder()
    fit_alone(Weighing(RegressionConfig(shards=8, steps=1)), same)
    assert outside.records[0]["loss"] == pytest.approx(same.records[0]["loss"], rel=1e-6)


class Noting(nnx.Module):
    """Notes of the rows that it is called with how many there are, and its first `x` in several dtypes."""

    def __init__(self, dtype, rngs: nnx.Rngs) -> None:
        self.net = Net(dtype, rngs)
        self.num_calls, self.num_rows, self.first = (nnx.Variable(jnp.int32(0)) for _ in range(3))
        self.is_positive, self.mean = nnx.Variable(jnp.bool_(False)), nnx.Variable(jnp.float32(0))

    def __call__(self, x):
        self.num_calls[...] += 1
        self.num_rows[...] += len(x)
        self.first[...] = jnp.round(1000 * x[0, 0]).astype(jnp.int32)
        self.is_positive[...] = x[0, 0] > 0
        self.mean[...] = jnp.mean(x[:, 0])
        return self.net(x)


class Noted(Regression):
    def model(self, rngs):
        return Noting(jnp.dtype(self.config.dtype), rngs)


@pytest.mark.parametrize("num_shards", [1, 4])
def test_of_model_state_floats_are_averaged_and_all_else_is_that_of_shard_0(num_shards):
    config = RegressionConfig(shards=num_shards, steps=3)
    state = fit_alone(Noted(config)).state.model_state
    ids = Sampler(NUM_SAMPLES, 24, 1, 0).shard_ids(2 * 24, 0)[0]  # of the last step
    x = samples("float32")["x"][ids, 0]
    firsts = x[:: 24 // num_shards]
    assert num_shards == 1 or (len(set(np.round(1000 * firsts))) == num_shards and len(set(firsts > 0)) == 2)
    assert state["num_calls"] == 3 and state["num_rows"] == 3 * 24 // num_shards
    assert state["first"] == np.round(1000 * x[0]) and state["is_positive"] == (x[0] > 0)
    assert state["mean"] == pytest.approx(np.mean(x), rel=1e-5)


class BadLoss(Regression):
    def loss(self, model, batch, rngs):
        return jnp.mean(super().loss(model, batch, rngs))


def test_a_mean_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"expected one value per sample, shape \(3,\); got shape \(\)"):
        fit_alone(BadLoss(RegressionConfig()))


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(5, 5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


class Scanned(nnx.Module):
    """Layers as one, each with a random stream of its own; gives what they have made of ones."""

    def __init__(self, num_layers: int, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: Block(rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=num_layers)(make)(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


class ScannedRegression(Regression):
    def model(self, rngs):
        return Scanned(4, rngs)

    def loss(self, model, batch, rngs):
        return jnp.square(model(batch["x"]).sum(axis=1) - batch["y"])


def test_layers_that_are_scanned_have_a_random_stream_each():
    config = RegressionConfig(shards=2, steps=2)
    once, again = (leaves(fit_alone(ScannedRegression(config)).state.params) for _ in range(2))
    assert all(mine.tobytes() == theirs.tobytes() for mine, theirs in zip(once, again, strict=True))
    parts = parts_of(Scanned(4, nnx.Rngs(0)))
    params, rest = nnx.to_pure_dict(parts.params), nnx.to_pure_dict(parts.rest)
    streams = nnx.state(parts.merged(params, rest, jax.random.key(7)), nnx.RngKey)
    (keys,) = [np.asarray(jax.random.key_data(leaf)) for leaf in jax.tree.leaves(streams)]
    assert keys.shape[0] == 4 and len({key.tobytes() for key in keys}) == 4
