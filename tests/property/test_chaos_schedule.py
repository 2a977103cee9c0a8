"""Schedules of faults: read back as written, drawn the same from the same seed, and never more than a job survives."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from elastic_train.chaos.faults import PLACES, Fault
from elastic_train.chaos.schedule import (
    SCENARIOS,
    Planned,
    RandomFaults,
    Schedule,
    aim,
    num_taken,
    parse_schedule,
    resolve,
    schedule_toml,
)
from elastic_train.chaos.standard import standard_faults
from tests.property.chaos_job import play
from tests.property.examples import examples

STEPS = 100_000


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(sorted(PLACES)))
    where = draw(st.sampled_from(PLACES[kind]))
    slots: list[int | str] = [0, 3, "random"]
    if where != "start":
        slots += ["first", "last"]
    if where in ("gather", "heal"):
        slots.append("joiner")
    if where == "heal":
        slots.append("donor")
    when = draw(st.one_of(st.builds(lambda n: {"step": n}, st.integers(0, 1000)), st.just({"after_s": 12.5})))
    more = {"repeat": draw(st.sampled_from(["once", "incarnation", "slot"]))} if kind == "raise" else {}
    if kind == "stop":
        more["duration_s"] = draw(st.sampled_from([0.5, 30.0]))
    slot = "joiner" if kind == "corrupt" else draw(st.sampled_from(slots))
    return Fault(kind=kind, where=where, slot=slot, **when, **more)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[RandomFaults, int]:
    workers = draw(st.integers(4, 9))
    names = draw(st.lists(st.sampled_from(sorted(SCENARIOS)), min_size=1, unique=True))
    kinds = {name: draw(st.integers(1, 5)) for name in names}
    jitter = draw(st.sampled_from([0.0, 0.3, 0.9]))
    if draw(st.booleans()):
        return RandomFaults(kinds=kinds, every_steps=500, jitter=jitter, until_step=9000, max_down=workers - 1), workers
    return RandomFaults(kinds=kinds, every_s=15, jitter=jitter, until_s=600, max_down=workers - 1), workers


@given(st.lists(faults(), min_size=1, max_size=5))
def test_written_faults_read_back(written: list[Fault]) -> None:
    text = schedule_toml([Planned((fault,)) for fault in written])
    assert parse_schedule(text).faults == tuple(written)


@given(drawn(), st.integers(0, 100))
def test_the_same_seed_gives_the_same_faults(what: tuple[RandomFaults, int], seed: int) -> None:
    random, workers = what
    planned = resolve(Schedule(seed=seed, random=random), workers, STEPS)
    assert planned == resolve(Schedule(seed=seed, random=random), workers, STEPS)
    assert planned != resolve(Schedule(seed=seed + 1, random=random), workers, STEPS) or not random.jitter
    resolved = parse_schedule(schedule_toml(planned)).faults
    assert resolved == tuple(fault for each in planned for fault in each.faults)


@given(drawn(), st.integers(0, 100))
def test_what_is_drawn_fits_the_job_and_its_time(what: tuple[RandomFaults, int], seed: int) -> None:
    random, workers = what
    planned = resolve(Schedule(seed=seed, random=random), workers, STEPS)
    times = [each.step if each.step is not None else each.after_s for each in planned]
    every, until = (500, 9000) if random.every_steps else (15, 600)
    assert times == sorted(times)
    assert times[0] == every and times[-1] <= until
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert all(every * (1 - random.jitter) - 1 <= gap <= every * (1 + random.jitter) + 1 for gap in gaps)
    for each in planned:
        assert {each.name} <= set(random.kinds)
        assert num_taken(each.faults) <= random.max_down
        struck = [fault.slot for fault in each.faults if isinstance(fault.slot, int)]
        assert all(slot < workers for slot in struck)


@given(drawn(), st.integers(0, 100), st.sets(st.integers(0, 8), min_size=1))
def test_aim_strikes_members_and_as_many_as_planned(
    what: tuple[RandomFaults, int], seed: int, members: set[int]
) -> None:
    random, workers = what
    for planned in resolve(Schedule(seed=seed, random=random), workers, STEPS):
        wanted = {fault.slot for fault in planned.faults if isinstance(fault.slot, int)}
        aimed = aim(planned, sorted(members))
        if aimed is None:
            assert len(wanted) > len(members)
            continue
        slots = {fault.slot for fault in aimed.faults if isinstance(fault.slot, int)}
        assert slots <= members and len(slots) == len(wanted)
        assert [replace(fault, slot=0) for fault in planned.faults if isinstance(fault.slot, int)] == [
            replace(fault, slot=0) for fault in aimed.faults if isinstance(fault.slot, int)
        ]


@st.composite
def patient_faults(draw: st.DrawFn) -> list[Fault]:
    at_members = st.sampled_from([0, 1, "first", "last"])
    in_a_step = [("raise", "compute"), ("raise", "hook"), ("kill", "data"), ("kill", "barrier"), ("kill", "exchange")]
    found = []
    for _ in range(draw(st.integers(2, 6))):
        kind, where = draw(st.sampled_from([*in_a_step, ("kill", "heal"), ("stop", "heal"), ("leave", "anywhere")]))
        slot = draw(st.sampled_from([0, "donor", "joiner"]) if where == "heal" else at_members)
        more = {"duration_s": 0.5} if kind == "stop" else {}
        found.append(Fault(kind=kind, where=where, slot=slot, step=draw(st.integers(1, 6)), **more))
    return sorted(found, key=lambda fault: fault.step or 0)


@examples(200)
@given(patient_faults(), st.integers(2, 4), st.integers(0, 10_000))
def test_patient_faults_strike_one_at_a_time(written: list[Fault], num_workers: int, seed: int) -> None:
    """However slowly members return, and however old what is known of them: never twice the same worker in one step.
    Never two workers in one step either, but for faults that had to wait until the members change."""
    struck = play(written, num_workers, random.Random(seed))
    by_themselves = [(each.worker, each.step) for each in struck if not each.fault.is_outside]
    assert len(by_themselves) == len(set(by_themselves))
    steps = [each.step for each in struck if not each.fault.awaits_change]
    assert len(steps) == len(set(steps))


@examples(200)
@given(st.integers(2, 5), st.integers(1, 50), st.integers(0, 10_000))
def test_each_standard_fault_strikes_in_a_step_of_its_own(num_workers: int, gap: int, seed: int) -> None:
    faults = [
        replace(fault, duration_s=0.5) if fault.kind == "stop" else fault for fault in standard_faults(num_workers, gap)
    ]
    struck = play(faults, num_workers, random.Random(seed))
    assert [each.fault.kind for each in struck] == [fault.kind for fault in faults]
    assert [each.worker.slot for each in struck] == [fault.slot for fault in faults]
    steps = [each.step for each in struck]
    assert steps == sorted(set(steps))
