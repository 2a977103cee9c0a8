"""Every recipe: its loss, its gradient, its evaluation; without workers and without a run directory."""

import dataclasses
import functools
import importlib
import re
import sys
import tomllib
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import elastic_train as et
from elastic_train import cli
from elastic_train.data.source import read

RECIPES = {
    "linear": "Linear",
    "digits_mlp": "Digits",
    "digits_cnn": "DigitsCNN",
    "byte_lm": "ByteLM",
    "gpt": "GPTPretraining",
}
EVALUATED = ["digits_mlp", "digits_cnn", "byte_lm"]
ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))


def trainer_class(recipe: str) -> type[et.Trainer]:
    return getattr(importlib.import_module(f"recipes.{recipe}"), RECIPES[recipe])


def config_class(recipe: str) -> type[et.Config]:
    return typing.get_type_hints(trainer_class(recipe))["config"]


def build(recipe: str) -> et.Trainer:
    return trainer_class(recipe)(config_class(recipe)())


@functools.cache
def initial(recipe: str) -> tuple[nnx.GraphDef, nnx.State]:
    """A model's parts, made in one compiled program: one operation at a time they take seconds to compile."""
    return nnx.split(nnx.jit(lambda: build(recipe).model(nnx.Rngs(0)))())


def model_of(recipe: str) -> nnx.Module:
    """A model of its own for each test."""
    return nnx.merge(*initial(recipe), copy=True)


def rows(source: et.DataSource, count: int) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value) for name, value in read(source, range(count)).items()}


def losses_of(trainer: et.Trainer, model: nnx.Module, batch: dict[str, jax.Array], seed: int) -> jax.Array:
    result = trainer.loss(model, batch, nnx.Rngs(seed))
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loss_has_one_value_per_example_and_a_gradient_for_every_parameter(recipe: str):
    trainer = build(recipe)
    model = model_of(recipe)
    model.train()
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)
    batch = rows(trainer.train_data(), 5)

    @jax.jit
    def gradient(parameters: nnx.State) -> tuple[jax.Array, nnx.State]:
        def total(parameters: nnx.State) -> tuple[jax.Array, jax.Array]:
            losses = losses_of(trainer, nnx.merge(graph, parameters, rest, copy=True), batch, seed=1)
            return losses.sum(), losses

        (_, losses), gradients = jax.value_and_grad(total, has_aux=True)(parameters)
        return losses, gradients

    losses, gradients = gradient(parameters)
    assert losses.shape == (5,) and losses.dtype == jnp.float32
    assert jnp.isfinite(losses).all()
    for path, leaf in jax.tree.leaves_with_path(gradients):
        assert jnp.isfinite(leaf).all() and jnp.any(leaf != 0), jax.tree_util.keystr(path)
    optimizer = trainer.optimizer()
    updates = jax.eval_shape(lambda: optimizer.update(gradients, optimizer.init(parameters), parameters)[0])
    assert jax.tree.structure(updates) == jax.tree.structure(parameters)


@pytest.mark.parametrize("recipe", EVALUATED)
def test_evaluation_gives_one_value_per_example_and_draws_nothing(recipe: str):
    trainer = build(recipe)
    model = model_of(recipe)
    model.eval()
    source = trainer.eval_data()
    assert source is not None
    batch = rows(source, 4)
    evaluate = nnx.jit(trainer.evaluate)
    once, again = evaluate(model, batch), evaluate(model, batch)
    assert "loss" in once
    for name, values in once.items():
        assert values.shape == (4,), name
        np.testing.assert_array_equal(values, again[name])


@pytest.mark.parametrize("recipe", ["digits_cnn", "byte_lm"])
def test_dropout_takes_its_key_from_the_trainer(recipe: str):
    trainer = build(recipe)
    batch = rows(trainer.train_data(), 4)

    @nnx.jit
    def compute(model: nnx.Module, key: jax.Array) -> jax.Array:
        result = trainer.loss(model, batch, nnx.Rngs(key))
        return result[0] if isinstance(result, tuple) else result

    def losses(seed: int) -> np.ndarray:
        model = model_of(recipe)
        model.train()
        return np.asarray(compute(model, jax.random.key(seed)))

    np.testing.assert_array_equal(losses(1), losses(1))
    assert (losses(1) != losses(2)).any()


def test_the_convolutional_network_moves_its_batch_statistics_in_training_only():
    trainer = build("digits_cnn")
    batch = rows(trainer.train_data(), 8)
    model = model_of("digits_cnn")
    before = jax.tree.leaves(nnx.state(model, nnx.BatchStat))
    model.eval()
    nnx.jit(trainer.evaluate)(model, batch)
    for old, new in zip(before, jax.tree.leaves(nnx.state(model, nnx.BatchStat)), strict=True):
        np.testing.assert_array_equal(old, new)
    model.train()
    nnx.jit(trainer.loss)(model, batch, nnx.Rngs(1))
    for old, new in zip(before, jax.tree.leaves(nnx.state(model, nnx.BatchStat)), strict=True):
        assert (old != new).any()


def test_the_digits_are_split_once_and_for_all_without_importing_scikit_learn():
    imported_before = "sklearn" in sys.modules
    trainer = build("digits_mlp")
    train, test = trainer.train_data(), trainer.eval_data()
    assert test is not None
    assert ("sklearn" in sys.modules) == imported_before
    assert (len(train), len(test)) == (1437, 360)
    images = read(train, range(len(train)))
    assert images["image"].shape == (1437, 64) and images["image"].dtype == np.float32
    assert images["image"].min() == 0 and images["image"].max() == 1
    labels = np.concatenate([images["label"], read(test, range(len(test)))["label"]])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_byte_model_cannot_see_the_future():
    model = model_of("byte_lm")
    model.eval()
    tokens = jnp.zeros((1, 16), jnp.int32)
    changed = tokens.at[0, 9].set(7)
    logits = nnx.jit(lambda model, tokens: model(tokens))
    same = jnp.all(jnp.isclose(logits(model, tokens), logits(model, changed), atol=1e-5), axis=(0, 2))
    assert same.tolist() == [True] * 9 + [False] * 7


def test_made_up_tokens_depend_on_the_sample_id_alone():
    from recipes.gpt import SyntheticTokens

    source = SyntheticTokens(num_samples=1000, length=32, vocab=97)
    batch = read(source, [5, 999, 5])["tokens"]
    assert batch.shape == (3, 33) and batch.dtype == np.int32
    np.testing.assert_array_equal(batch[0], batch[2])
    np.testing.assert_array_equal(batch[1], source[-1]["tokens"])
    assert set(np.unique(np.diff(batch) % 97)) == {1, 2, 3, 4}
    assert len({row.tobytes() for row in read(source, range(1000))["tokens"]}) == 1000


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_config_files_fit_their_recipe(path: Path):
    recipe = path.stem if path.stem in RECIPES else path.stem.rpartition("_")[0]
    config = config_class(recipe)(**tomllib.loads(path.read_text()))
    trainer = trainer_class(recipe)(config)
    trainer.optimizer()
    model = nnx.eval_shape(lambda: trainer.model(nnx.Rngs(0)))
    millions = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) / 1e6
    if recipe == "gpt":
        assert int(millions) == int(path.stem.removeprefix("gpt_").removesuffix("m"))


def test_gpt_settings_are_checked():
    gpt = config_class("gpt")
    with pytest.raises(ValueError, match=r"heads = 5: must divide width \(64\)"):
        gpt(heads=5)
    with pytest.raises(ValueError, match="attention = 'flash': use auto, xla or cudnn"):
        gpt(attention="flash")


def test_the_commands_in_the_readme_can_be_typed_in_their_order(monkeypatch: pytest.MonkeyPatch):
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    texts = [command.strip() for block in blocks for line in block.splitlines() for command in line.split("&&")]
    commands = [re.sub(r"^([A-Z_]+=\S+ )+", "", text).split() for text in texts]  # without variables set for them
    activated = commands.index([".", ".venv/bin/activate"])
    by_path = {"python3", ".venv/bin/pip", ".venv/bin/python"}
    assert {command[0] for command in commands[:activated]} == by_path
    assert {command[0] for command in commands[activated + 1 :]} == {"elastic-train", "python"}
    understood: list[object] = []
    monkeypatch.setattr(cli, "_perform", lambda command: understood.append(command) or 0)
    for name, *argv in commands[activated + 1 :]:
        if name == "elastic-train":
            assert cli.main(argv) == 0
        else:
            understood.append(cli.parse_plain(argv[1:], prog=argv[0]))
    assert len(understood) == len(commands) - activated - 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_configs_are_frozen_and_keyword_only(recipe: str):
    config = config_class(recipe)()
    assert all(field.kw_only for field in dataclasses.fields(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 1


def test_the_recipe_in_the_readme_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    readme = (ROOT / "README.md").read_text()
    (tmp_path / "readme_recipe.py").write_text(readme.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("readme_recipe")
    trainer = module.Digits(module.DigitsConfig(width=16))
    losses = trainer.loss(trainer.model(nnx.Rngs(0)), rows(trainer.train_data(), 3), nnx.Rngs(1))
    assert losses.shape == (3,)
    trainer.optimizer()
