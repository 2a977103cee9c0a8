"""Budgets of failures, and what is said of gradients that are not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import elastic_train as et
from elastic_train.config import ConfigError, FaultConfig
from elastic_train.errors import NonFiniteError
from elastic_train.membership.group import Identity, NonFinite
from elastic_train.plain import Nobody, fit_alone
from elastic_train.policies import Failures, action_message, stop_message
from elastic_train.state import state_sha256
from elastic_train.step.flat import Cut, Layout

FOUND = NonFinite((Identity(1, 0, 2),), (5,), 3, 2)


def test_a_step_has_a_budget_of_attempts():
    failures = Failures(3)
    assert not failures.next_is_last
    failures.raised()
    failures.raised()
    assert failures.next_is_last
    failures.committed()
    assert not failures.next_is_last


def test_hooks_are_counted_from_step_to_step_until_one_succeeds():
    failures = Failures(3)
    for number in range(3):
        assert failures.next_is_last == (number == 3)
        failures.hook(raised=True)
        failures.raised()
        failures.committed()
    assert failures.next_is_last
    failures.hook(raised=False)
    assert not failures.next_is_last


def test_messages_say_where_what_and_what_to_do():
    assert action_message(FOUND, 21, float("nan"), "retry", FaultConfig()) == (
        "step 21: not finite is the gradient or the loss of shard 5 on slot 1 and 2 more (loss nan): "
        "trying the step again (2 of 2 times)"
    )
    skip = FaultConfig(nonfinite="skip")
    assert "skipping the step (2 in a row, at most 10)" in action_message(FOUND, 21, 0.5, "skip", skip)
    text = stop_message(FOUND, 21, float("inf"), FaultConfig())
    assert "It was so 2 times in a row" in text and "faults.nonfinite=skip" in text
    overflow = NonFinite((), (), 0, 1)
    assert "although every shard's is finite" in stop_message(overflow, 3, 1.0, FaultConfig(nonfinite="stop"))


@pytest.mark.parametrize(
    "wrong", [{"nonfinite": "ignore"}, {"undecided": "newest"}, {"max_skipped_steps": 0}, {"fingerprint_every": -1}]
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(ConfigError, match=f"faults.{next(iter(wrong))} = "):
        FaultConfig(**wrong)


TREE = {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4, jnp.int32), "c": jnp.float32(1), "d": jnp.zeros(2)}


@pytest.mark.parametrize(
    ("changed", "is_finite"),
    [
        ({}, True),
        ({"c": jnp.float32(jnp.nan)}, True),
        ({"d": jnp.array([0.0, jnp.inf])}, False),
        ({"a": jnp.full((2, 3), jnp.nan)}, False),
    ],
)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_what_must_be_finite_is_what_was_chosen_and_nothing_else(changed, is_finite, num_parts):
    leaves = tuple(leaf[None] for leaf in {**TREE, **changed}.values())
    layout = Layout([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves], [True, True, False, True], 2)
    assert bool(layout.is_finite(leaves)) == is_finite
    for large_bytes in (8, 10**9):
        cut = Cut(layout, num_parts, large_bytes)
        pieces = cut.pieces(leaves)
        found = [bool(cut.part_is_finite([piece[i] for piece in pieces], i)) for i in range(num_parts)]
        assert all(found) == is_finite


def test_a_total_without_weight_is_known():
    leaves = tuple(leaf[None] for leaf in TREE.values())
    layout = Layout([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves], weight=2)
    assert bool(layout.has_weight(leaves))
    assert not bool(layout.has_weight((*leaves[:2], jnp.zeros(1), leaves[3])))


class Line(et.Trainer):
    """Loss of sample 13 is what `bad` says; all others are ordinary."""

    config: et.Config
    bad = np.nan

    def model(self, rngs):
        return nnx.Linear(1, 1, rngs=rngs)

    def optimizer(self):
        return optax.adam(0.1)

    def loss(self, model, batch, rngs):
        values = jnp.square(model(batch["x"])[:, 0] - batch["y"])
        return values * batch["factor"], {"odd": values / 0.0}

    def train_data(self):
        factor = np.ones(40, np.float32)
        factor[13] = self.bad
        return et.ArraySource(x=np.ones((40, 1), np.float32), y=np.arange(40, dtype=np.float32), factor=factor)


class Notes(Nobody):
    def __init__(self):
        self.events, self.records = [], []

    def noted(self, event, show, **fields):
        self.events.append((event, fields))

    def record(self, record, flush=False, send=True):
        self.records.append(record)


def config(**faults) -> et.Config:
    return et.Config(steps=5, batch_size=8, faults=FaultConfig(**faults))


def test_skip_moves_on_in_the_data_and_changes_nothing_else():
    """A user's own metric may be anything: it is not looked at."""
    outside = Notes()
    state = fit_alone(Line(config(nonfinite="skip")), outside).state
    skipped = [record["step"] for record in outside.records if record.get("skipped")]
    assert len(skipped) == 1 and len(outside.records) == 5
    assert (state.step, state.samples) == (5, 40)
    assert int(state.opt_state[0].count) == 4
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))
    again = fit_alone(Line(config(nonfinite="skip"))).state
    assert state_sha256(again) == state_sha256(state)
    ((name, fields),) = outside.events
    assert name == "gradient_not_finite" and fields["action"] == "skip" and fields["slots"] == [0]
    assert np.isnan(outside.records[skipped[0] - 1]["loss"])


@pytest.mark.parametrize(("policy", "attempts"), [("stop", 1), ("retry", 3)])
def test_a_lasting_fault_ends_the_run_with_nothing_of_the_step_applied(policy, attempts):
    outside = Notes()
    with pytest.raises(NonFiniteError, match="Nothing of this step was applied"):
        fit_alone(Line(config(nonfinite=policy)), outside)
    assert [fields["in_a_row"] for _, fields in outside.events] == list(range(1, attempts + 1))
    assert outside.events[-1][1]["action"] == "stop"
    assert outside.events[0][1]["step"] == (outside.records[-1]["step"] if outside.records else 0)


def test_model_state_may_hold_infinities():
    class Masked(Line):
        bad = 1.0

        def model(self, rngs):
            model = nnx.Linear(1, 1, rngs=rngs)
            model.mask = nnx.Variable(jnp.array([0.0, -jnp.inf]))
            return model

    assert fit_alone(Masked(config(nonfinite="stop"))).state.step == 5


def test_too_many_skips_in_a_row_end_the_run():
    class Always(Line):
        bad = 1.0

        def loss(self, model, batch, rngs):
            return jnp.square(model(batch["x"])[:, 0]) / 0.0

    outside = Notes()
    with pytest.raises(NonFiniteError, match=r"2 steps in a row were skipped already \(faults.max_skipped_steps\)"):
        fit_alone(Always(config(nonfinite="skip", max_skipped_steps=2)), outside)
    assert [fields["action"] for _, fields in outside.events] == ["skip", "skip", "stop"]


def test_a_batch_without_any_weight_is_not_divided_by_zero():
    class Weightless(Line):
        def loss(self, model, batch, rngs):
            return et.WeightedSum(jnp.sum(model(batch["x"])), jnp.float32(0))

    with pytest.raises(NonFiniteError, match="has no weight"):
        fit_alone(Weightless(config(nonfinite="stop")))


def test_a_sum_that_overflows_is_not_finite_though_every_part_is():
    class Huge(Line):
        bad = 1.0

        def loss(self, model, batch, rngs):
            return jnp.sum(model.bias[...]) * 0 + jnp.full(batch["x"].shape[0], 3e38, jnp.float32)

    with pytest.raises(NonFiniteError, match="although every shard's is finite"):
        fit_alone(Huge(config(nonfinite="stop")))
