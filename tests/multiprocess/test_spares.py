"""Processes that are held ready for the next worker that must be started: handed over, refused, replaced, ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from job import FAULTY, Job, plain_run
from test_agent import LIMIT_S, FakeCoordinator, wait_for_text, wait_gone

from elastic_train.launch import agent as agent_module
from elastic_train.launch import spares as spares_module
from elastic_train.launch.agent import Agent
from elastic_train.launch.environment import PREFIX
from elastic_train.launch.spares import LOG, Spares

pytestmark = pytest.mark.timeout(300)

# What a worker and a spare do, without jax: the same calls in the same order.
WORKER = """
import os, sys, time
from elastic_train.launch.channel import READY, TAKEN, IMPORTED, OUTPUT, receive, send
from elastic_train.launch.environment import SPARE_VARIABLE, STATE_VARIABLE
from elastic_train.launch.spare import become, open_channel

channel = open_channel()
if SPARE_VARIABLE in os.environ:
    print("importing", flush=True)
    {importing}
    send(channel, {{"say": IMPORTED}})
    told, descriptors = receive(channel, 8)
    if told is None:
        sys.exit(0)
    {asked}
    become(told["environment"], dict(zip(told["descriptors"], descriptors)))
    send(channel, {{"say": TAKEN}})
state = os.readlink("/proc/self/fd/" + os.environ[STATE_VARIABLE]).split()[0]
print(os.environ["ELASTIC_TRAIN_SLOT"], state, os.getsid(0) == os.getpid(), flush=True)
while os.path.exists(os.environ["GATE"]):
    time.sleep(0.01)
send(channel, {{"say": READY}})
time.sleep(600)
"""


class Host:
    """An agent whose workers and spares run a piece of Python code, under a small coordinator."""

    def __init__(self, coordinator: FakeCoordinator, log_dir: Path) -> None:
        self.coordinator, self.log_dir = coordinator, log_dir
        self.said: list[str] = []
        self.gate = log_dir / "gate"  # while it is there, no worker becomes ready
        self.fixed = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path), "GATE": str(self.gate)}
        self.agent: Agent | None = None

    def begin(self, number: int = 1, importing: str = "pass", asked: str = "pass") -> None:
        """Starts slot 0, whose being ready lets spares be started."""
        code = textwrap.dedent(WORKER).format(importing=importing, asked=asked)
        command = [sys.executable, "-c", code]
        environment = {**self.fixed, f"{PREFIX}SPARE": "1"}
        self.agent = Agent(
            self.coordinator.address,
            "s3cret",
            [0, 1],
            command,
            lambda identity, jax: {**self.fixed, f"{PREFIX}SLOT": str(identity.slot)},
            self.log_dir,
            "here",
            5.0,
            patience_s=LIMIT_S,
            rejoin=True,
            warm=Spares(number, command, environment, self.log_dir, self.said.append),
            on_note=self.said.append,
        )
        self.agent.start()
        self.coordinator.report("hello")
        self.coordinator.start(0)
        assert not self.coordinator.report("started").warm

    def log(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Waits for so many lines of the spares' log."""
        return wait_for_lines(self.log_dir / LOG, pattern, count)

    def spare(self, number: int = 1) -> int:
        """Process id of the so manieth spare that has imported everything."""
        return int(self.log(r"process (\d+) has imported everything", number)[-1][1])


def wait_for_lines(path: Path, pattern: str, count: int = 1, limit_s: float = LIMIT_S) -> list[re.Match[str]]:
    found: list[re.Match[str]] = []

    def enough() -> bool:
        found[:] = re.finditer(pattern, path.read_text() if path.exists() else "")
        return len(found) >= count

    wait_until(f"{pattern!r} {count} times in {path}", enough, limit_s)
    return found


def wait_until(what: str, condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        threading.Event().wait(0.01)  # a file gives no event


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setattr(spares_module, "REST_S", 0.0)
    monkeypatch.setattr(spares_module, "FIRST_BACKOFF_S", 0.01)
    coordinator = FakeCoordinator()
    made = Host(coordinator, tmp_path)
    yield made
    if made.agent is not None:
        made.agent.close(LIMIT_S)
    coordinator.close()


def test_a_spare_becomes_the_next_worker_and_is_replaced(host: Host, tmp_path: Path) -> None:
    host.begin()
    pid = host.spare()
    host.coordinator.start(1, incarnation=4, node=2)
    started = host.coordinator.report("started")
    assert (started.pid, started.warm, started.identity.incarnation) == (pid, True, 4)
    # What it wrote before is in front of what it writes as that worker, whose settings and files it has.
    assert wait_for_text(tmp_path / "1-4.log", 2) == ["importing", "1 /memfd:state-of-slot-1 True"]
    assert host.spare(2) != pid
    host.coordinator.kill(1, incarnation=4, node=2)
    exited = host.coordinator.report("exited")
    assert (exited.identity.slot, exited.exit_code) == (1, -signal.SIGKILL)
    assert host.said == []


def test_no_spare_before_the_first_worker_is_ready(host: Host, tmp_path: Path) -> None:
    host.gate.touch()
    host.begin()
    wait_for_text(tmp_path / "0-0.log")
    assert len(psutil.Process().children()) == 1
    host.gate.unlink()
    host.spare()


def test_several_spares_are_handed_out_one_after_the_other(host: Host) -> None:
    host.begin(number=2)
    host.spare(2)
    pids = {int(found[1]) for found in host.log(r"process (\d+) has imported everything", 2)}
    for incarnation in (0, 1):
        host.coordinator.start(1, incarnation, node=2 + incarnation)
    assert {host.coordinator.report("started").pid for _ in range(2)} == pids


def test_a_spare_that_is_killed_is_replaced_and_is_no_worker(host: Host) -> None:
    host.begin()
    pid = host.spare()
    os.kill(pid, signal.SIGKILL)
    host.log(f"process {pid} has ended with signal 9")
    assert host.spare(2) != pid
    assert len(host.said) == 1 and "has ended while it waited: signal 9" in host.said[0]
    host.coordinator.start(1, node=2)
    assert host.coordinator.report("started").warm  # and no exit was reported before


def test_a_spare_that_dies_while_it_is_wanted(host: Host) -> None:
    host.begin()
    for incarnation in range(5):
        os.kill(host.spare(1 + incarnation), signal.SIGKILL)
        host.coordinator.start(1, incarnation, node=2 + incarnation)
        assert not host.coordinator.report("started").warm
        host.coordinator.kill(1, incarnation, node=2 + incarnation)
        assert host.coordinator.report("exited").identity.incarnation == incarnation


def test_without_a_spare_a_worker_is_started_anew(host: Host, tmp_path: Path) -> None:
    host.begin(importing="time.sleep(600)")
    wait_for_text(tmp_path / "0-0.log")
    host.coordinator.start(1, node=2)
    assert not host.coordinator.report("started").warm
    wait_for_text(tmp_path / "1-0.log")


def test_a_spare_that_fails_leaves_what_it_wrote(host: Host, tmp_path: Path) -> None:
    host.begin(importing="raise LookupError('planned')")
    host.log(r"process \d+ has ended with exit code 1\nimporting\nTraceback", 2)
    assert "LookupError: planned" in (tmp_path / LOG).read_text()
    assert len(host.said) == 1  # however often it fails in a row
    assert "has ended while it imported: exit code 1" in host.said[0] and str(tmp_path / LOG) in host.said[0]
    host.coordinator.start(1, node=2)
    assert not host.coordinator.report("started").warm


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ("send(channel, {'say': 'refused', 'reason': 'the moon is full'}); sys.exit(0)", "the moon is full"),
        ("sys.exit(3)", "it has just ended"),
        ("time.sleep(600)", "it did not answer within 0.5 s"),
    ],
    ids=["refuses", "ends", "is silent"],
)
def test_a_spare_that_cannot_be_this_worker(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, reason: str
) -> None:
    monkeypatch.setattr(spares_module, "ANSWER_LIMIT_S", 0.5)
    host.begin(asked=asked)
    pid = host.spare()
    host.coordinator.start(1, node=2)
    started = host.coordinator.report("started")
    assert started.pid != pid and not started.warm
    wait_gone(pid)
    assert wait_for_text(tmp_path / "1-0.log") == ["1 /memfd:state-of-slot-1 True"]
    assert host.said == [f"the process held ready for a worker is not used: {reason}. The worker is started anew."]


def test_a_spare_with_other_values_of_what_is_read_at_import_is_not_used(host: Host) -> None:
    host.begin()
    pid = host.spare()
    host.fixed = {**host.fixed, "XLA_FLAGS": "--xla_dump_to=/d"}
    host.coordinator.start(1, node=2)
    assert not host.coordinator.report("started").warm
    wait_gone(pid)
    assert "it was started with other values of XLA_FLAGS" in host.said[0]


def test_a_spare_outlives_the_coordinator(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "RETRY_S", 0.01)
    host.begin()
    pid = host.spare()
    host.coordinator.server.stop(0).wait(LIMIT_S)
    second = FakeCoordinator(host.coordinator.address)
    try:
        second.report("hello")
        second.start(0, incarnation=1, node=1)
        assert second.report("started").pid == pid
    finally:
        second.close()


def test_spares_end_with_their_agent(host: Host) -> None:
    host.begin()
    pid = host.spare()
    host.coordinator.shutdown()
    assert host.agent is not None
    host.agent.wait(LIMIT_S)
    wait_gone(pid)


# In a job ------------------------------------------------------------------------------------------------------------

OPTIONS = ("--steps", "1000000", "--set", "faults.warm_spares=1", "faults.first_backoff_s=0.1")


def spare_of(job: Job, number: int = 1) -> int:
    found = wait_for_lines(job.run_dir / "logs" / LOG, r"process (\d+) has imported everything", number, 120.0)
    return int(found[number - 1][1])


def started_again(job: Job, slot: int, incarnation: int = 1) -> dict:
    return job.wait_event("worker_started", slot=slot, incarnation=incarnation)


def stop_and_compare(job: Job, tmp_path: Path) -> None:
    job.process.send_signal(signal.SIGINT)
    assert job.finish() == 130, job.logs()
    assert job.processes_left() == []
    alone = plain_run(tmp_path / "alone", job.summary["step"])
    assert job.summary["params_sha256"] == alone["params_sha256"]
    assert job.summary["state_sha256"] == alone["state_sha256"]


def test_killed_workers_are_replaced_by_the_spare(tmp_path: Path) -> None:
    with Job(tmp_path / "run", FAULTY, *OPTIONS, workers=2, pace_s=0.03) as job:
        for number, slot in enumerate((1, 0), 1):
            job.wait_members(0, 1)
            pid = spare_of(job, number)
            job.kill(slot)
            again = started_again(job, slot)
            assert (again["pid"], again["warm"]) == (pid, True)
            ready = job.wait_event("worker_ready", slot=slot, incarnation=1)
            assert ready["start_s"].keys() >= {"process", "import", "connect", "backend", "data", "model", "compile"}
            first = job.wait_event("worker_ready", slot=slot, incarnation=0)
            assert ready["start_s"]["import"] < first["start_s"]["import"] / 2
            job.wait_for("it to be healed", lambda: any(slot in e["healed"] for e in job.events("recovered")))  # noqa: B023
        stop_and_compare(job, tmp_path)
        assert job.events("worker_failed") == []


def test_a_spare_killed_before_use_costs_nothing(tmp_path: Path) -> None:
    with Job(tmp_path / "run", FAULTY, *OPTIONS, workers=2, pace_s=0.03) as job:
        pid = spare_of(job)
        os.kill(pid, signal.SIGKILL)
        wait_for_lines(job.run_dir / "logs" / LOG, f"process {pid} has ended with signal 9")
        job.kill(1)
        assert not started_again(job, 1)["warm"]
        job.wait_event("recovered", kind="admission")
        stop_and_compare(job, tmp_path)
        assert [(fault["kind"], fault["slot"]) for fault in job.summary["faults"]] == [("killed", 1)]


def test_no_spare_outlives_its_command(tmp_path: Path) -> None:
    with Job(tmp_path / "run", FAULTY, *OPTIONS, workers=1, pace_s=0.03) as job:
        pid = spare_of(job)
        job.note_processes()
        job.process.kill()
        wait_gone(pid)
        assert job.processes_left() == []


def test_a_spare_that_has_imported_other_code_is_not_used(tmp_path: Path) -> None:
    """Who is started instead runs the edited recipe, as without spares: it is refused, until the edit is undone."""
    recipe = tmp_path / "edited.py"
    shutil.copy(FAULTY, recipe)
    with Job(tmp_path / "run", recipe, *OPTIONS, workers=2, pace_s=0.03) as job:
        pid = spare_of(job)
        recipe.write_text(FAULTY.read_text() + "\nEDITED = True\n")
        job.kill(1)
        again = started_again(job, 1)
        assert not again["warm"] and again["pid"] != pid
        assert "not used: the recipe's code has changed since it was imported: edited.py" in job.output
        job.wait_event("worker_refused", slot=1)
        shutil.copy(FAULTY, recipe)
        job.wait_for("slot 1 to be back", lambda: any(1 in e["healed"] for e in job.events("recovered")))
        stop_and_compare(job, tmp_path)
