"""The coordinator's watch over its members, with a clock of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_train.config import REPORT_INTERVAL_S, FaultConfig
from elastic_train.coordinator import control_pb2
from elastic_train.coordinator.reports import Reports
from elastic_train.coordinator.watch import NUM_WINDOWS, WINDOW_STEPS, Paces, Watch
from elastic_train.membership.group import Identity, View
from elastic_train.membership.roster import Limits, Roster, Worker, WorkerState
from elastic_train.membership.roster_events import Unfit

A, B, C = Identity(0, 0, 1), Identity(1, 0, 2), Identity(2, 0, 3)
FAULTS = FaultConfig(step_timeout_s=30.0, first_step_timeout_s=60.0, hook_timeout_s=90.0, evict_stragglers=True)


class Scene:
    """Three members, their reports, and what the watch says of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        for module in ("watch", "reports"):
            monkeypatch.setattr(f"elastic_train.coordinator.{module}.time", clock)
        self.told: list[Unfit] = []
        self.notes: list[tuple[str, str, dict[str, Any]]] = []
        self.reports = Reports()
        self.watch = Watch(FAULTS, self.reports, self.told.append, self.note)
        self.paces = Paces(FAULTS, self.reports, 2, self.told.append, self.note)
        self.roster = Roster(Limits(3), view=View(1, (A, B, C)))
        self.beats = 0
        self.done = {identity: (0.0, 0) for identity in (A, B, C)}
        self.members(A, B, C)

    def note(self, event: str, show: str, **fields: Any) -> None:
        self.notes.append((event, show, fields))

    def members(self, *identities: Identity, finished: str = "") -> None:
        workers = {
            identity.slot: Worker(identity, "agent", WorkerState.MEMBER, 7, "here", finished=finished)
            for identity in identities
        }
        self.roster = Roster(Limits(3), workers=workers, view=View(1, (A, B, C)))

    def report(self, identity: Identity, phase: str, step: int) -> None:
        """It is somewhere else now."""
        self.beats += 1
        seconds, steps = self.done[identity]
        self.reports.add(
            identity,
            control_pb2.Progress(
                step=step, phase=phase, beats=self.beats, work_s=seconds, num_shards=2 * steps, num_worked_steps=steps
            ),
        )

    def go_on(self, seconds: float, *reporting: Identity) -> None:
        """Time passes; these report that they are still where they are."""
        end = self.now + seconds
        while self.now < end:
            self.now += REPORT_INTERVAL_S
            for identity in reporting:
                newest = self.reports.of(identity)
                assert newest is not None
                again = control_pb2.Progress(step=newest.step, phase=newest.phase, beats=newest.beats)
                self.reports.add(identity, again)
            self.watch.look(self.roster)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def wait_for_b(scene: Scene, seconds: float, phase: str, step: int = 5) -> None:
    """A and C wait; B does something."""
    for identity, doing in ((A, "exchange"), (B, phase), (C, "exchange")):
        scene.report(identity, doing, step)
    scene.go_on(seconds, A, B, C)


def test_a_member_that_works_for_too_long_is_replaced_once(scene: Scene) -> None:
    wait_for_b(scene, 29.0, "data")
    assert scene.told == []
    wait_for_b(scene, 60.0, "data", step=5)
    (unfit,) = scene.told
    assert (unfit.identity, unfit.kind) == (B, "stuck")
    assert "in 'data' after step 5 for 30 s; allowed are 30 s (faults.step_timeout_s)" in unfit.reason
    assert "logs/1-0.log on here" in unfit.reason
    (note,) = scene.notes
    assert note[0] == "worker_stuck" and note[2]["rule"] == "works" and note[2]["log"] == "logs/1-0.log"


def test_the_first_step_of_an_epoch_and_hooks_have_more_time(scene: Scene) -> None:
    scene.watch.viewed(1, 5)
    wait_for_b(scene, 59.0, "data")
    wait_for_b(scene, 89.0, "hook")
    assert scene.told == []
    wait_for_b(scene, 62.0, "compute")
    assert "allowed are 60 s (faults.first_step_timeout_s)" in scene.told[0].reason


def test_a_member_has_more_time_for_its_own_work_in_its_own_first_step_only(scene: Scene) -> None:
    wait_for_b(scene, 1.0, "data", step=6)
    scene.watch.viewed(2, 6)
    wait_for_b(scene, 59.0, "gather", step=6)
    assert scene.told == []
    wait_for_b(scene, 32.0, "data", step=6)
    assert "in 'data' after step 6 for 30 s; allowed are 30 s (faults.step_timeout_s)" in scene.told[0].reason


def test_a_phase_nobody_knows_may_last_as_long_as_a_hook(scene: Scene) -> None:
    wait_for_b(scene, 89.0, "something_new")
    assert scene.told == []


def test_slow_steps_have_more_time(scene: Scene) -> None:
    for step in range(1, 6):
        scene.now += 8.0
        for identity in (A, B, C):
            scene.report(identity, "exchange", step)
    assert scene.reports.step_time_s == 8.0
    scene.watch.look(scene.roster)
    wait_for_b(scene, 79.0, "data")
    assert scene.told == []
    wait_for_b(scene, 82.0, "data", step=5)
    assert "allowed are 80 s (faults.step_timeout_factor)" in scene.told[0].reason


@pytest.mark.parametrize("phase", ["barrier", "hook", "data", "evaluate"])
def test_a_member_without_reports_is_stuck_whatever_it_did_last(scene: Scene, phase: str) -> None:
    wait_for_b(scene, 0.0, phase)
    scene.go_on(31.0, A, C)
    assert [unfit.identity for unfit in scene.told] == [B]
    assert scene.notes[0][2]["rule"] == "silent"


def test_a_coordinator_that_was_stopped_itself_blames_nobody(scene: Scene) -> None:
    wait_for_b(scene, 1.0, "data")
    scene.now += 300.0
    scene.watch.look(scene.roster)
    scene.go_on(29.0)
    assert scene.told == [] and scene.notes == []


def test_members_that_have_finished_are_left_alone(scene: Scene) -> None:
    wait_for_b(scene, 1.0, "end")
    scene.members(A, B, C, finished="done")
    scene.go_on(300.0)
    assert scene.told == []


def test_waits_of_all_are_counted_from_the_last_change_of_the_members(scene: Scene) -> None:
    for identity in (A, B, C):
        scene.report(identity, "exchange", 5)
    scene.go_on(29.0, A, B, C)
    scene.members(A, C)
    scene.go_on(29.0, A, C)
    assert scene.notes == []
    scene.go_on(2.0, A, C)
    ((event, show, fields),) = scene.notes
    assert event == "all_waiting" and fields["chosen"] == 2 and "slot 2 is replaced in 30 s" in show
    scene.go_on(32.0, A, C)
    assert [unfit.identity for unfit in scene.told] == [C]


def windows(scene: Scene, number: int, slow: float) -> None:
    """Windows in which B takes `slow` seconds for a shard, the others 0.1."""
    for _ in range(number):
        for identity in (A, B, C):
            seconds, steps = scene.done[identity]
            shard_s = slow if identity == B else 0.1
            scene.done[identity] = (seconds + 2 * WINDOW_STEPS * shard_s, steps + WINDOW_STEPS)
            scene.report(identity, "exchange", steps)
        scene.paces.look(scene.roster)


def test_a_straggler_is_reported_once_with_figures_and_evicted(scene: Scene) -> None:
    windows(scene, NUM_WINDOWS, slow=0.1)
    assert scene.paces.shard_time_s(B) == pytest.approx(0.1)
    windows(scene, NUM_WINDOWS - 1, slow=1.0)
    assert scene.notes == []
    windows(scene, 5, slow=1.0)
    ((event, show, fields),) = scene.notes
    assert event == "straggler" and (fields["slot"], fields["host"]) == (1, "here")
    assert fields["shard_s"] == pytest.approx(1.0) and fields["others_s"] == pytest.approx(0.1)
    assert fields["ratio"] == pytest.approx(10.0) and "10.0 times as long" in show
    (unfit,) = scene.told
    assert (unfit.identity, unfit.kind) == (B, "slow")


def test_a_straggler_that_recovers_is_reported_too(scene: Scene) -> None:
    scene.paces = Paces(FaultConfig(), scene.reports, 1, scene.told.append, scene.note)
    scene.paces.look(scene.roster)
    windows(scene, NUM_WINDOWS, slow=1.0)
    windows(scene, NUM_WINDOWS - 1, slow=0.1)
    assert [event for event, _, _ in scene.notes] == ["straggler"]
    windows(scene, 3, slow=0.1)
    assert [event for event, _, _ in scene.notes] == ["straggler", "straggler_over"]
    assert scene.told == []


def test_evictions_are_bounded_and_leave_enough_members(scene: Scene) -> None:
    scene.paces = Paces(FAULTS, scene.reports, 3, scene.told.append, scene.note)
    windows(scene, 20, slow=1.0)
    assert scene.told == []
    scene.paces = Paces(FAULTS, scene.reports, 2, scene.told.append, scene.note)
    for incarnation in range(5):
        again = Identity(1, incarnation, 10 + incarnation)
        scene.done = {A: (0.0, 0), again: (0.0, 0), C: (0.0, 0)}
        scene.members(A, again, C)
        for _ in range(6):
            for identity in scene.done:
                seconds, steps = scene.done[identity]
                scene.done[identity] = (seconds + (200.0 if identity == again else 2.0), steps + WINDOW_STEPS)
                scene.report(identity, "exchange", steps)
            scene.paces.look(scene.roster)
    assert [unfit.identity.incarnation for unfit in scene.told] == [0, 1]
