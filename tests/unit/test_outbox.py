"""What a worker sends, in which order."""

from __future__ import annotations

import json
import threading

import pytest

from elastic_train.coordinator import control_pb2
from elastic_train.coordinator.outbox import MAX_RECORDS_PER_MESSAGE, Outbox

HELLO = control_pb2.FromWorker(hello=control_pb2.Hello(pid=1))
READY = control_pb2.FromWorker(ready=control_pb2.Ready())


@pytest.fixture
def outbox() -> Outbox:
    return Outbox(threading.Condition())


def kinds_and_steps(outbox: Outbox) -> list[tuple[str | None, list[int]]]:
    """All that is sent until the outbox ends."""
    return [
        (message.WhichOneof("message"), [json.loads(record)["step"] for record in message.progress.records])
        for message in outbox.outgoing()
    ]


def test_records_come_before_what_is_said_after_them(outbox: Outbox) -> None:
    outbox.record({"step": 1}, flush=False, send=True)
    outbox.put(READY)
    outbox.put_first(HELLO)
    outgoing = outbox.outgoing()
    assert next(outgoing) == HELLO
    outbox.open(1000.0)
    outbox.close()
    assert kinds_and_steps(outbox) == [("progress", [1]), ("ready", [])]


def test_records_are_kept_until_they_are_acknowledged(outbox: Outbox) -> None:
    for step in (1, 2, 3):
        outbox.record({"step": step}, flush=True, send=False)
    outbox.acknowledged(1)
    assert len(outbox.pending_records()) == 2
    outbox.open(1000.0)
    outbox.resend()
    outbox.close()
    assert kinds_and_steps(outbox) == [("progress", [2, 3])]
    assert [json.loads(record)["step"] for record in outbox.pending_records()] == [2, 3]


def test_many_records_take_several_messages(outbox: Outbox) -> None:
    for step in range(MAX_RECORDS_PER_MESSAGE + 1):
        outbox.record({"step": step}, flush=False, send=True)
    outbox.open(1000.0)
    outbox.close()
    assert [len(steps) for _, steps in kinds_and_steps(outbox)] == [MAX_RECORDS_PER_MESSAGE, 1]


def test_an_idle_worker_says_where_it_is(outbox: Outbox) -> None:
    outbox.open(0.0)
    outbox.phase("compute", 7)
    outbox.phase("exchange", -1)
    outbox.worked(0.5, 2)
    report = next(outbox.outgoing()).progress
    assert (report.phase, report.step, report.beats) == ("exchange", 7, 2)
    assert (report.work_s, report.num_shards, report.num_worked_steps) == (0.5, 2, 1)


def test_nothing_is_sent_to_nobody(outbox: Outbox) -> None:
    outbox.put(READY)
    outbox.drop()
    assert kinds_and_steps(outbox) == []
