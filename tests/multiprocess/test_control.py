"""The coordinator and its clients over loopback, with a roster that only does what a test tells it to."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import queue
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from elastic_train.config import REPORT_INTERVAL_S, FaultConfig
from elastic_train.coordinator import control_pb2, control_pb2_grpc, wire
from elastic_train.coordinator.client import Link
from elastic_train.coordinator.service import Before, Coordinator, Endpoint
from elastic_train.coordinator.streams import SERVICE_NAME
from elastic_train.errors import ElasticTrainError, UsageError
from elastic_train.membership import roster_events as r
from elastic_train.membership.group import Identity, View
from elastic_train.membership.roster import Limits, Roster, Worker, WorkerState

SECRET = "only this job knows"
PATIENCE_S = 20.0


class Recorder:
    """A list that can be waited for."""

    def __init__(self) -> None:
        self._items: list[object] = []
        self._changed = threading.Condition()

    def append(self, item: object) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def __iter__(self) -> Iterator[object]:
        return iter(list(self._items))

    def expect(self, item: object, timeout: float = PATIENCE_S) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: item in self._items, timeout), (item, self._items)

    def expect_count(self, item: object, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._items.count(item) >= count, PATIENCE_S), (item, self._items)

    def expect_kind(self, kind: type, timeout: float = PATIENCE_S):
        def find():
            return next((item for item in self._items if isinstance(item, kind)), None)

        with self._changed:
            assert self._changed.wait_for(lambda: find() is not None, timeout), (kind, self._items)
            return find()


class Job:
    """A coordinator, its records, and the events its roster got; `answers` gives the actions for them."""

    def __init__(
        self,
        num_slots: int = 4,
        keepalive_s: float = 5.0,
        stall_note_s: float = 30.0,
        starts_per_slot: int = 2,
        returning: bool = False,
    ) -> None:
        self.events = Recorder()
        self.commits = Recorder()
        self.notes = Recorder()
        self.shown = Recorder()
        self.ends: list[tuple[r.End, dict[int, str]]] = []
        self.answers: dict[type, Callable[[r.Event], list[r.Action]]] = {}
        self._links: list[Link] = []
        self._agents: list[Agent] = []
        self._steps: set[int] = set()
        self.coordinator = Coordinator(
            Limits(num_slots, faults=FaultConfig(keepalive_s=keepalive_s), num_nodes=starts_per_slot * num_slots),
            self,
            Endpoint(secret=SECRET),
            apply=self._apply,
            on_note=self.shown.append,
            on_end=lambda end, finished: self.ends.append((end, {s: f.status for s, f in finished.items()})),
            stall_note_s=stall_note_s,
            before=Before(returning=returning),
        )

    def _apply(self, roster: Roster, event: r.Event) -> tuple[Roster, list[r.Action]]:
        match event:
            case r.Hello(identity, pid, host):
                worker = Worker(identity, "here", WorkerState.WARMING, pid, host)
                roster = dataclasses.replace(roster, workers={**roster.workers, identity.slot: worker})
            case r.Viewed(_, view, _):
                roster = dataclasses.replace(roster, view=view)
        actions = self.answers.get(type(event), lambda _: [])(event)
        self.events.append(event)
        return roster, actions

    def event(self, name: str, /, **fields: object) -> None:
        self.notes.append((name, fields))

    # Steps begin at 1. Nothing is held back: whether records are put in order is not tested here.

    def commit(self, record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        self.commits.append(record)
        self._steps.add(record["step"])
        return [record]

    @property
    def flushed_step(self) -> int:
        return next(step for step in itertools.count() if step + 1 not in self._steps)

    @property
    def gap(self) -> tuple[int, int] | None:
        later = [step for step in self._steps if step > self.flushed_step]
        return (self.flushed_step + 1, min(later) - 1) if later else None

    def skip_gap(self) -> list[Mapping[str, Any]]:
        first, last = self.gap
        self._steps.update(range(first, last + 1))
        return []

    def new_link(self, node: int, secret: str = SECRET) -> Link:
        link = Link(self.coordinator.address, secret, Identity(node - 1, 0, node), keepalive_s=5.0)
        self._links.append(link)
        return link

    def link(self, node: int) -> Link:
        link = self.new_link(node)
        link.hello(1000 + node, "here", "versions")
        self.events.expect(r.Hello(link.identity, 1000 + node, "here"))
        return link

    def agent(self, *slots: int, id: str = "", carried: dict[int, int] | None = None) -> Agent:
        agent = Agent(self.coordinator.address, slots, id, carried or {})
        self._agents.append(agent)
        return agent

    def close(self) -> None:
        for link in self._links:
            link.close()
        for agent in self._agents:
            agent.close()
        self.coordinator.close()


class Agent:
    """The agent's end of the control plane, without any worker."""

    def __init__(self, address: str, slots: tuple[int, ...], id: str, carried: dict[int, int]) -> None:
        self.channel = grpc.insecure_channel(address, options=wire.channel_options(5.0))
        self._outbox: queue.SimpleQueue[control_pb2.FromAgent | None] = queue.SimpleQueue()
        states = [control_pb2.CarriedState(slot=slot, step=step, epoch=3) for slot, step in carried.items()]
        hello = control_pb2.AgentHello(host="here", slots=slots, id=id, carried=states)
        self._outbox.put(control_pb2.FromAgent(hello=hello))
        stub = control_pb2_grpc.ControlStub(self.channel)
        self.call = stub.Agent(iter(self._outbox.get, None), metadata=wire.secret_metadata(SECRET))

    def exited(self, identity: Identity) -> None:
        exited = control_pb2.Exited(identity=wire.identity_message(identity), exit_code=-9, time=123.0)
        self.send(control_pb2.FromAgent(exited=exited))

    def send(self, message: control_pb2.FromAgent) -> None:
        self._outbox.put(message)

    def close(self) -> None:
        self._outbox.put(None)
        with contextlib.suppress(grpc.RpcError):
            for _ in self.call:
                pass
        self.channel.close()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def test_what_a_worker_tells_becomes_events(job: Job) -> None:
    link = job.link(1)
    me = link.identity
    view = View(3, (me,))
    link.ready({})
    link.viewed(view, "formed", (), (me,), 7, 5.5)
    link.phase("compute", 7)
    job.events.expect(r.Ready(me))
    job.events.expect(r.Viewed(me, view, 7))
    job.events.expect(r.Stepped(me, 7))
    link.failed(7, fatal=False, startup=False, traceback="Traceback ...")
    job.events.expect(r.Failed(me, 7, False, False, "Traceback ..."))
    link.finished("done", 8, 800, "p", "s", {"loss": 0.5})
    job.events.expect(r.Finished(me, "done", step=8))
    assert job.coordinator.status() == {
        "generation": 0,
        "epoch": 3,
        "step": 7,
        "workers": [
            {
                "slot": 0,
                "pid": 1001,
                "host": "here",
                "incarnation": 0,
                "state": "warming",
                "step": 0,
                "shard_time_s": None,
            }
        ],
    }


def test_what_the_roster_decides_reaches_workers_and_agents(job: Job) -> None:
    agent = job.agent(0, 1)
    link = job.link(1)
    evicted: queue.Queue[str] = queue.Queue()
    link.on_evict = evicted.put
    other = Identity(1, 0, 2)
    view = View(1, (link.identity, other))
    job.answers[r.Ready] = lambda _: [
        r.Start("here", other),
        r.Announce((1,), (other,)),
        r.Form(view, (1,)),
        r.AskStop((1,), False, "tired"),
        r.Kill("here", other, "stuck"),
        r.SetTimer("soon", 0.02),
        r.Evict(link.identity, "out of date"),
    ]
    assert next(agent.call).welcome.jax_address == job.coordinator.jax_address
    job.events.expect(r.AgentJoined("here", (0, 1)))
    link.ready({})
    assert evicted.get(timeout=PATIENCE_S) == "out of date"
    assert link.candidates == (other,)
    assert link.wait_formed(0) == view
    assert link.wait_formed(0) is None
    assert link.stop_requested == "tired" and not link.stopped_now.is_set()
    assert wire.identity_value(next(agent.call).start.identity) == other
    assert next(agent.call).kill.reason == "stuck"
    job.events.expect(r.TimerOver("soon"))


def test_a_candidate_hears_whom_it_would_join(job: Job) -> None:
    member, joiner = job.link(1), job.link(2)
    expected: queue.Queue[View] = queue.Queue()
    joiner.on_expect = expected.put
    member.viewed(View(3, (member.identity,)), "formed", (), (member.identity,), 7, 5.5)
    job.events.expect(r.Viewed(member.identity, View(3, (member.identity,)), 7))
    job.answers[r.Ready] = lambda _: [r.Announce((1,), (joiner.identity,))]
    joiner.ready({})
    assert expected.get(timeout=PATIENCE_S) == View(4, (member.identity, joiner.identity))
    assert joiner.wait_formed(0) is None, "nothing follows from it"


def test_what_a_member_notes_is_written_and_shown_and_a_refusal_reaches_the_worker(job: Job) -> None:
    link = job.link(1)
    evicted: queue.Queue[str] = queue.Queue()
    link.on_evict = evicted.put
    link.noted("state_repaired", "all is well", step=3, slots=[1])
    job.notes.expect(("state_repaired", {"step": 3, "slots": [1]}))
    other = job.link(2)
    other.noted("state_repaired", "all is well", step=3, slots=[1])
    other.noted("state_repaired", "all is well again", step=4, slots=[1])
    job.shown.expect("all is well again")
    assert len([item for item in job.shown._items if item == "all is well"]) == 1
    job.shown.expect("all is well")
    job.answers[r.Ready] = lambda _: [r.RefuseWorker(link.identity, "runs something else")]
    link.ready({"config/steps": "3"})
    job.events.expect(r.Ready(link.identity, {"config/steps": "3"}))
    assert evicted.get(timeout=PATIENCE_S) == "runs something else"


def test_the_tombstone_is_set_before_anybody_is_told(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    order: queue.Queue[tuple[str, int, float]] = queue.Queue()
    tombstone = job.coordinator._jax.tombstone

    def spy(node: int) -> None:
        tombstone(node)
        order.put(("tombstone", node, time.perf_counter()))

    monkeypatch.setattr(job.coordinator._jax, "tombstone", spy)
    agent = job.agent(0, 1, 2)
    links = [job.link(node) for node in (1, 2, 3)]
    for link in links:
        link.on_abort = lambda node: order.put(("abort", node, time.perf_counter()))

    def die(event: r.Event) -> list[r.Action]:
        identity = event.identity
        return [r.Note("died", {"slot": identity.slot}), r.Tombstone(identity), r.Abort(identity, (1, 2))]

    job.answers[r.Exited] = die
    delays = []
    for _ in range(20):
        agent.exited(links[2].identity)
        kinds = [order.get(timeout=PATIENCE_S) for _ in range(3)]
        assert [kind[:2] for kind in kinds] == [("tombstone", 3), ("abort", 3), ("abort", 3)]
        delays.append(kinds[2][2] - kinds[0][2])
    print(f"tombstone to abort on both members: median {statistics.median(delays) * 1000:.2f} ms")
    # Far above what it takes (under 2 ms), because the machine may be busy.
    assert statistics.median(delays) < 0.05
    assert links[0].wait_dead(frozenset({3, 9}), 0)
    assert not links[0].wait_dead(frozenset({9}), 0.01)
    # The agent's clock goes along with the note.
    job.notes.expect(("died", {"slot": 2, "reported_time": 123.0}))


def test_sixty_four_workers_hear_of_a_death() -> None:
    job = Job(num_slots=64)
    try:
        told = Recorder()
        for node in range(1, 65):
            link = job.link(node)
            link.on_abort = lambda dead, node=node: told.append((dead, node))
        everybody = tuple(range(1, 65))
        job.answers[r.StopAsked] = lambda _: [r.Abort(Identity(0, 0, 1), everybody)]
        started = time.perf_counter()
        job.coordinator.ask_stop(now=False, reason="")
        for node in everybody:
            told.expect((1, node))
        print(f"abort on 64 workers of one process: {(time.perf_counter() - started) * 1000:.1f} ms")
    finally:
        job.close()


def test_a_wrong_secret_is_refused_and_health_needs_none(job: Job) -> None:
    with pytest.raises(ElasticTrainError, match=r"UNAUTHENTICATED: this coordinator belongs to another job"):
        job.new_link(1, secret="guess").hello(1, "here", "versions")
    with grpc.insecure_channel(job.coordinator.address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        for metadata in (None, wire.secret_metadata("guess")):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Status(control_pb2.StatusRequest(), metadata=metadata, timeout=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        reply = stub.Status(control_pb2.StatusRequest(), metadata=wire.secret_metadata(SECRET), timeout=PATIENCE_S)
        assert json.loads(reply.json) == {"generation": 0, "epoch": 0, "step": 0, "workers": []}
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE_NAME):
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health.Check(request, timeout=PATIENCE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert not list(job.events)


def wait_acknowledged(link: Link) -> None:
    with link._changed:
        assert link._changed.wait_for(lambda: not link.pending_records(), PATIENCE_S)


def test_records_are_kept_until_they_are_on_disk_and_sent_again_by_the_next(job: Job) -> None:
    first, second = job.link(1), job.link(2)
    for step in (1, 2, 3):
        first.record({"step": step, "loss": 0.5})
        second.record({"step": step, "loss": 0.5}, send=False)
    job.commits.expect({"step": 3, "loss": 0.5})
    # Both may forget what is on disk, also the one that has sent nothing.
    wait_acknowledged(first)
    wait_acknowledged(second)
    for step in (4, 5):
        second.record({"step": step}, send=False)
    # The first member has died before it could send 4 and 5; its last words come too early.
    first.record({"step": 6}, flush=True)
    second.record({"step": 6}, send=False)
    second.resend()
    job.commits.expect({"step": 6})
    second.record({"step": 7}, flush=True)
    job.commits.expect({"step": 7})
    assert {record["step"] for record in job.commits} == {1, 2, 3, 4, 5, 6, 7}
    wait_acknowledged(second)
    job.events.expect(r.Stepped(second.identity, 7))


def test_records_that_nobody_has_are_given_up(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.coordinator.commits.GAP_TIMEOUT_S", 0.05)
    link = job.link(1)
    link.record({"step": 1}, flush=True)
    link.record({"step": 5}, flush=True)
    wait_acknowledged(link)
    assert job.gap is None
    assert "steps 2 to 4 are lost" in job.shown.expect_kind(str)


def test_close_sends_what_is_queued_and_is_no_silence(job: Job) -> None:
    link = job.link(1)
    link.record({"step": 1})
    link.finished("done", 1, 10, "p", "s", {})
    link.close()
    job.events.expect(r.Finished(link.identity, "done", step=1))
    assert [record["step"] for record in job.commits] == [1]
    job.agent(0).exited(link.identity)
    job.events.expect_kind(r.Exited)
    assert not any(isinstance(event, r.Silent) for event in job.events)


def test_a_worker_that_closes_but_lives_on_is_silent(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_train.coordinator.departures.LEAVE_TIMEOUT_S", 0.05)
    link = job.link(1)
    link.close()
    assert "closed, and no exit was reported" in job.events.expect_kind(r.Silent).reason


@contextlib.contextmanager
def link_process(job: Job, node: int, keepalive_s: float) -> Iterator[subprocess.Popen[str]]:
    script = Path(__file__).with_name("link_process.py")
    process = subprocess.Popen(
        [sys.executable, str(script), job.coordinator.address, SECRET, str(node), str(keepalive_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == "connected\n"
            yield process
        finally:
            process.kill()


def test_a_killed_worker_is_silent_at_once(job: Job) -> None:
    with link_process(job, 1, keepalive_s=5.0) as process:
        process.kill()
        started = time.monotonic()
        assert job.events.expect_kind(r.Silent).identity == Identity(1, 0, 1)
        print(f"noticed after {(time.monotonic() - started) * 1000:.1f} ms")
        # Keepalive alone would take twice 5 s.
        assert time.monotonic() - started < 5.0


def test_a_stopped_worker_is_noticed_by_keepalive() -> None:
    job = Job(keepalive_s=1.0)
    try:
        with link_process(job, 1, keepalive_s=1.0) as process:
            process.send_signal(signal.SIGSTOP)
            started = time.monotonic()
            job.events.expect_kind(r.Silent)
            took_s = time.monotonic() - started
            print(f"noticed after {took_s:.2f} s")
            assert took_s < 6.0
            process.send_signal(signal.SIGCONT)
            assert process.stdout is not None
            assert process.stdout.readline().startswith("lost ")
    finally:
        job.close()


def test_exits_after_the_end_are_written_down(job: Job) -> None:
    job.answers[r.StopAsked] = lambda _: [r.End(130, "stopped", "")]
    agent = job.agent(0)
    job.coordinator.ask_stop(now=True, reason="")
    assert job.coordinator.wait(PATIENCE_S)
    agent.exited(Identity(0, 2, 3))
    about = {"slot": 0, "incarnation": 2, "node": 3, "exit_code": -9, "reported_time": 123.0}
    job.notes.expect(("worker_exited", about))
    assert not any(isinstance(event, r.Exited) for event in job.events)


def test_a_lost_agent(job: Job) -> None:
    first = job.agent(0)
    job.events.expect(r.AgentJoined("here", (0,)))
    second = job.agent(1)
    job.events.expect(r.AgentJoined("here#2", (1,)))
    second.close()
    job.events.expect(r.AgentLost("here#2"))
    assert not job.coordinator.wait_left(0)
    first.channel.close()
    job.events.expect(r.AgentLost("here"))
    assert job.coordinator.wait_left(PATIENCE_S)


def test_an_agent_that_connects_again_replaces_its_old_connection(job: Job) -> None:
    """As after a cut of the network of which only the agent has learned yet."""
    job.agent(0, 1, id="one")
    job.events.expect(r.AgentJoined("here", (0, 1)))
    job.agent(0, 1, id="another")
    job.events.expect(r.AgentJoined("here#2", (0, 1)))
    job.agent(0, 1, id="one")
    lost, joined = r.AgentLost("here"), r.AgentJoined("here", (0, 1))
    job.events.expect(lost)
    job.events.expect_count(joined, 2)
    newest = [event for event in job.events if isinstance(event, r.AgentJoined | r.AgentLost)][2:]
    assert newest == [lost, joined]


@pytest.mark.parametrize("returning", [True, False])
def test_states_of_agents_count_only_in_the_part_of_the_run_that_they_come_from(returning: bool) -> None:
    """An agent that waits for a coordinator cannot tell the next one of its job from that of a run resumed by hand."""
    job = Job(returning=returning)
    try:
        job.agent(0, 1, carried={0: 7, 1: 6})
        job.events.expect(r.AgentJoined("here", (0, 1), {0: 7, 1: 6} if returning else {}, 3 if returning else 0))
    finally:
        job.close()


def test_an_agent_says_that_it_leaves(job: Job) -> None:
    agent = job.agent(0)
    job.events.expect(r.AgentJoined("here", (0,)))
    agent.send(control_pb2.FromAgent(leaving=control_pb2.AgentLeaving(reason="SIGTERM")))
    job.events.expect(r.AgentLeaving("here", "SIGTERM"))
    job.answers[r.StopAsked] = lambda _: [r.Refuse("here", (0, 2), "why")]
    job.coordinator.ask_stop(False, "to have something to answer")
    refused = next(message.refused for message in agent.call if message.WhichOneof("message") == "refused")
    assert (list(refused.slots), refused.reason) == ([0, 2], "why")


def test_nobody_can_pass_for_a_connected_worker(job: Job) -> None:
    job.link(1)
    with pytest.raises(ElasticTrainError, match="ALREADY_EXISTS"):
        job.new_link(1).hello(2, "elsewhere", "versions")


def test_stop_is_asked_for_twice_and_the_end_reaches_everybody(job: Job) -> None:
    agent = job.agent(0)
    link = job.link(1)
    lost: list[str] = []
    link.on_lost = lost.append
    end = r.End(130, "stopped", "stopped by the user")

    def stop(event: r.StopAsked) -> list[r.Action]:
        return [r.AskStop((1,), event.now, event.reason), *([end] if event.now else [])]

    job.answers[r.StopAsked] = stop
    link.finished("stopped", 8, 800, "p", "s", {})
    job.events.expect(r.Finished(link.identity, "stopped", step=8))  # on another connection than what follows
    with grpc.insecure_channel(job.coordinator.address) as channel:
        stub = control_pb2_grpc.ControlStub(channel)
        for _ in range(2):
            stub.Stop(control_pb2.StopRequest(reason="enough"), metadata=wire.secret_metadata(SECRET))
    assert job.coordinator.wait(PATIENCE_S) == end
    job.events.expect(r.StopAsked(False, "enough"))
    job.events.expect(r.StopAsked(True, "enough"))
    assert link.stopped_now.wait(PATIENCE_S) and link.stop_requested == "enough"
    assert job.ends == [(end, {0: "stopped"})]
    job.notes.expect(("end", {"status": "stopped", "exit_code": 130, "message": "stopped by the user"}))
    assert [message.WhichOneof("message") for message in (next(agent.call), next(agent.call))] == [
        "welcome",
        "shutdown",
    ]
    assert not job.coordinator.wait_left(0)
    agent.close()
    job.coordinator.close()
    assert link.wait_formed(PATIENCE_S) is None
    assert lost == []


def test_a_link_tells_that_the_coordinator_is_gone(job: Job) -> None:
    link = job.link(1)
    lost: queue.Queue[str] = queue.Queue()
    link.on_lost = lost.put
    job.coordinator.close()
    assert lost.get(timeout=PATIENCE_S)


def test_a_callback_that_raises_makes_the_link_lost(job: Job) -> None:
    link = job.link(1)
    lost: queue.Queue[str] = queue.Queue()
    link.on_lost = lost.put

    def fail(node: int) -> None:
        raise ZeroDivisionError(node)

    link.on_abort = fail
    job.answers[r.Ready] = lambda _: [r.Abort(Identity(5, 0, 6), (1,))]
    link.ready({})
    assert "ZeroDivisionError: 6" in lost.get(timeout=PATIENCE_S)
    job.events.expect_kind(r.Silent)


def test_different_digests_are_shown(job: Job) -> None:
    job.link(1).finished("done", 9, 900, "p", "s", {})
    job.link(2).finished("done", 9, 900, "other", "s", {})
    job.events.expect(r.Finished(Identity(1, 0, 2), "done", step=9))
    job.events.expect(r.Finished(Identity(0, 0, 1), "done", step=9))
    job.notes.expect(("digests_differ", {"slots": {"0": [9, "p", "s"], "1": [9, "other", "s"]}}))
    assert "DIFFERENT" in next(iter(job.shown))


def test_a_quiet_job_says_where_everybody_is() -> None:
    job = Job(stall_note_s=1.2)
    try:
        link = job.link(1)
        link.phase("exchange", 12)
        link.viewed(View(1, (link.identity, Identity(1, 0, 2))), "formed", (), (), 12, 0.0)
        shown = job.shown.expect_kind(str)
        assert "the last is 12. Now: slot 0 in 'exchange', slot 1 in no phase yet." in shown
    finally:
        job.close()


def test_a_job_that_has_ended_may_be_quiet() -> None:
    """Whoever comes is still answered, and nobody looks for a standstill any more."""
    job = Job(stall_note_s=0.1)
    job.answers[r.Ready] = lambda _: [r.End(130, "stopped", "stopped before training began")]
    job.link(1).ready({})
    assert job.coordinator.wait(PATIENCE_S) is not None
    time.sleep(2 * REPORT_INTERVAL_S)  # the last look at the members is over, too
    answered = threading.Event()
    job.coordinator._loop.post(answered.set)
    assert answered.wait(PATIENCE_S)
    job.close()  # which would wait for ever if that had failed


def test_a_group_that_forms_late_has_not_been_quiet(job: Job) -> None:
    """Without members nobody could commit a step: the clock starts with the first group, and after one that died."""
    dead = View.of(1, [Identity(0, 0, 1)])  # of which no worker is known any more
    job.coordinator._decisions.roster = dataclasses.replace(job.coordinator.roster, view=dead)
    reports = job.coordinator._reports
    reports._quiet_since -= 1000.0
    deadline = time.monotonic() + PATIENCE_S
    while reports.quiet_s > 900.0:
        assert time.monotonic() < deadline, "the time without members counts"
        time.sleep(0.01)


def test_a_failing_roster_ends_the_job(job: Job) -> None:
    agent = job.agent(0)
    job.answers[r.Ready] = lambda _: [1 / 0]
    job.link(1).ready({})
    end = job.coordinator.wait(PATIENCE_S)
    assert end is not None
    assert (end.exit_code, end.status) == (1, "failed") and "ZeroDivisionError" in end.message
    assert [next(agent.call).WhichOneof("message") for _ in range(2)] == ["welcome", "shutdown"]


def test_an_agent_that_comes_after_the_end_is_let_go(job: Job) -> None:
    job.answers[r.Ready] = lambda _: [r.End(130, "stopped", "stopped before training began")]
    job.link(1).ready({})
    assert job.coordinator.wait(PATIENCE_S) is not None
    agent = job.agent(0)
    assert [next(agent.call).WhichOneof("message") for _ in range(2)] == ["welcome", "shutdown"]


def test_a_summary_that_cannot_be_written_is_part_of_the_end(job: Job) -> None:
    job.answers[r.Ready] = lambda _: [r.End(0, "done", "all steps done")]
    job.event = lambda name, /, **fields: (_ for _ in ()).throw(OSError("disk full"))
    job.link(1).ready({})
    end = job.coordinator.wait(PATIENCE_S)
    assert end is not None
    assert (end.exit_code, end.status) == (1, "failed") and "disk full" in end.message


def start_at(bind: str) -> None:
    Coordinator(
        Limits(1),
        records=None,  # type: ignore[arg-type]
        endpoint=Endpoint(secret=SECRET, bind=bind),
        apply=lambda roster, event: (roster, ()),
    )


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=f"cannot listen on {bind}"):
            start_at(bind)


@pytest.mark.parametrize("bind", ["nowhere", "127.0.0.1", "127.0.0.1:99999", "192.0.2.1:0"])
def test_a_bad_address(bind: str) -> None:
    with pytest.raises(UsageError, match=r"no address to listen on|cannot listen on"):
        start_at(bind)


def test_the_coordinator_stays_small_and_without_jax() -> None:
    script = Path(__file__).with_name("coordinator_process.py")
    with subprocess.Popen(
        [sys.executable, str(script), SECRET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        address = process.stdout.readline().strip()
        links = [Link(address, SECRET, Identity(node - 1, 0, node), 5.0) for node in (1, 2, 3, 4)]
        for link in links:
            link.hello(1, "here", "versions")
        print(file=process.stdin, flush=True)
        rss_bytes, jax_imported = process.stdout.readline().split()
        print(f"coordinator with 4 workers and 256 node ids: {int(rss_bytes) / 2**20:.0f} MiB")
        assert jax_imported == "False"
        assert int(rss_bytes) < 250 * 2**20
        for link in links:
            link.close()
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
