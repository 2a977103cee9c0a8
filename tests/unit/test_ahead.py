"""What is made ahead of time is there when it is asked for, and nothing depends on it."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest

from elastic_train.config import FaultConfig
from elastic_train.membership.ahead import Ahead
from elastic_train.membership.group import Identity, Shrink, View, likely
from elastic_train.membership.live import SETTLED_STEPS, Alone, Group
from elastic_train.plain import Nobody
from elastic_train.step.flat import Layout
from elastic_train.step.reduce import Meeting

LIMIT_S = 30.0


class Maker:
    """Makes strings; each waits until the test lets it."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.allowed = threading.Semaphore(0)
        self.changed = threading.Condition()

    def __call__(self, key: str) -> str:
        with self.changed:
            self.begun.append(key)
            self.changed.notify_all()
        assert self.allowed.acquire(timeout=LIMIT_S)
        if key == "bad":
            raise ValueError("cannot be made")
        return f"made {key}"

    def wait_begun(self, *keys: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.begun == list(keys), LIMIT_S), self.begun


def wait_settled(ahead: Ahead, key: str) -> None:
    with ahead._changed:
        assert ahead._changed.wait_for(lambda: key in ahead._made or key in ahead._failed, LIMIT_S)


def test_the_most_urgent_is_made_first_and_what_is_taken_ends_the_rest():
    maker = Maker()
    ahead = Ahead(maker)
    ahead.want(["a", "b", "c"])
    maker.allowed.release()
    maker.wait_begun("a", "b")
    assert ahead.settled("a") and not ahead.settled("b")
    assert ahead.take("a") == "made a"
    maker.allowed.release()
    ahead.want(["d"])
    maker.wait_begun("a", "b", "d")  # "c" is wanted no longer
    assert ahead.take("a") is None
    maker.allowed.release()


def test_what_is_being_made_is_waited_for():
    maker = Maker()
    ahead = Ahead(maker)
    ahead.want(["a"])
    maker.wait_begun("a")
    threading.Timer(0.05, maker.allowed.release).start()
    assert ahead.take("a") == "made a"


def test_what_cannot_be_made_is_left_to_whoever_needs_it(capfd):
    maker = Maker()
    ahead = Ahead(maker)
    ahead.want(["bad", "a"])
    maker.allowed.release(2)
    wait_settled(ahead, "a")
    assert ahead.settled("bad") and maker.begun == ["bad", "a"]
    assert "cannot be made" in capfd.readouterr().err
    assert ahead.take("bad") is None


def test_what_is_wanted_no_longer_is_let_go():
    maker = Maker()
    ahead = Ahead(maker)
    ahead.want(["a", "b"])
    maker.allowed.release(2)
    wait_settled(ahead, "b")
    ahead.want(["b"])
    assert not ahead.settled("a") and ahead.take("b") == "made b"


@pytest.mark.parametrize("limit", [0, 1, 3, 8])
def test_likely_lists_are_those_that_the_next_view_can_have(limit):
    view = View.of(1, [Identity(slot, 0, node) for slot, node in enumerate((2, 3, 7))])
    joined = view.next((), [Identity(3, 0, 9)]).nodes
    lists = likely(view.nodes, 3, joined, True, limit)
    assert lists == ((2, 3, 7, 9), (3, 7), (2, 3))[:limit]
    assert all(nodes == view.without([gone]).nodes for nodes in lists[1:] for gone in set(view.nodes) - set(nodes))
    assert likely(view.nodes, 3, view.nodes, False, limit) == ()


def test_a_death_and_an_admission_that_were_foreseen_compile_nothing(monkeypatch):
    """Every program of the next epoch is there when it begins; one that was not foreseen is compiled as ever."""
    me, other, third, joiner = (Identity(slot, 0, slot + 1) for slot in range(4))
    devices = {slot + 1: jax.devices()[slot] for slot in range(4)}
    layout = Layout([jax.ShapeDtypeStruct((1, 64), jnp.float32)])
    block = lambda devices, trace: Alone()  # noqa: E731
    group = Group(me, devices, layout, lambda members: 8, Nobody(), FaultConfig(), None, block)
    view = View(1, (me, other, third))
    group.prepare(view)
    assert group.foresee(()) and group._foreseen == (view.nodes, False), "no epoch has settled"
    group._num_commits = SETTLED_STEPS
    group._stripe = 16
    group.foresee(())
    wait_settled(group._ahead, (1, 2))
    group.foresee((joiner,))
    wait_settled(group._ahead, (1, 2, 3, 4))
    assert group.foresee((joiner,))

    compiled = []
    program = Meeting.program
    monkeypatch.setattr(Meeting, "program", lambda *args: compiled.append(args) or program(*args))
    group.prepare(view.next((), (joiner,)), stripe=16)
    assert group.exchange and group.spread(16) and group.gather and compiled == []
    group.prepare(view.without([third.node]))
    assert group.exchange and len(compiled) == 2, "what was foreseen was for the epoch before"


def test_an_attempt_that_fails_keeps_nothing_of_what_it_has_computed():
    """An error's traceback leads to all that was there when it was raised: on a device it may be a second state."""

    class Large:
        pass

    me, other = Identity(0, 0, 1), Identity(1, 0, 2)
    devices = {1: jax.devices()[0], 2: jax.devices()[1]}
    layout = Layout([jax.ShapeDtypeStruct((1, 64), jnp.float32)])

    class BothThenOne(Alone):
        incarnations = {1: 0, 2: 0}  # noqa: RUF012

        def run(self, body):
            try:
                return body(self.incarnations)
            finally:
                self.incarnations = {1: 0}

    block = lambda devices, trace: BothThenOne()  # noqa: E731
    group = Group(me, devices, layout, lambda members: 8, Nobody(), FaultConfig(), None, block)
    group.prepare(View(1, (me, other)))
    group._await_a_death = lambda error: None
    seen = []

    def body():
        large = Large()
        seen.append(weakref.ref(large))
        raise RuntimeError("planned: its peer is gone")

    gc.disable()
    try:
        verdict, _ = group.attempt(body)
        assert isinstance(verdict, Shrink)
        assert seen[0]() is None
    finally:
        gc.enable()
