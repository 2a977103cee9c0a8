"""The coordinator's thread and its timers."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

from elastic_train.coordinator.loop import MIN_STALE, EventLoop

PATIENCE_S = 20.0


class Scene:
    """A loop; what it did."""

    def __init__(self) -> None:
        self.done: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.loop = EventLoop("test", self.done.put)
        self.loop.start()

    def run(self, call) -> object:
        """In the loop's thread; its result."""
        self.loop.post(lambda: self.done.put(call()))
        return self.done.get(timeout=PATIENCE_S)

    def put(self, what: str):
        return lambda: self.done.put(what)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.loop.stop()


def test_timers_come_in_the_order_of_their_deadlines(scene: Scene) -> None:
    def set_timers() -> None:
        scene.loop.after("late", 0.02, scene.put("late"))
        scene.loop.after("soon", 0.01, scene.put("soon"))
        scene.loop.after("now", 0.0, scene.put("now"))

    scene.loop.post(set_timers)
    assert [scene.done.get(timeout=PATIENCE_S) for _ in range(3)] == ["now", "soon", "late"]


def test_a_timer_that_is_set_again_replaces_the_first(scene: Scene) -> None:
    def set_timers() -> None:
        scene.loop.after("it", 0.0, scene.put("first"))
        scene.loop.after("it", 0.01, scene.put("second"))
        scene.loop.after("end", 0.02, scene.put("end"))

    scene.loop.post(set_timers)
    assert [scene.done.get(timeout=PATIENCE_S) for _ in range(2)] == ["second", "end"]
    assert not scene.run(lambda: scene.loop.waits_for("it"))


def test_a_timer_that_is_dropped_does_not_come(scene: Scene) -> None:
    def set_timers() -> None:
        scene.loop.after("it", 0.0, scene.put("it"))
        scene.loop.cancel("it")
        scene.loop.cancel("unknown")
        scene.loop.after("end", 0.01, scene.put("end"))

    scene.loop.post(set_timers)
    assert scene.done.get(timeout=PATIENCE_S) == "end"


def test_deadlines_of_timers_that_were_replaced_are_cleared_away(scene: Scene) -> None:
    def set_timers() -> int:
        for _ in range(10 * MIN_STALE):
            scene.loop.after("it", 1000.0, scene.put("never"))
        return len(scene.loop._deadlines)

    assert scene.run(set_timers) <= MIN_STALE + 2


def test_a_failed_call_is_reported_and_the_loop_goes_on(scene: Scene) -> None:
    error = ValueError("no")

    def fail() -> None:
        raise error

    scene.loop.post(fail)
    assert scene.done.get(timeout=PATIENCE_S) is error
    assert scene.run(lambda: "on") == "on"
