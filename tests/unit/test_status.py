"""What the workers are doing: by asking the coordinator, and from the files when nobody answers."""

from __future__ import annotations

import fcntl
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic_train import cli
from elastic_train.coordinator import control_pb2, control_pb2_grpc, wire
from elastic_train.errors import UsageError
from elastic_train.telemetry import status
from elastic_train.telemetry.json_files import CHANGED
from elastic_train.telemetry.records import RunDirectory
from elastic_train.telemetry.run_files import read_summary
from elastic_train.telemetry.status import format_status, live_status, replay, status_from_files

LIVE = {"generation": 0, "epoch": 3, "step": 7, "workers": []}


class Coordinator(control_pb2_grpc.ControlServicer):
    def __init__(self) -> None:
        self.secrets: list[object] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def Status(self, request, context):  # gRPC's name
        self.secrets.append(dict(context.invocation_metadata()).get(wire.SECRET_KEY))
        self.may_answer.wait(20)
        return control_pb2.StatusReply(json=json.dumps(LIVE))


@contextmanager
def serving(servicer: control_pb2_grpc.ControlServicer) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1))
    control_pb2_grpc.add_ControlServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        assert server.stop(0).wait(20)


def fill(path: Path, address: str | None) -> None:
    with RunDirectory(path, clock=lambda: 1.0) as run:
        run.write_secret("word")
        run.write_job({"address": address, "generation": 0, "steps": 9})
        for slot in (0, 1):
            identity = {"slot": slot, "incarnation": 0, "node": slot + 1}
            run.event("worker_started", pid=100 + slot, **identity)
            run.event("worker_warming", pid=100 + slot, host="here", **identity)
            run.event("worker_ready", **identity)
        run.event("view_changed", epoch=1, members=[0, 1], came=[0, 1], step=0)
        record: dict[str, Any] = {
            "samples": 1,
            "loss": 1.0,
            "learning_rate": 0.1,
            "workers": [0, 1],
            "epoch": 1,
        }
        record |= {"first_sample": 0, "num_samples": 1, "passes": [[0, 0, 1]], "pass_size": 1000}
        for step in (1, 2):
            run.commit(record | {"step": step})


def states(answer: dict[str, Any]) -> list[str]:
    return [worker["state"] for worker in answer["workers"]]


@pytest.fixture
def closed_address() -> Iterator[str]:
    with socket.socket() as bound:  # bound, but nobody listens
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_the_coordinator_is_asked_with_the_secret(tmp_path):
    servicer = Coordinator()
    with serving(servicer) as address:
        fill(tmp_path, address)
        assert live_status(tmp_path) == LIVE | {"status": "running", "total_steps": 9, "members": []}
    assert servicer.secrets == ["word"]


def test_nobody_at_the_address(tmp_path, closed_address):
    fill(tmp_path, closed_address)
    answer = live_status(tmp_path)
    assert answer == {
        "status": "broken_off",
        "generation": 0,
        "epoch": 1,
        "step": 2,
        "total_steps": 9,
        "members": [],
        "workers": [
            {"slot": slot, "pid": 100 + slot, "host": "here", "incarnation": 0, "state": "dead", "step": 2}
            | {"state_at_end": "member"}
            for slot in (0, 1)
        ],
    }


def test_a_slow_coordinator_is_not_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(status, "DEADLINE_S", 0.3)
    servicer = Coordinator()
    servicer.may_answer.clear()
    with serving(servicer) as address:
        fill(tmp_path, address)
        answer = live_status(tmp_path)
        servicer.may_answer.set()
    assert states(answer) == ["member", "member"]


def test_a_job_that_has_ended_is_not_asked(tmp_path):
    servicer = Coordinator()
    with serving(servicer) as address:
        fill(tmp_path, address)
        (tmp_path / "summary.json").write_text('{"status": "gave_up"}')
        answer = live_status(tmp_path)
    assert states(answer) == ["dead", "dead"]
    assert (answer["status"], answer["members"]) == ("gave_up", [])
    assert servicer.secrets == []


def test_a_run_of_one_plain_process_has_no_coordinator(tmp_path):
    fill(tmp_path, None)
    assert states(live_status(tmp_path)) == ["dead", "dead"]
    assert states(status_from_files(tmp_path, is_alive=True)) == ["member", "member"]
    with (tmp_path / "events.jsonl").open("a") as events:
        fcntl.flock(events, fcntl.LOCK_EX)  # as the process does that writes it
        answer = live_status(tmp_path)
    assert (answer["status"], answer["members"]) == ("running", [0, 1])


def test_no_run_directory(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(UsageError, match="is no run directory"):
            live_status(path)


def test_no_secret(tmp_path):
    fill(tmp_path, "127.0.0.1:1")
    (tmp_path / "secret").unlink()
    with pytest.raises(UsageError, match="only the user who started the job"):
        live_status(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "3"])
def test_a_damaged_job_file(tmp_path, content):
    (tmp_path / "job.json").write_text(content)
    with pytest.raises(UsageError, match=r"job\.json.*the file was changed"):
        live_status(tmp_path)


@pytest.mark.parametrize(
    ("job", "wrong"),
    [
        ({}, "lacks 'address'"),
        ({"address": 5}, "address = 5: expected text or null"),
        ({"address": "here"}, 'address = "here": expected HOST:PORT or null'),
        ({"address": "here:70000"}, 'address = "here:70000": expected HOST:PORT or null'),
        ({"address": "\ud800:1"}, 'address = "\\ud800:1": expected HOST:PORT or null'),
        ({"address": "127.0.0.1:1", "steps": "9"}, 'steps = "9": expected a whole number or null'),
        ({"address": "127.0.0.1:1", "tls": []}, "tls = []: expected an object"),
        ({"address": "127.0.0.1:1", "tls": {"cert": 3}}, "tls.cert = 3: expected text"),
    ],
)
@pytest.mark.parametrize("command", [["status"], ["stop"], ["drain", "--worker", "0"]])
def test_a_job_file_that_no_run_writes(tmp_path, capsys, command, job, wrong):
    fill(tmp_path, None)
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert cli.main([*command, str(tmp_path)]) == 2
    assert f"{tmp_path / 'job.json'} is not what a run writes: {wrong}; {CHANGED}\n" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["stop"]])
def test_tls_that_cannot_be_used(tmp_path, capsys, command):
    fill(tmp_path, None)
    job = {"address": "127.0.0.1:1", "tls": {"cert": str(tmp_path / "cert.pem"), "key": "", "ca": ""}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert cli.main([*command, str(tmp_path)]) == 2
    assert f"{tmp_path / 'job.json'}: --tls-cert and --tls-key belong together" in capsys.readouterr().err
    job["tls"]["key"] = "key.pem"
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert cli.main([*command, str(tmp_path)]) == 2
    message = f"cannot read {tmp_path / 'cert.pem'}: No such file or directory; the job uses TLS"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\n", b"\x00\xff\x80", "é".encode(), b"a\nb"])
def test_a_damaged_secret(tmp_path, capsys, content):
    fill(tmp_path, "127.0.0.1:1")
    (tmp_path / "secret").write_bytes(content)
    for command in ("status", "stop"):
        assert cli.main([command, str(tmp_path)]) == 2
        assert f"{tmp_path / 'secret'} holds no secret; {CHANGED}\n" in capsys.readouterr().err


def test_a_damaged_summary(tmp_path):
    fill(tmp_path, "127.0.0.1:1")
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(UsageError, match=r"summary\.json.*the file was changed"):
        live_status(tmp_path)
    with pytest.raises(UsageError, match=r"summary\.json.*the file was changed"):
        read_summary(tmp_path)


@pytest.mark.parametrize(
    ("file", "line", "wrong"),
    [
        ("events", "3", "3: expected an object"),
        ("events", "{}", "lacks 'event'"),
        (
            "events",
            '{"event": "view_changed", "epoch": "two", "members": []}',
            'epoch = "two": expected a whole number',
        ),
        ("events", '{"event": "worker_ready", "incarnation": 0}', "lacks 'slot'"),
        ("events", '{"event": "worker_ready", "slot": "0", "incarnation": 0}', 'slot = "0": expected a whole number'),
        ("ledger", '{"step": 3, "workers": [0, "1"]}', 'workers[1] = "1": expected a whole number'),
    ],
)
def test_a_line_that_no_run_writes(tmp_path, capsys, file, line, wrong):
    fill(tmp_path, None)
    path = tmp_path / f"{file}.jsonl"
    number = len(path.read_text().splitlines()) + 1
    with path.open("a") as lines:
        lines.write(line + "\n")
    assert cli.main(["status", str(tmp_path)]) == 2
    message = f"elastic-train: {path}, line {number}, is not what a run writes: {wrong}; {CHANGED}\n"
    assert capsys.readouterr().err == message


def event(name: str, slot: int, incarnation: int = 0, **fields: object) -> dict[str, object]:
    return {"event": name, "time": 1.0, "slot": slot, "incarnation": incarnation, **fields}


def view(epoch: int, *members: int) -> dict[str, object]:
    return {"event": "view_changed", "time": 1.0, "epoch": epoch, "members": list(members)}


def committed(*spans: tuple[int, list[int]]) -> list[dict[str, object]]:
    """The ledger's lines: each span says up to which step, and by whom."""
    lines: list[dict[str, object]] = []
    for last, workers in spans:
        lines += [{"step": step, "workers": workers} for step in range(len(lines) + 1, last + 1)]
    return lines


def test_replay_follows_a_death_and_a_return():
    events = [
        event("worker_warming", 1, pid=5, host="b"),
        event("worker_started", 1, pid=5),  # the agent's report may come after the worker's own
        event("worker_started", 0, pid=4),
    ]
    assert states(replay(events, [])) == ["starting", "warming"]
    events += [event("worker_ready", 0), event("worker_ready", 1), view(1, 0, 1)]
    assert states(replay(events, committed((3, [0, 1])))) == ["member", "member"]
    events += [event("worker_died", 1, step=2), view(2, 0)]
    ledger = committed((3, [0, 1]), (5, [0]))
    assert [(w["state"], w["step"]) for w in replay(events, ledger)["workers"]] == [("member", 5), ("dead", 3)]
    events += [event("worker_starting", 1, 1), event("worker_ready", 1, 0)]
    answer = replay(events, ledger)
    assert [(w["state"], w["step"]) for w in answer["workers"]] == [("member", 5), ("starting", 0)]
    assert (answer["workers"][1]["incarnation"], answer["workers"][1]["pid"]) == (1, 0)
    events += [event("worker_ready", 1, 1), view(3, 0, 1)]
    ledger = committed((3, [0, 1]), (5, [0]), (8, [0, 1]))
    assert (replay(events, ledger)["epoch"], states(replay(events, ledger))) == (3, ["member", "member"])
    events += [{"event": "end", "time": 2.0}]
    assert [(w["state"], w["step"]) for w in replay(events, ledger)["workers"]] == [("dead", 8), ("dead", 8)]
    events += [event("worker_exited", 0), event("worker_exited", 1, 1)]
    assert [(w["state"], w["step"]) for w in replay(events, ledger)["workers"]] == [("dead", 8), ("dead", 8)]


def test_table():
    worker = {"slot": 0, "pid": 123, "host": "here", "incarnation": 0, "state": "member", "step": 7}
    status = {**LIVE, "status": "running", "total_steps": 9, "members": [0], "workers": [worker]}
    assert format_status(status).splitlines() == [
        "running: step 7/9, epoch 3, generation 0, 1 of 1 workers are members",
        "",
        "slot  state   step  incarnation  pid  host",
        "0     member  7     0            123  here",
    ]


def test_workers_of_a_job_that_has_ended_are_no_casualties():
    worker = {"slot": 0, "pid": 1, "host": "here", "incarnation": 0, "state": "dead", "step": 7}
    workers = [worker, {**worker, "slot": 1, "step": 5}]
    text = format_status({**LIVE, "status": "done", "total_steps": 7, "members": [], "workers": workers})
    head, _, _, first, second = text.splitlines()
    assert head == "finished: step 7/7, epoch 3, generation 0"
    assert "finished" in first and "dead" in second


@pytest.mark.parametrize(("status", "taking_part"), [("stopped", "finished"), ("gave_up", "dead")])
def test_workers_that_were_on_their_way_when_the_job_ended_are_no_casualties(status, taking_part):
    events = [event(name, slot) for slot in range(5) for name in ("worker_starting", "worker_started")]
    events += [event("worker_warming", slot) for slot in (0, 1, 2, 3)] + [event("worker_ready", s) for s in (0, 1, 2)]
    events += [view(1, 0, 1), event("worker_died", 1, state="member"), view(2, 0)]
    events += [{"event": "end", "time": 2.0}, *(event("worker_exited", slot) for slot in range(5))]
    answer = replay(events, committed((3, [0, 1]), (5, [0])))
    at_end = ["member", "dead", "ready", "warming", "starting"]
    assert [worker["state_at_end"] for worker in answer["workers"]] == at_end
    assert shown(answer, status) == [taking_part, "dead", "was ready", "was warming", "was starting"]


def test_what_events_say_gives_the_terminal_no_orders(tmp_path, capsys):
    fill(tmp_path, None)
    with (tmp_path / "events.jsonl").open("a") as events:
        events.write(json.dumps(event("worker_warming", 0, 1, host="\x1b[31mhere\x07")) + "\n")
    assert cli.main(["status", str(tmp_path)]) == 0
    assert "\\x1b[31mhere\\x07\n" in capsys.readouterr().out


def test_nobody_has_finished_who_never_took_part():
    events = [event("worker_warming", 0), event("worker_warming", 1), event("worker_died", 1), {"event": "end"}]
    assert shown(replay(events, []), "stopped") == ["was warming", "dead"]


def shown(answer: dict[str, Any], status: str) -> list[str]:
    """The column of states that a person reads."""
    text = format_status({"status": status, **answer, "total_steps": 9, "members": []})
    return [line.partition("  ")[2].strip().partition("  ")[0] for line in text.splitlines()[3:]]
