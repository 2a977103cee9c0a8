"""A chaos file that is wrong is refused with the key, the value and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_train.chaos.faults import ScheduleError
from elastic_train.chaos.schedule import parse_schedule, read_schedule, resolve

KILL = '[[fault]]\nkind = "kill"\nstep = 20\nslot = 1\n'
RANDOM = "[random]\nevery_steps = 50\nkinds = { kill = 1 }\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no fault in it"),
        ("seed = 1\n[[fault", "not valid TOML"),
        ("seed = " + "[" * 3000 + "]" * 3000, "nested too deeply"),
        ("seeds = 1", "unknown 'seeds'. Did you mean 'seed'?"),
        ("seed = 1.5\n" + KILL, "seed = 1.5: use a whole number"),
        ("fault = 1", "write each fault as a table of its own"),
        ('[[fault]]\nkind = "kil"\nstep = 1', "fault 1: kind: unknown 'kil'. Did you mean 'kill'?"),
        ("[[fault]]\nstep = 1", "fault 1: kind is missing"),
        (KILL + '[[fault]]\nkind = "kill"\nstep = 1\nwher = "data"', "fault 2: unknown 'wher'. Did you mean 'where'?"),
        ('[[fault]]\nkind = "kill"\nstep = 1\nwhere = "exchang"', "where = 'exchang': a kill can be at anywhere, data"),
        ('[[fault]]\nkind = "leave"\nstep = 1\nwhere = "data"', "a leave can be at anywhere"),
        ('[[fault]]\nkind = "kill"', "give either step or after_s"),
        ('[[fault]]\nkind = "kill"\nstep = 1\nafter_s = 2.0', "give either step or after_s"),
        ('[[fault]]\nkind = "kill"\nstep = -1', "step = -1: use a number of completed steps"),
        ('[[fault]]\nkind = "kill"\nstep = 1\nslot = "frist"', "Did you mean 'first'?"),
        ('[[fault]]\nkind = "kill"\nstep = 1\nslot = true', "slot = True"),
        ('[[fault]]\nkind = "kill"\nstep = 1\nslot = "donor"\nwhere = "gather"', "a donor is one at"),
        ('[[fault]]\nkind = "corrupt"\nstep = 1\nslot = 1', "what is received is corrupted"),
        ('[[fault]]\nkind = "kill"\nstep = 1\nslot = "first"\nwhere = "start"', "a worker that starts is no member"),
        ('[[fault]]\nkind = "kill"\nstep = 1\nduration_s = 2', "only a fault of kind stop has it"),
        ('[[fault]]\nkind = "stop"\nstep = 1\nduration_s = 0', "use a positive number"),
        ('[[fault]]\nkind = "kill"\nstep = 1\nrepeat = "slot"', "only a fault of kind raise is repeated"),
        ("[random]\nevery_steps = 50", "random: kinds is missing"),
        ("[random]\nevery_steps = 50\nkinds = { kil = 1 }", "Did you mean 'kill'?"),
        ("[random]\nevery_steps = 50\nkinds = { kill = 0 }", "kinds.kill = 0: use a positive weight"),
        ('[[fault]]\nkind = ["kill"]\nstep = 1', "kind: unknown"),
        ('[[fault]]\nkind = "kill"\nafter_s = inf', "after_s = inf: use seconds since the first step"),
        (f'[[fault]]\nkind = "kill"\nafter_s = 1{400 * "0"}', "use seconds since the first step"),
        ("[random]\nevery_s = 5\nuntil_s = inf\nkinds = { kill = 1 }", "until_s = inf: use a positive number"),
        ("[random]\nevery_steps = 0.5\nkinds = { kill = 1 }", "every_steps = 0.5: use a whole number of steps"),
        ("[random]\nevery_steps = 50\nkinds = { kill = inf }", "kinds.kill = inf: use a positive weight"),
        ("[random]\nkinds = { kill = 1 }", "give either every_steps or every_s"),
        ("[random]\nevery_s = 5\nkinds = { kill = 1 }", "until_s = None: say for how many seconds"),
        (RANDOM + "quiet_s = 5", "quiet_s = 5: the interval is given in steps"),
        (RANDOM + "jitter = 1.0", "jitter = 1.0: use a share from 0 to below 1"),
        (RANDOM + "max_down = 0", "max_down = 0: use a number of slots"),
        ("patient = 1\n" + KILL, "patient = 1: use true or false"),
        ("patient = true\n" + RANDOM, "patient = True: leave it out"),
        ("stop_after_steps = 0.5\n" + KILL, "stop_after_steps = 0.5: use a number of steps"),
        (RANDOM + "max_dow = 1", "Did you mean 'max_down'?"),
    ],
)
def test_wrong_files(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        parse_schedule(text)
    assert message in str(raised.value)


def told(text: str, workers: int = 2, steps: int = 100) -> list[str]:
    with pytest.raises(ScheduleError) as raised:
        resolve(parse_schedule(text), workers, steps)
    assert str(raised.value) == "\n".join(raised.value.texts)
    return [text.partition("; ")[0] for text in raised.value.texts]


def test_all_mistakes_are_told_at_once() -> None:
    text = """
seeds = 1
seed = -1
patient = 3
[[fault]]
kind = "kil"
step = -1
slot = "frist"
repeat = "twice"
[[fault]]
kind = "slow"
step = 1
after_s = -1.0
wher = "data"
factor = 0
num_steps = 1.5
[[fault]]
kind = "kill"
step = 3
[[fault]]
slot = -1
after_s = 2.0
[random]
every_s = -5
quiet_s = "x"
kinds = { kil = 1, kill = 0 }
jitter = 2
max_down = 0
other = 1
"""
    beginnings = [
        "the file: unknown 'seeds'. Did you mean 'seed'?",
        "seed = -1: ",
        "patient = 3: ",
        "fault 1: kind: unknown 'kil'. Did you mean 'kill'?",
        "fault 1: step = -1: ",
        "fault 1: slot, where it is no number: unknown 'frist'. Did you mean 'first'?",
        "fault 1: repeat = 'twice': ",
        "fault 2: unknown 'wher'. Did you mean 'where'?",
        "fault 2: step = 1: give either step or after_s",
        "fault 2: after_s = -1.0: ",
        "fault 2: factor = 0: ",
        "fault 2: num_steps = 1.5: ",
        "fault 4: kind is missing",
        "fault 4: slot = -1: ",
        "random: unknown 'other'.",
        "random: kinds: unknown 'kil'. Did you mean 'kill'?",
        "random: kinds.kill = 0: ",
        "random: every_s = -5: ",
        "random: quiet_s = 'x': ",
        "random: until_s = None: ",
        "random: jitter = 2: ",
        "random: max_down = 0: ",
    ]
    found = told(text)
    assert len(found) == len(beginnings)
    assert all(text.startswith(beginning) for text, beginning in zip(found, beginnings, strict=True))


@pytest.mark.parametrize(
    ("text", "mistakes"),
    [
        ("faults = 1", ["the file: unknown 'faults'. Did you mean 'fault'? Known are: "]),
        ('[[fault]]\nkind = "kil"\nstep = 1\nwhere = "nowhere"\nduration_s = 1', ["fault 1: kind: unknown 'kil'."]),
        ('[[fault]]\nkind = "kill"\nstep = 1\nwhere = "x"\nslot = "joiner"', ["fault 1: where = 'x': a kill can be"]),
        ("[random]\nkinds = { kill = 1 }\nuntil_step = 5\nquiet_s = 1", ["random: every_steps = None: give either"]),
    ],
)
def test_nothing_is_said_of_what_follows_from_another_mistake(text: str, mistakes: list[str]) -> None:
    found = told(text)
    assert len(found) == len(mistakes)
    assert all(text.startswith(beginning) for text, beginning in zip(found, mistakes, strict=True))


def test_all_that_does_not_fit_the_job_is_told_at_once() -> None:
    drawn = "[random]\nevery_steps = 5\nmax_down = 2\nkinds = { kill_two = 1, kill_donor = 1 }\n"
    assert told(KILL.replace("slot = 1", "slot = 2").replace("20", "101") + drawn) == [
        "fault 1: slot = 2: the job has slots 0 to 1",
        "fault 1: step = 101: the job ends after step 100",
        "random: max_down = 2: a job of 2 workers survives at most 1",
        "random: kinds = 'kill_donor': needs at least 3 workers",
        "random: kinds = 'kill_two': needs at least 3 workers",
    ]
    drawn = drawn.replace("max_down = 2", "max_down = 1")
    each = "random: max_down = 1: too low for {}, which takes 2 members away at once"
    assert sorted(told(drawn.replace("kill_donor", "kill_all_but_one"), workers=3)) == [
        each.format("kill_all_but_one"),
        each.format("kill_two"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (KILL, "fault 1: slot = 1: the job has slots 0 to 0"),
        (KILL.replace("slot = 1", "slot = 0").replace("20", "101"), "fault 1: step = 101: the job ends after step 100"),
        (RANDOM, "random: max_down = 1: a job of 1 workers survives at most 0"),
    ],
)
def test_files_that_do_not_fit_the_job(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        resolve(parse_schedule(text), workers=1, steps=100)
    assert message in str(raised.value)


def test_what_struck_after_the_last_step_can_be_replayed() -> None:
    """As the record of a run says of a hook after the last commit."""
    text = KILL.replace("slot = 1", "slot = 0").replace("20", "100")
    assert [planned.step for planned in resolve(parse_schedule(text), workers=1, steps=100)] == [100]


@pytest.mark.parametrize(("every_s", "until_s"), [("1e-300", "1e300"), ("0.001", "1e9")])
def test_an_interval_that_would_never_come_to_an_end(every_s: str, until_s: str) -> None:
    text = f"[random]\nevery_s = {every_s}\nuntil_s = {until_s}\nkinds = {{ kill = 1 }}"
    with pytest.raises(ScheduleError, match=r"random: every_s = .*: more than 100000 faults would be drawn"):
        resolve(parse_schedule(text), workers=2, steps=100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[random]\nevery_steps = 50\nkinds = { kill_two = 1 }", "random: kinds = 'kill_two': needs at least 3"),
        (RANDOM.replace("50", "90"), "no fault fits"),
    ],
)
def test_drawn_faults_that_do_not_fit_the_job(text: str, message: str) -> None:
    with pytest.raises(ScheduleError) as raised:
        resolve(parse_schedule(text), workers=2, steps=100)
    assert message in str(raised.value)


def test_a_scenario_that_takes_too_many_at_once_is_refused() -> None:
    text = "[random]\nevery_steps = 50\nmax_down = 1\nkinds = { kill_two = 1 }"
    with pytest.raises(ScheduleError, match="max_down = 1: too low for kill_two, which takes 2 members"):
        resolve(parse_schedule(text), workers=4, steps=1000)


def test_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"--chaos .*none.toml: cannot be read \(No such file"):
        read_schedule(tmp_path / "none.toml")
    (tmp_path / "chaos.toml").write_text("seed = 1")
    with pytest.raises(ScheduleError, match=r"--chaos .*chaos.toml: there is no fault in it"):
        read_schedule(tmp_path / "chaos.toml")
    (tmp_path / "chaos.toml").write_text("seed = -1\npatient = 3\n")
    with pytest.raises(ScheduleError) as raised:
        read_schedule(tmp_path / "chaos.toml")
    head, *mistakes = str(raised.value).splitlines()
    assert head == f"--chaos {tmp_path / 'chaos.toml'}:"
    assert [text.partition(":")[0] for text in mistakes] == ["  seed = -1", "  patient = 3"]


def test_random_slots_are_drawn_from_the_seed() -> None:
    text = "".join(f'[[fault]]\nkind = "kill"\nstep = {step}\n' for step in range(20))
    slots = [[p.faults[0].slot for p in resolve(parse_schedule(f"seed = {s}\n{text}"), 4, 100)] for s in (1, 1, 2)]
    assert slots[0] == slots[1] != slots[2]
    assert set(slots[0]) == {0, 1, 2, 3}
