"""When faults are given out, who is struck, and what is kept of it: the conductor with a job that is only told."""

from __future__ import annotations

import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from elastic_train.chaos.conductor import Conductor
from elastic_train.chaos.faults import Fault
from elastic_train.chaos.inject import Injector
from elastic_train.chaos.orders import Order, Orders, Strike
from elastic_train.chaos.schedule import SURVIVED, Planned, parse_schedule, resolve
from elastic_train.chaos.turns import is_spaced, may_begin
from elastic_train.membership.group import Identity

WORKERS = [Identity(slot, 0, slot + 1) for slot in range(4)]


class ToldJob:
    """A job that is where the test says."""

    def __init__(self) -> None:
        self.members: tuple[Identity, ...] = tuple(WORKERS)
        self.step = 0
        self.signals: list[tuple[Identity, signal.Signals]] = []
        self.events: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.stops: list[tuple[int, str]] = []
        self.now = 1000.0

    def signal(self, identity: Identity, number: signal.Signals) -> bool:
        if identity not in self.members:
            return False
        self.signals.append((identity, number))
        return True

    def event(self, name: str, /, **fields: Any) -> None:
        self.events.append({"event": name, **fields})

    def note(self, text: str) -> None:
        self.notes.append(text)

    def stop(self, reason: str) -> None:
        self.stops.append((self.step, reason))


@pytest.fixture
def job() -> ToldJob:
    return ToldJob()


def conductor(job: ToldJob, path: Path, text: str, steps: int = 1000) -> Conductor:
    schedule = parse_schedule(text)
    planned = resolve(schedule, 4, steps)
    stop_after_steps = schedule.stop_after_steps
    return Conductor(planned, 4, schedule.max_down, path / "chaos", job, lambda: job.now, stop_after_steps)


def orders(path: Path) -> list[Fault]:
    return [order.fault for order in Orders(path / "chaos").read()]


def strike(path: Path, number: int, identity: Identity, step: int, time: float = 1000.0) -> None:
    assert Orders(path / "chaos").claim(Strike(number, identity, step, time), str(number))


def test_exact_places_are_told_before_the_start(job: ToldJob, tmp_path: Path) -> None:
    conductor(job, tmp_path, '[[fault]]\nkind = "kill"\nstep = 20\nslot = 1\nwhere = "exchange"')
    assert orders(tmp_path) == [Fault(kind="kill", step=20, slot=1, where="exchange")]


def test_the_job_stops_some_steps_after_all_faults_were_survived(job: ToldJob, tmp_path: Path) -> None:
    text = """
        patient = true
        stop_after_steps = 5
        [[fault]]
        kind = "kill"
        step = 10
        slot = 1
        [[fault]]
        kind = "raise"
        step = 20
        slot = 0
        where = "hook"
    """
    playing = conductor(job, tmp_path, text)
    job.step = 10
    playing.tick()
    assert job.signals == [(WORKERS[1], signal.SIGKILL)]
    assert job.notes == ["fault 1 of 2 has struck (kill, anywhere, slot 1, after step 10)"]
    job.members = tuple(worker for worker in WORKERS if worker.slot != 1)
    for job.step in (15, 25):
        playing.tick()
    job.members = (*job.members, Identity(1, 1, 9))
    job.step = 30
    playing.tick()
    assert [order.kind for order in orders(tmp_path)] == ["raise"]
    playing.tick()
    assert not job.stops  # it is given out, but has not struck
    strike(tmp_path, 1, WORKERS[0], 30)
    playing.tick()
    assert job.notes[1:] == ["fault 2 of 2 has struck (raise, hook, slot 0, after step 30)"]  # no step yet since
    job.step = 31
    playing.tick()
    assert job.notes[2:] == [f"{SURVIVED}: the job stops after 5 more steps"]
    for job.step in (32, 35):
        playing.tick()
    assert not job.stops
    job.members = job.members[:3]  # somebody is lost besides
    playing.tick()
    job.members = (*job.members, Identity(1, 2, 10))
    for job.step in (40, 44, 45, 46, 60):
        playing.tick()
    assert job.stops == [(45, SURVIVED)]


def test_a_job_that_is_not_asked_to_stops_neither_nor_tells_how_far_it_is(job: ToldJob, tmp_path: Path) -> None:
    playing = conductor(job, tmp_path, '[[fault]]\nkind = "kill"\nstep = 10\nslot = 1')
    for job.step in range(5, 100, 5):
        playing.tick()
        job.members = tuple(WORKERS) if job.step != 15 else tuple(WORKERS[2:])
    assert job.signals and not job.stops and not job.notes


def test_a_run_that_goes_on_keeps_what_was_on_record(job: ToldJob, tmp_path: Path) -> None:
    text = '[[fault]]\nkind = "kill"\nstep = {}\nslot = 1\nwhere = "exchange"'
    for step in (20, 30, 40):
        conductor(job, tmp_path, text.format(step))
    assert [fault.step for fault in orders(tmp_path)] == [40]
    for number, step in ((1, 20), (2, 30)):
        assert f"step = {step}" in (tmp_path / f"chaos.{number}" / "schedule.toml").read_text()


def test_a_joiner_is_struck_after_the_step(job: ToldJob, tmp_path: Path) -> None:
    text = '[[fault]]\nkind = "kill"\nstep = 20\nslot = "joiner"\nwhere = "heal"'
    playing = conductor(job, tmp_path, text)
    job.step = 19
    playing.tick()
    assert orders(tmp_path) == []
    job.step = 25
    playing.tick()
    assert [fault.step for fault in orders(tmp_path)] == [25]
    strike(tmp_path, 0, Identity(3, 1, 9), 0)
    playing.tick()
    assert job.events[-1]["step"] == 25 and job.events[-1]["slot"] == 3
    assert job.events[-1]["fault"] == {"kind": "kill", "where": "heal", "step": 25, "slot": "joiner"}


def test_signals_from_outside(job: ToldJob, tmp_path: Path) -> None:
    text = """
        [[fault]]
        kind = "kill"
        step = 20
        slot = "first"
        [[fault]]
        kind = "stop"
        step = 30
        slot = "last"
        duration_s = 5.0
        [[fault]]
        kind = "leave"
        after_s = 8.0
        slot = 2
    """
    playing = conductor(job, tmp_path, text)
    for job.step in (19, 20, 21):
        playing.tick()
    assert job.signals == [(WORKERS[0], signal.SIGKILL)]
    job.step = 30
    playing.tick()
    assert job.signals[1:] == [(WORKERS[3], signal.SIGSTOP)]
    job.now += 5
    playing.tick()
    assert job.signals[2:] == [(WORKERS[3], signal.SIGCONT)]
    job.now += 3
    playing.tick()
    assert job.signals[3:] == [(WORKERS[2], signal.SIGTERM)]
    assert [event["fault"]["slot"] for event in job.events] == [0, 3, 2]
    injected = tomllib.loads((tmp_path / "chaos" / "injected.toml").read_text())["fault"]
    assert injected == [event["fault"] for event in job.events]
    assert orders(tmp_path) == []


def test_a_signal_waits_for_its_worker(job: ToldJob, tmp_path: Path) -> None:
    playing = conductor(job, tmp_path, '[[fault]]\nkind = "kill"\nstep = 20\nslot = 1')
    job.step, job.members = 20, tuple(WORKERS[2:])
    playing.tick()
    assert job.signals == [] and job.events == []
    job.members = tuple(WORKERS)
    playing.tick()
    assert job.signals == [(WORKERS[1], signal.SIGKILL)]


def test_patient_faults_wait_until_every_slot_has_a_member(job: ToldJob, tmp_path: Path) -> None:
    text = """
        patient = true
        [[fault]]
        kind = "kill"
        step = 10
        slot = 1
        where = "exchange"
        [[fault]]
        kind = "kill"
        step = 20
        slot = 0
        where = "barrier"
    """
    playing = conductor(job, tmp_path, text)
    assert orders(tmp_path) == []
    job.step = 30
    playing.tick()
    assert [fault.where for fault in orders(tmp_path)] == ["exchange"]
    strike(tmp_path, 0, WORKERS[1], 30)
    job.members = (WORKERS[0], *WORKERS[2:])
    playing.tick()
    assert len(orders(tmp_path)) == 1
    job.members = (*job.members, Identity(1, 1, 9))
    job.step = 31  # the first one with the newcomer
    playing.tick()
    assert [fault.where for fault in orders(tmp_path)] == ["exchange", "barrier"]


RAISE_THEN_KILL = """
    patient = true
    [[fault]]
    kind = "raise"
    step = 10
    slot = 0
    where = "compute"
    [[fault]]
    kind = "kill"
    step = 20
    slot = 0
    where = "barrier"
"""


def test_of_two_overdue_faults_the_second_waits_until_the_first_has_struck_and_its_step_is_committed(
    job: ToldJob, tmp_path: Path
) -> None:
    """In one step the kill would leave nobody to report the exception."""
    playing = conductor(job, tmp_path, RAISE_THEN_KILL)
    job.step = 50
    playing.tick()
    playing.tick()
    assert [fault.kind for fault in orders(tmp_path)] == ["raise"]
    strike(tmp_path, 0, WORKERS[0], 51)
    for job.step in (50, 51):
        playing.tick()
        assert [fault.kind for fault in orders(tmp_path)] == ["raise"]
    job.step = 52
    playing.tick()
    assert [(fault.kind, fault.step) for fault in orders(tmp_path)] == [("raise", 50), ("kill", 52)]


def test_a_patient_fault_waits_for_the_end_of_a_stop_and_a_step_after_it(job: ToldJob, tmp_path: Path) -> None:
    """What the worker had reported when it was stopped from outside may be older than the step it was in."""
    stop = '[[fault]]\nkind = "stop"\nstep = 10\nslot = 0\nduration_s = 0.5\n'
    playing = conductor(job, tmp_path, "patient = true\n" + stop + stop.replace("0.5", "0.75"))
    job.step = 10
    playing.tick()
    job.step = 14
    playing.tick()
    job.now += 0.5
    playing.tick()
    playing.tick()
    assert [number for _, number in job.signals] == [signal.SIGSTOP, signal.SIGCONT]
    job.step = 15
    playing.tick()
    assert [number for _, number in job.signals] == [signal.SIGSTOP, signal.SIGCONT, signal.SIGSTOP]


def test_a_worker_carries_out_one_patient_order_in_a_step(tmp_path: Path) -> None:
    """Whatever the job knows of its step: a fault that waits for a transfer may find its occasion at any time."""
    given = Orders(tmp_path / "chaos")
    given.create()
    raising = Fault(kind="raise", step=5, slot=0, where="compute")
    stopping = Fault(kind="stop", step=5, slot=0, where="heal", duration_s=0.5)
    worker = Injector(WORKERS[0], Orders(tmp_path / "chaos"))
    worker.committed(7)
    for number, fault in enumerate((raising, stopping)):
        given.give(Order(number, fault, alone=True))
    assert list(worker.due("compute", "")) == [raising]
    assert list(worker.due("heal", "donor")) == []
    worker.committed(8)
    assert list(worker.due("heal", "donor")) == [stopping]
    for number, fault in enumerate((raising, stopping), start=2):
        given.give(Order(number, fault))
    worker.committed(9)
    assert list(worker.due("compute", "")) == [raising] and list(worker.due("heal", "donor")) == [stopping]


def test_a_patient_donor_kill_does_not_block_the_fault_that_gives_it_a_joiner(job: ToldJob, tmp_path: Path) -> None:
    text = """
        patient = true
        [[fault]]
        kind = "kill"
        step = 10
        slot = "donor"
        where = "heal"
        [[fault]]
        kind = "kill"
        step = 20
        slot = 1
        where = "exchange"
    """
    playing = conductor(job, tmp_path, text)
    job.step = 30
    playing.tick()
    playing.tick()
    assert [fault.where for fault in orders(tmp_path)] == ["heal", "exchange"]


def test_patient_faults_leave_one_member(job: ToldJob, tmp_path: Path) -> None:
    """Four donors may not be killed one by one without a joiner that has received the state."""
    donor = '[[fault]]\nkind = "kill"\nstep = 10\nslot = "donor"\nwhere = "heal"\n'
    playing = conductor(job, tmp_path, f"patient = true\n{donor * 4}")
    job.step = 30
    for _ in range(5):
        playing.tick()
    assert len(orders(tmp_path)) == 3


def test_drawn_faults_wait_until_the_job_can_bear_them(job: ToldJob, tmp_path: Path) -> None:
    text = "[random]\nevery_steps = 10\nuntil_step = 20\njitter = 0.0\nkinds = { kill_starting = 1 }"
    playing = conductor(job, tmp_path, text)
    job.step = 15
    playing.tick()
    ((struck, _),) = job.signals
    assert [(fault.where, fault.slot) for fault in orders(tmp_path)] == [("start", struck.slot)]
    job.step = 25
    playing.tick()
    assert len(job.signals) == 1  # the first is still a member
    job.members = tuple(worker for worker in WORKERS if worker != struck)
    playing.tick()
    assert len(job.signals) == 1  # and now one slot is down, as many as may be
    job.members = (*job.members, Identity(struck.slot, 2, 9))
    playing.tick()
    assert len(job.signals) == 2


def test_what_found_no_occasion_is_told(job: ToldJob, tmp_path: Path) -> None:
    text = """
        [[fault]]
        kind = "kill"
        step = 20
        slot = 1
        where = "heal"
        [[fault]]
        kind = "leave"
        step = 500
        slot = 2
    """
    playing = conductor(job, tmp_path, text)
    job.step = 30
    playing.tick()
    playing.finish()
    ((missed),) = job.events
    assert missed["event"] == "faults_missed"
    assert [fault["kind"] for fault in missed["faults"]] == ["kill", "leave"]
    job.step = 500
    playing.tick()
    playing.finish()
    assert job.signals == [] and job.events == [missed]


def test_one_order_strikes_one_worker_and_is_on_record_first(job: ToldJob, tmp_path: Path) -> None:
    playing = conductor(job, tmp_path, '[[fault]]\nkind = "kill"\nstep = 0\nslot = "donor"\nwhere = "heal"')
    mine, other = Orders(tmp_path / "chaos"), Orders(tmp_path / "chaos")
    assert mine.claim(Strike(0, WORKERS[0], 7, 1.0), "0")
    assert not other.claim(Strike(0, WORKERS[1], 7, 1.0), "0")
    playing.tick()
    playing.tick()
    (event,) = job.events
    assert (event["slot"], event["step"], event["lethal"]) == (0, 7, True)


@pytest.mark.parametrize(
    ("members", "num_pending", "expected"), [({0, 1, 2}, 0, True), ({0, 1}, 0, False), ({0, 1, 2}, 1, False)]
)
def test_a_bit_is_flipped_only_where_a_majority_can_tell(members: set[int], num_pending: int, expected: bool) -> None:
    planned = Planned((Fault(kind="flip", step=1, slot=0),), "flip")
    assert may_begin(planned, members, 4, 3, num_pending, True) is expected


@pytest.mark.parametrize(
    ("members", "num_pending", "is_settled", "expected"),
    [
        ({0, 1, 2, 3}, 0, True, True),
        ({0, 1, 2, 3}, 0, False, False),
        ({0, 1, 2, 3}, 1, True, False),
        ({0, 1, 2}, 0, True, False),
    ],
)
def test_may_begin(members: set[int], num_pending: int, is_settled: bool, expected: bool) -> None:
    planned = Planned(tuple(Fault(kind="kill", step=1, slot=slot) for slot in (0, 1)), "kill_two")
    assert may_begin(planned, members, 4, 2, num_pending, is_settled) is expected


@pytest.mark.parametrize(
    ("pending", "struck_at", "step", "expected"),
    [
        ((), -1, 0, True),
        ((), 7, 7, False),
        ((), 7, 8, True),
        (("compute",), -1, 8, False),
        (("heal", "gather"), -1, 8, True),
        (("heal", "compute"), -1, 8, False),
    ],
)
def test_is_spaced(pending: tuple[str, ...], struck_at: int, step: int, expected: bool) -> None:
    faults = [Fault(kind="kill", step=1, slot=0, where=where) for where in pending]
    assert is_spaced(faults, struck_at, step) is expected
