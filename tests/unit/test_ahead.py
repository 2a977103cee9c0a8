"""What is made ahead of time is there when it is asked for, and nothing depends on it."""

import threading

import pytest

from elastic_train.membership.ahead import Ahead
from elastic_train.membership.group import Identity, View, likely

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
