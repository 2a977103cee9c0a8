"""What old incarnations still say and do when their slot has a new one.

In most tests coordinator and roster are real, and the workers are fakes: an agent's connection breaks, so its
workers count as dead; but they live on, connected, and speak again when a new agent has started
their slots anew.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from job import DEADLINE_S, FAULTY, UNSAVED
from job import Job as WholeJob
from test_control import PATIENCE_S, Agent, Job
from test_faults import healed, stop_and_compare

from elastic_train.coordinator import control_pb2, wire
from elastic_train.coordinator.client import Link
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import Identity, View
from elastic_train.membership.roster import Roster, WorkerState, apply


class RealJob(Job):
    """A coordinator with the roster that it has in a job."""

    def _apply(self, roster: Roster, event: r.Event) -> tuple[Roster, list[r.Action]]:
        after, actions = apply(roster, event)
        for action in actions:
            if isinstance(action, r.Start):
                self.starts.put(action.identity)
        self.events.append(event)
        return after, list(actions)

    def __init__(self) -> None:
        self.starts: queue.SimpleQueue[Identity] = queue.SimpleQueue()
        super().__init__(num_slots=2, starts_per_slot=4)

    def host(self) -> tuple[Agent, list[Identity]]:
        """An agent for both slots, and the identities of the workers it is told to start."""
        agent = self.agent(0, 1)
        return agent, sorted(self.starts.get(timeout=PATIENCE_S) for _ in range(2))

    def worker(self, identity: Identity) -> Worker:
        """A worker that has said hello."""
        link = Link(self.coordinator.address, "only this job knows", identity, keepalive_s=5.0)
        self._links.append(link)
        worker = Worker(link)
        link.hello(1, "here", "versions")
        return worker

    def members(self, identities: list[Identity]) -> list[Worker]:
        """Workers that have been made members of a view."""
        workers = [self.worker(identity) for identity in identities]
        for worker in workers:
            worker.link.ready({})
        for worker in workers:
            worker.view = worker.link.wait_formed(PATIENCE_S)
            assert worker.view is not None
        return workers

    def notes_named(self, name: str, identity: Identity) -> None:
        """Waits for a note about this worker."""
        with self.notes._changed:
            assert self.notes._changed.wait_for(
                lambda: any(
                    note == name and Identity(fields["slot"], fields["incarnation"], fields["node"]) == identity
                    for note, fields in self.notes._items
                    if "node" in fields
                ),
                PATIENCE_S,
            ), (name, identity)


class Worker:
    """A fake worker, and what it was told about its end."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.view: View | None = None
        self.evicted: queue.SimpleQueue[str] = queue.SimpleQueue()
        link.on_evict = self.evicted.put


@pytest.fixture
def job() -> Iterator[RealJob]:
    job = RealJob()
    yield job
    job.close()


def zombies_and_members(job: RealJob) -> tuple[list[Worker], list[Worker]]:
    """Members that count as dead and are still connected, and those that have taken their slots."""
    agent, first = job.host()
    zombies = job.members(first)
    agent.channel.close()
    job.events.expect(r.AgentLost("here"))
    _, second = job.host()
    assert [identity.incarnation for identity in second] == [1, 1]
    return zombies, job.members(second)


def speak_as_zombies(job: RealJob, zombies: list[Worker]) -> None:
    """All that a member can say. Returns when all of it has been heard."""
    for zombie in zombies:
        link = zombie.link
        assert zombie.view is not None
        link.record({"step": 21, "loss": 0.0}, flush=True)
        link.phase("update", 21)
        link.viewed(View(99, zombie.view.members), "death", (), (), 21, 0.0)
        link.ready({})
        link.failed(21, fatal=False, startup=False, traceback=f"last words of {link.identity}")
        link.finished("done", 21, 2100, "zombie", "zombie", {})
    for zombie in zombies:
        job.events.expect(r.Finished(zombie.link.identity, "done", step=21))


def assert_zombies_change_nothing(job: RealJob, zombies: list[Worker], members: list[Worker]) -> None:
    """Neither the ledger, nor the view, nor the end of the job is what a fenced worker says."""
    view = members[0].view
    members[0].link.record({"step": 1, "loss": 1.0}, flush=True)
    job.commits.expect({"step": 1, "loss": 1.0})
    speak_as_zombies(job, zombies)
    roster = job.coordinator.roster
    assert [record["step"] for record in job.commits] == [1], "a zombie's record entered the ledger"
    assert roster.view == view
    assert not roster.finishing and not job.coordinator._ending.finished
    assert job.coordinator.status()["step"] <= 1
    assert [worker.state for worker in roster.members] == [WorkerState.MEMBER] * 2
    for zombie in zombies:
        told = zombie.evicted.get(timeout=PATIENCE_S)
        slot, incarnation, node = zombie.link.identity
        assert told.startswith(f"slot {slot} has incarnation 1 ")
        assert told.endswith(f"you are incarnation {incarnation} (node {node})")
    for member in members:
        assert member.evicted.empty()
        assert not member.link.stopped_now.is_set()


def test_row_06_an_old_incarnation_that_speaks_again_changes_nothing(job: RealJob) -> None:
    zombies, members = zombies_and_members(job)
    assert_zombies_change_nothing(job, zombies, members)


def test_row_06_the_fence_is_what_keeps_zombies_out(job: RealJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without it the same check fails, at the ledger."""
    zombies, members = zombies_and_members(job)
    monkeypatch.setattr(Roster, "is_living", lambda roster, identity: True)
    with pytest.raises(AssertionError, match="a zombie's record entered the ledger"):
        assert_zombies_change_nothing(job, zombies, members)


def test_row_06_an_old_incarnation_cannot_say_hello_in_place_of_the_new_one(job: RealJob) -> None:
    """Wrong in any part: it is told to exit, and takes no place that the right one needs."""
    _, started = job.host()
    right = started[0]
    wrong = [
        right._replace(incarnation=7),
        right._replace(slot=1),
        right._replace(node=7),
        Identity(9, 0, right.node),
    ]
    strays = [job.worker(identity) for identity in wrong]
    for stray in strays:
        assert stray.evicted.get(timeout=PATIENCE_S)
    worker = job.worker(right)
    worker.link.ready({})
    job.events.expect(r.Ready(right))
    # They get nothing that is meant for it.
    job.worker(started[1]).link.ready({})
    assert worker.link.wait_formed(PATIENCE_S) is not None
    assert [stray.link.wait_formed(0) for stray in strays] == [None] * 4
    # Their end is not its end.
    for stray in strays:
        stray.link.close()
    worker.link.failed(0, fatal=False, startup=False, traceback="still heard")
    job.notes_named("user_code_failed", right)
    assert not any(isinstance(event, r.Silent) and event.identity == right for event in job.events)
    assert job.coordinator._connections.workers[right.node] is not None


def test_row_06_a_second_worker_with_the_same_identity_is_refused(job: RealJob) -> None:
    _, started = job.host()
    job.worker(started[0])
    with pytest.raises(Exception, match="ALREADY_EXISTS"):
        job.worker(started[0])


def test_row_06_an_exit_told_late_does_not_end_the_new_incarnation(job: RealJob) -> None:
    """The first agent's report comes by another connection, after the slot was started again."""
    agent, first = job.host()
    job.members(first)
    agent.channel.close()
    job.events.expect(r.AgentLost("here"))
    second_agent, second = job.host()
    members = job.members(second)
    second_agent.exited(first[0])
    second_agent._outbox.put(
        control_pb2.FromAgent(started=control_pb2.Started(identity=wire.identity_message(first[1]), pid=5))
    )
    job.events.expect(r.Started(first[1], 5))
    assert [worker.identity for worker in job.coordinator.roster.members] == second
    assert members[0].evicted.empty()


class Host:
    """Another host's command for slot 2 of a job, on this machine."""

    def __init__(self, job: WholeJob) -> None:
        job.wait_for("job.json", (job.run_dir / "job.json").exists)
        address = json.loads((job.run_dir / "job.json").read_text())["address"]
        command = [sys.executable, "-m", "elastic_train.cli", "run", str(FAULTY), "--coordinator", address]
        options = ["--workers", "3", "--slots", "2", "--run-dir", str(job.run_dir), "--trace-blocks"]
        root = str(FAULTY.parents[3])
        self.process = psutil.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": root, "PACE_S": "0.03", "JAX_PLATFORMS": "cpu"},
        )
        job._seen[self.process.pid] = self.process

    def signal_all(self, job: WholeJob, number: int) -> list[psutil.Process]:
        """Sends a signal to the agent and then to its workers."""
        processes = [self.process, *self.process.children(recursive=True)]
        job._seen.update({process.pid: process for process in processes})
        for process in processes:
            process.send_signal(number)
        return processes


@pytest.mark.timeout(400)
def test_rows_06_07_restart_under_the_same_slot_before_the_death_was_noticed_of_who_then_wakes_up(tmp_path):
    """A host with one worker freezes. Its successor has offered the same slot already, and was refused.

    When the death is noticed the successor gets the slot, as a new incarnation that is healed. Then the old host wakes
    up: its worker must go without having done anything, and its agent is refused in turn.
    """
    options = ("--steps", "1000000", "--slots", "0,1", "--set", "faults.keepalive_s=1.0", *UNSAVED)
    with WholeJob(tmp_path / "run", FAULTY, *options, pace_s=0.03) as job:
        old = Host(job)
        job.wait_members(0, 1, 2)
        new = Host(job)
        job.wait_event("slots_refused", slots=[2])
        frozen = old.signal_all(job, signal.SIGSTOP)
        died = job.wait_event("worker_died", slot=2, incarnation=0)
        back = healed(job, 2, after=died["time"])
        new.signal_all(job, 0)
        assert job.worker_pid(2) != frozen[1].pid
        job.wait_step(back["step"] + 5)
        for process in frozen:
            process.send_signal(signal.SIGCONT)
        _, alive = psutil.wait_procs(frozen[1:], timeout=DEADLINE_S)
        assert not alive, f"the woken worker must end by itself; left: {alive}"
        job.wait_event("slots_refused", count=2, slots=[2])  # the woken agent stands by now
        step = job.lines("ledger.jsonl")[-1]["step"]
        job.wait_step(step + 5)
        assert job.lines("ledger.jsonl")[-1]["workers"] == [0, 1, 2]
        assert [event["incarnation"] for event in job.events("worker_started") if event["slot"] == 2] == [0, 1]
        stop_and_compare(job)
