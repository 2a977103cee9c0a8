"""When a member saves, asks for a save, waits and tries again."""

from __future__ import annotations

import threading
from pathlib import Path

import jax.numpy as jnp
import pytest

from elastic_train.checkpoint import places, policy, saves, writing
from elastic_train.checkpoint.manifest import Position, Run
from elastic_train.checkpoint.saves import Save, Saves
from elastic_train.config import CheckpointConfig
from elastic_train.state import TrainState

LIMIT_S = 60.0


class Requests:
    """What the others want, and what they are told."""

    def __init__(self) -> None:
        self.save_requested = 0
        self.saved_step = 0
        self.told: list[Save] = []
        self.notes: list[tuple[str, dict[str, object]]] = []
        self.news = threading.Condition()
        self.last: list[bool | None] = []

    def phase(self, name: str, step: int) -> None:
        pass

    def noted(self, event: str, show: str, **fields: object) -> None:
        self.notes.append((event, fields))

    def saved(self, save: Save) -> None:
        with self.news:
            self.told.append(save)
            self.news.notify_all()

    def wait_last_save(self, step: int, nodes: frozenset[int], timeout: float) -> bool | None:
        return self.last.pop(0)

    def expect(self, number: int) -> Save:
        with self.news:
            assert self.news.wait_for(lambda: len(self.told) >= number, LIMIT_S)
            return self.told[number - 1]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeWriter:
    """Writes nothing; fails as long as `error` is set, and holds as long as `gate` is closed."""

    error = ""
    gate = threading.Event()

    def __init__(self, descriptor: int, num_bytes: int, limit_s: float) -> None:
        pass

    def start(self) -> None:
        pass

    def write(self, request: dict) -> dict:
        assert self.gate.wait(LIMIT_S)
        if self.error:
            raise writing.WriteFailed(self.error)
        step = request["position"]["step"]
        return {"path": f"/c/{step}", "num_bytes": 1, "seconds": 0.1, "deleted": [], "trouble": ""}

    def close(self) -> None:
        pass


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> type[FakeWriter]:
    monkeypatch.setattr(saves, "Writer", FakeWriter)
    FakeWriter.error = ""
    FakeWriter.gate.set()
    return FakeWriter


def state(step: int) -> TrainState:
    return TrainState(step, step, {"x": jnp.full(3, step, jnp.float32)}, {}, ())


def position(step: int) -> Position:
    about = dict(samples=step, pass_size=9, epoch=1, generation=0, workers=(0,), metrics={}, records=())
    return Position(step=step, **about)


def make(requests: Requests, clock: Clock, root: Path | str = "/nowhere", **config) -> Saves:
    run = Run(trainer="T", config={}, config_digest="", versions={})
    policy = CheckpointConfig(**{"every_s": 0.0, **config})
    return Saves(places.Path(root), policy, run, 100, LIMIT_S, requests, clock)


def commit(member: Saves, step: int, asked: bool = False, is_first: bool = True) -> None:
    member.committed(state(step), asked, is_first, lambda: position(step))


def test_the_first_member_saves_what_is_due_and_the_others_do_not(writer) -> None:
    requests, clock = Requests(), Clock()
    first, other = make(requests, clock, every_steps=5), make(Requests(), clock, every_steps=5)
    for step in range(1, 11):
        commit(first, step)
        first.before_update()
        commit(other, step, is_first=False)
    assert [requests.expect(n).step for n in (1, 2)] == [5, 10]
    assert other._requests.told == []
    first.close()


def test_a_save_is_asked_for_by_time_and_on_request(writer) -> None:
    requests, clock = Requests(), Clock()
    member = make(requests, clock, every_s=100.0)
    assert not member.wants()
    clock.now = 100.0
    assert member.wants()
    commit(member, 1, asked=True)
    assert requests.expect(1).request == 0
    assert not member.wants()
    requests.save_requested = 1
    assert member.wants()
    commit(member, 2, asked=True)
    assert requests.expect(2).request == 1
    assert not member.wants()  # it is answered
    member.close()


def test_who_comes_first_saves_what_the_one_before_has_not(writer) -> None:
    requests, clock = Requests(), Clock()
    member = make(requests, clock, every_steps=5)
    commit(member, 5, is_first=False)
    requests.saved_step = 5
    assert not member.wants()
    requests.saved_step = 0
    assert member.wants()
    commit(member, 6, asked=True)
    assert requests.expect(1).step == 6
    member.close()


def test_a_failed_save_is_tried_again_ever_later_and_stops_nothing(writer) -> None:
    requests, clock = Requests(), Clock()
    member = make(requests, clock, every_steps=1)
    writer.error = "No space left on device"
    commit(member, 1)
    assert requests.expect(1).error == "No space left on device"
    assert not member.wants()
    commit(member, 2)  # too early
    clock.now = 1.0
    assert member.wants()
    commit(member, 3)
    assert requests.expect(2).step == 3
    clock.now = 2.9
    assert not member.wants()
    writer.error, clock.now = "", 3.0
    assert member.wants()
    commit(member, 4)
    assert not requests.expect(3).error
    assert not member.wants()
    member.close()


def test_a_save_that_hangs_stops_nobody(writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "BUSY_LIMIT_S", 0.01)
    requests, clock = Requests(), Clock()
    member = make(requests, clock, every_steps=1)
    writer.gate.clear()
    commit(member, 1)
    member.before_update()  # the copy is made all the same
    commit(member, 2)
    assert "takes longer than" in requests.expect(1).error
    assert not member.wants()
    writer.gate.set()
    assert requests.expect(2).step == 1
    member.close()


def test_training_does_not_wait_for_a_large_state_and_saves_the_newest_afterwards(writer, monkeypatch) -> None:
    monkeypatch.setattr(policy, "WAITING_BYTES", 0)
    requests, clock = Requests(), Clock()
    member = make(requests, clock, every_steps=1)
    writer.gate.clear()
    for step in (1, 2, 3):
        commit(member, step)
        member.before_update()
        assert not member.wants()  # one save at a time
    assert requests.told == []
    assert requests.notes == [("checkpoint_deferred", {"step": 2, "writing_step": 1})]
    writer.gate.set()
    assert requests.expect(1).step == 1
    assert member._idle.wait(LIMIT_S) and member.wants()
    commit(member, 4, asked=True)
    saved = requests.expect(2)
    assert (saved.step, saved.left_out) == (4, (2, 3))
    assert not member.wants()
    member.close()


@pytest.mark.parametrize(
    ("settings", "step", "num_bytes", "asked", "expected"),
    [
        ({}, 10, policy.WAITING_BYTES, False, True),
        ({}, 10, policy.WAITING_BYTES + 1, False, False),
        ({}, 10, policy.WAITING_BYTES + 1, True, True),
        ({"when_busy": "wait"}, 10, policy.WAITING_BYTES + 1, False, True),
        ({"when_busy": "defer"}, 10, 1, False, False),
        ({"when_busy": "defer", "keep_every_steps": 20}, 10, 1, False, False),
        ({"when_busy": "defer", "keep_every_steps": 20}, 20, 1, False, True),
    ],
)
def test_which_saves_are_waited_for(settings: dict, step: int, num_bytes: int, asked: bool, expected: bool) -> None:
    config = CheckpointConfig(every_steps=10, **settings)
    assert policy.waits(config, step, num_bytes, asked) is expected


@pytest.mark.parametrize(("answers", "expected"), [([None, True], []), ([None, False], [7])])
def test_the_last_save_is_made_by_the_first_that_lives(writer, answers: list, expected: list[int]) -> None:
    requests, clock = Requests(), Clock()
    requests.last = answers
    member = make(requests, clock)
    member.last(state(7), position(7), frozenset({1, 2}))
    assert [save.step for save in requests.told] == expected
    member.close()


def test_the_last_save_is_tried_three_times(writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves.time, "sleep", lambda seconds: None)
    requests, clock = Requests(), Clock()
    writer.error = "full"
    member = make(requests, clock)
    member.last(state(7), position(7), frozenset())
    assert [(save.error, save.is_last) for save in requests.told] == [("full", False), ("full", False), ("full", True)]
    member.close()


def test_what_was_loaded_is_not_saved_again(writer) -> None:
    requests, clock = Requests(), Clock()
    member = make(requests, clock)
    member.begin(7)
    member.last(state(7), position(7), frozenset())
    assert requests.told == []


def test_with_keep_0_nothing_happens(writer) -> None:
    requests, clock = Requests(), Clock()
    member = make(requests, clock, keep=0, every_steps=1, every_s=1.0)
    requests.save_requested, clock.now = 1, 10.0
    assert not member.wants()
    commit(member, 1, asked=True)
    member.last(state(7), position(7), frozenset())
    assert requests.told == []


def test_a_process_of_its_own_writes_and_its_death_is_a_failed_save(tmp_path: Path) -> None:
    requests, clock = Requests(), Clock()
    member = make(requests, clock, root=tmp_path, every_steps=1, keep=2)
    for step in (1, 2, 3):
        commit(member, step)
        member.before_update()
    saved = requests.expect(3)
    assert not saved.error and saved.deleted == (1,)
    assert places.saved_steps(places.Path(tmp_path)) == [2, 3]
    (tmp_path / "4").write_text("a file is in the way of the checkpoint of step 4")
    commit(member, 4)
    assert requests.expect(4).error
    assert places.saved_steps(places.Path(tmp_path))[:2] == [2, 3]
    member.close()
