"""What a member says of itself, on which the watchdog rests."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import elastic_train
from elastic_train.errors import UserCodeError, last_error
from elastic_train.membership import watchdog
from elastic_train.plain import Nobody, fit_alone
from elastic_train.state import params_sha256
from elastic_train.step import reduce
from elastic_train.step.commit import Stepper
from elastic_train.step.local import LocalProgram
from tests.unit.test_reading import Reading, ReadingConfig

KNOWN = {
    *watchdog.WAITING,
    *watchdog.STEP,
    *watchdog.FIRST_STEP,
    *watchdog.EVALUATION,
    *watchdog.AT_LENGTH,
    *watchdog.SAVING,
}


def test_every_phase_is_known_to_the_watchdog() -> None:
    sources = (path.read_text() for path in Path(elastic_train.__path__[0]).rglob("*.py"))
    named = {name for source in sources for name in re.findall(r'\b_?phase\(\s*"(\w+)"', source)}
    assert named == KNOWN


class Listener(Nobody):
    """Keeps what the run tells."""

    def __init__(self) -> None:
        self.phases: list[str] = []
        self.shards = 0

    def phase(self, name: str, step: int) -> None:
        self.phases.append(name)

    def worked(self, seconds: float, num_shards: int) -> None:
        assert seconds > 0
        self.shards += num_shards


@pytest.mark.parametrize("ahead", [False, True])
def test_who_waits_for_the_others_has_done_its_own_part(monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Otherwise an endless kernel could not be told from waiting for one.

    On accelerators the exchange is queued ahead of that. On CPUs it may run in the thread that queues it.
    """
    monkeypatch.setattr(Stepper, "_queues_ahead", ahead)
    exchange, wait = reduce.Exchange.__call__, reduce.Exchange.wait
    listener = Listener()
    queued, checked = [], []

    def queueing(self, partials, vote, marks):
        assert (listener.phases[-1] == "exchange") == (not ahead)
        queued.append((partials, marks))
        return exchange(self, partials, vote, marks)

    def waiting(self, votes):
        assert listener.phases[-1] == "exchange"
        checked.append(all(leaf.is_ready() for leaf in jax.tree.leaves(queued.pop())))
        return wait(self, votes)

    monkeypatch.setattr(reduce.Exchange, "__call__", queueing)
    monkeypatch.setattr(reduce.Exchange, "wait", waiting)
    fit_alone(Reading(ReadingConfig(steps=4, eval_every=4)), listener)
    assert checked == [True] * 4
    assert listener.shards == 4 * 3
    without_repeats = [
        name for name, before in zip(listener.phases, [None, *listener.phases], strict=False) if name != before
    ]
    step = ["data", "compute", "data", "compute", "data", "compute", "exchange", "barrier", "update", "hook"]
    first = without_repeats.index("hook") + 1  # after the hook that tells of the members
    taken = [name for name in without_repeats[first : first + len(step) + 2] if name != "compile"]
    taken = [name for name, before in zip(taken, [None, *taken], strict=False) if name != before]
    assert taken[: len(step)] == step
    assert without_repeats[-5:] == ["hook", "evaluate", "compile", "gather", "barrier"]
    assert listener.phases.count("evaluate") == 4  # one for each batch


@pytest.mark.parametrize(("ahead", "waits"), [(False, False), (True, False), (True, True)])
def test_an_update_is_queued_ahead_unless_it_waits(monkeypatch: pytest.MonkeyPatch, ahead: bool, waits: bool) -> None:
    """Queued behind an exchange, one in which the host has a say may hold up who queues it until others have come."""
    monkeypatch.setattr(Stepper, "_queues_ahead", ahead)
    update, listener, phases = LocalProgram.update, Listener(), []

    def noted(self, *args):
        phases.append(next(name for name in reversed(listener.phases) if name != "compile"))
        return update(self, *args)

    compiled = LocalProgram._compile

    def compiled_as_waiting(self, *args):
        compiled(self, *args)
        self.update_waits = waits

    monkeypatch.setattr(LocalProgram, "_compile", compiled_as_waiting)
    monkeypatch.setattr(LocalProgram, "update", noted)
    fit_alone(Reading(ReadingConfig(steps=4)), listener)
    assert phases == ["compute" if ahead and not waits else "exchange"] * 4


@pytest.mark.parametrize("ahead", [False, True])
def test_an_update_that_cannot_be_queued_is_made_after_the_commit(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], ahead: bool
) -> None:
    """The exchange is under way by then, and the others count on this member."""
    config = ReadingConfig(steps=4)
    expected = params_sha256(fit_alone(Reading(config)).state)
    update, num_calls = LocalProgram.update, 0

    def fails_once(self, *args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise RuntimeError("planned: out of memory")
        return update(self, *args)

    monkeypatch.setattr(LocalProgram, "update", fails_once)
    monkeypatch.setattr(Stepper, "_queues_ahead", ahead)
    result = fit_alone(Reading(config))
    assert num_calls == 5 and params_sha256(result.state) == expected
    assert "the update could not be queued: planned: out of memory" in capfd.readouterr().err


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("shows_at_once", [False, True])
def test_an_update_that_failed_on_the_device_is_told_from_code_that_raises(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, shows_at_once: bool
) -> None:
    """Nobody waits for an update: it shows in the next step, when the loss is queued or when it is waited for."""
    shard_sums, losses = LocalProgram.shard_sums, []

    def of_lost_state(self, state, *args):
        losses.append(state.step)
        if state.step < 2:
            return shard_sums(self, state, *args)
        if shows_at_once:
            state.params["kernel"].delete()
        sums, marks = shard_sums(self, state, *args)
        for leaf in (state.params["kernel"], *sums):
            leaf.delete()
        return sums, marks

    monkeypatch.setattr(LocalProgram, "shard_sums", of_lost_state)
    monkeypatch.setattr(Stepper, "_queues_ahead", ahead)
    with pytest.raises(UserCodeError) as caught:
        fit_alone(Reading(ReadingConfig(steps=4, shards=1)))
    assert last_error(str(caught.value)).startswith(
        "elastic_train.errors.StateLostError: the state after step 2 is lost: its update failed on the device: "
    )
    assert "deleted" in str(caught.value)
    assert losses == [0, 1, 2]  # it is not tried again


def test_a_lost_state_that_shows_in_the_evaluation_is_told_from_code_that_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eval_sums, evaluated = LocalProgram.eval_sums, []

    def of_lost_state(self, state, batch):
        evaluated.append(state.step)
        state.params["kernel"].delete()
        return eval_sums(self, state, batch)

    monkeypatch.setattr(LocalProgram, "eval_sums", of_lost_state)
    with pytest.raises(UserCodeError) as caught:
        fit_alone(Reading(ReadingConfig(steps=4, eval_every=2)))
    assert last_error(str(caught.value)).startswith(
        "elastic_train.errors.StateLostError: the state after step 2 is lost"
    )
    assert evaluated == [2]


@pytest.mark.parametrize("where", ["exchange", "means"])
def test_gradients_that_fail_on_the_device_are_voted_on_wherever_it_shows_first(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What is queued behind them may not be queued at all then. That is no failure of its own."""
    config = ReadingConfig(steps=4, shards=1)
    expected = params_sha256(fit_alone(Reading(config)).state)
    shard_sums, exchange, means = LocalProgram.shard_sums, reduce.Exchange.__call__, LocalProgram.means
    lost: list[jax.Array] = []

    def fails_once(self, state, *args):
        sums, marks = shard_sums(self, state, *args)
        if state.step == 2 and not lost:
            for leaf in sums:
                leaf.delete()
            lost.extend(sums)
        return sums, marks

    def queued(self, partials, *args):
        if any(leaf.is_deleted() for leaf in partials[0]) and where != "exchange":
            return partials[0], partials[0][0]
        return exchange(self, partials, *args)

    def told(self, total):
        if any(leaf.is_deleted() for leaf in total):
            raise RuntimeError("planned: its input has failed")
        return means(self, total)

    monkeypatch.setattr(LocalProgram, "shard_sums", fails_once)
    monkeypatch.setattr(reduce.Exchange, "__call__", queued)
    monkeypatch.setattr(LocalProgram, "means", told)
    assert params_sha256(fit_alone(Reading(config)).state) == expected
    assert lost


def test_only_who_waits_for_nobody_may_be_held_up_by_an_exchange_that_it_queues() -> None:
    def queues_ahead(num_members: int, accelerator: bool) -> bool:
        stepper = Stepper.__new__(Stepper)
        stepper._group = SimpleNamespace(plan=SimpleNamespace(num_members=num_members))
        stepper._local = SimpleNamespace(queues_ahead=accelerator)
        return stepper._queues_ahead

    assert [queues_ahead(n, a) for n in (1, 2) for a in (False, True)] == [True, True, False, True]
