"""What members write at their barriers, and what the verifier finds in it."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from elastic_train.cli import main
from elastic_train.errors import UsageError
from elastic_train.jax_private import BarrierRefused, LiveDevices
from elastic_train.membership.execution import Enter, Exit, Fail
from elastic_train.membership.group import Identity, View
from elastic_train.telemetry import blocks as blocks_module
from elastic_train.telemetry.barriers import format_barriers, verify_barriers
from elastic_train.telemetry.blocks import BlockTrace, read_blocks

A, B, C = Identity(0, 0, 1), Identity(1, 0, 2), Identity(2, 0, 3)
ALL = View(1, (A, B, C))
WITHOUT_C = View(2, (A, B))


class Run:
    """A run directory whose members go through barriers in turn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        (path / "job.json").write_text("{}")
        self.members = {identity: BlockTrace(path, identity, "secret") for identity in (A, B, C)}

    def begin(self, view: View) -> None:
        for member in view.members:
            self.members[member].begin(view)

    def barrier(self, view: View, *nodes: int, but: tuple[Identity, ...] = ()) -> None:
        """All of a view enter and get this list; those in `but` get nothing."""
        for member in view.members:
            self.members[member].enter()
        for member in view.members:
            if member not in but:
                self.members[member].exit(nodes)

    def conclude(self, view: View, verdict: str, following: View, step: int | None = None) -> None:
        for member in view.members:
            self.members[member].concluded(verdict, following, step)

    def write(self, name: str, *lines: dict) -> None:
        with (self.path / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def train(self) -> None:
        """Steps 1 and 2 of all three; C dies in the next; step 3 of the others."""
        self.begin(ALL)
        self.barrier(ALL, 1, 2, 3)
        for step in (1, 2):
            self.barrier(ALL, 1, 2, 3)
            self.conclude(ALL, "commit", ALL, step)
        self.barrier(ALL, 1, 2, but=(C,))
        for member in (A, B):
            self.members[member].concluded("shrink", WITHOUT_C, 3)
        self.begin(WITHOUT_C)
        self.barrier(WITHOUT_C, 1, 2)
        self.barrier(WITHOUT_C, 1, 2)
        self.conclude(WITHOUT_C, "commit", WITHOUT_C, 3)
        for step, workers in ((1, [0, 1, 2]), (2, [0, 1, 2]), (3, [0, 1])):
            self.write("ledger", {"step": step, "workers": workers})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "run")


def test_a_run_with_a_death_is_proven(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.train()
    report = verify_barriers(run.path)
    assert report.proven
    assert (report.num_barriers, report.num_lists, report.num_members, report.num_commits) == (6, 15, 3, 3)
    assert main(["barriers", "verify", str(run.path)]) == 0
    assert "Proven: every list is valid" in capsys.readouterr().out


def test_lines_become_histories(run: Run) -> None:
    run.train()
    blocks = read_blocks(run.path)
    dead = blocks.processes[2]
    assert str(dead.name) == "node 3 (slot 2, incarnation 0)"
    assert [type(event) for event in dead.events] == [Enter, Exit] * 3 + [Enter, Fail]
    assert len({process.clock for process in blocks.processes}) == 1
    names = {str(process.name): process.name for process in blocks.processes}
    first = blocks.processes[0].events[0]
    assert isinstance(first, Enter) and first.asked == frozenset(names.values())


def test_a_list_without_a_living_member_is_not_valid(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.train()
    run.begin(ALL)
    run.members[C].enter()  # it lives, long after it was left out
    assert main(["barriers", "verify", str(run.path)]) == 1
    shown = capsys.readouterr().out
    assert "NOT VALID: the list [node 1 (slot 0, incarnation 0), node 2 (slot 1, incarnation 0)]" in shown
    assert "node 3 (slot 2, incarnation 0)'s failure comes before the instant" in shown


def test_what_a_worker_does_after_it_was_declared_dead_is_left_out(run: Run) -> None:
    run.train()
    start = json.loads((run.path / "blocks" / "2-0.jsonl").read_text().splitlines()[0])
    last = json.loads((run.path / "blocks" / "2-0.jsonl").read_text().splitlines()[-1])
    died = start["unix_time"] + (last["time"] - start["time"]) + 1e-6
    run.write("events", {"time": died, "event": "worker_died", **C._asdict()})
    run.begin(ALL)
    run.members[C].enter()
    report = verify_barriers(run.path)
    assert report.proven and report.num_fenced == 1
    assert "1 events of workers that had been declared dead" in format_barriers(report)


def test_members_that_conclude_differently(run: Run) -> None:
    run.begin(ALL)
    run.barrier(ALL, 1, 2, 3)
    run.members[A].concluded("commit", ALL, 1)
    run.members[B].concluded("retry", None, 1)
    assert "node 1 (slot 0, incarnation 0) concluded commit of step 1" in format_barriers(verify_barriers(run.path))


def test_a_fenced_member_concludes_nothing_for_the_others(run: Run) -> None:
    run.begin(ALL)
    run.barrier(ALL, 1, 2, but=(C,))
    run.members[A].concluded("shrink", WITHOUT_C, 1)
    run.members[C].exit((1, 2))  # later than anybody else: it was told that it counts as dead
    run.members[C].concluded("fenced", None, 1)
    assert verify_barriers(run.path).proven
    run.members[C].enter()  # it must not go on
    assert not verify_barriers(run.path).proven


def test_a_step_that_two_blocks_commit(run: Run) -> None:
    run.train()
    run.barrier(WITHOUT_C, 1, 2)
    run.conclude(WITHOUT_C, "commit", WITHOUT_C, 2)
    assert "step 2 was committed twice" in format_barriers(verify_barriers(run.path))


def test_a_step_may_be_taken_again_when_all_who_had_it_are_dead(run: Run) -> None:
    run.train()
    later = Identity(0, 1, 4)
    run.members[later] = BlockTrace(run.path, later, "secret")
    alone = View(3, (later,))
    run.begin(alone)
    run.barrier(alone, 4)
    run.barrier(alone, 4)
    run.conclude(alone, "commit", alone, 2)
    assert verify_barriers(run.path).proven


def test_a_ledger_that_says_otherwise(run: Run) -> None:
    run.train()
    run.write("ledger", {"step": 4, "workers": [0]})
    assert "the ledger has step 4, and no member" in format_barriers(verify_barriers(run.path))
    run.begin(WITHOUT_C)
    run.barrier(WITHOUT_C, 1, 2)
    run.conclude(WITHOUT_C, "commit", WITHOUT_C, 4)
    assert "the ledger says that slots [0] committed step 4" in format_barriers(verify_barriers(run.path))


def test_without_the_file_of_a_member_nothing_is_proven(run: Run) -> None:
    run.train()
    (run.path / "blocks" / "2-0.jsonl").unlink()
    assert "node 3 was asked for, and there is no file of it" in format_barriers(verify_barriers(run.path))


def test_a_run_without_tracing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text("{}")
    assert main(["barriers", "verify", str(tmp_path)]) == 1
    assert "--trace-blocks" in capsys.readouterr().out


def test_a_line_that_was_cut_off_was_never_written(run: Run) -> None:
    run.train()
    with (run.path / "blocks" / "2-0.jsonl").open("a") as file:
        file.write('{"line": "enter", "time": 1')
    assert verify_barriers(run.path).proven


def test_a_file_that_was_changed(run: Run) -> None:
    run.train()
    path = run.path / "blocks" / "1-0.jsonl"
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(UsageError, match="does not begin"):
        verify_barriers(run.path)


def test_a_job_that_still_runs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is written while the files are read may rest on entries that were read too early."""
    run.train()
    run.write("events", {"time": 0.0, "event": "job_started"})
    reads = 0

    def read_lines(path: Path, *kind_of: Any) -> list[dict]:
        nonlocal reads
        reads += path.parent.name == "blocks"
        if path.name == "1-0.jsonl" and reads > 3:  # the first file has been read for the last time
            run.barrier(WITHOUT_C, 1, 2)
        return original(path, *kind_of)

    original = blocks_module.read_lines
    monkeypatch.setattr(blocks_module, "read_lines", read_lines)
    with (run.path / "events.jsonl").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        report = verify_barriers(run.path)
    # Nobody has said yet that C is dead.
    assert [problem for problem in report.problems if "is missing, and never failed" not in problem] == []
    assert report.num_lists == 15


class Calls:
    """What a block tells its trace."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def enter(self) -> None:
        self.seen.append("enter")

    def exit(self, nodes: object) -> None:
        self.seen.append(nodes if nodes is None else sorted(nodes))  # type: ignore[call-overload]


class Device:
    def __init__(self, node: int) -> None:
        self.id = self.process_index = node


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the coordination service will answer: lists of devices, or errors."""
    from jax.experimental import multihost_utils

    prepared: list[object] = []

    def live_devices(client: object, devices: object) -> object:
        answer = prepared.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(multihost_utils, "_live_devices", live_devices)
    monkeypatch.setattr(multihost_utils.distributed.global_state, "client", object())
    return prepared


def test_only_real_barriers_are_traced(answers: list[object]) -> None:
    """The first entry and every exit; not the entry of a later block, which sends nothing."""
    one, two = Device(1), Device(2)
    calls = Calls()
    block = LiveDevices([one, two], calls)
    answers += [{one: 7, two: 8}, {one: 7, two: 8}, {one: 7}]
    block.run(lambda _: calls.seen.append("body"))
    assert calls.seen == ["enter", [1, 2], "body", "enter", [1, 2]]
    calls.seen.clear()
    with pytest.raises(Exception, match="failed"):
        block.run(lambda _: calls.seen.append("body"))
    assert calls.seen == ["body", "enter", [1]]


def test_a_refused_request_is_an_exit_without_a_list(answers: list[object]) -> None:
    one = Device(1)
    calls = Calls()
    block = LiveDevices([one], calls)
    answers += [RuntimeError("not connected")]
    with pytest.raises(BarrierRefused) as refused:
        block.run(lambda _: None)
    assert "not connected" in str(refused.value.__cause__)
    assert calls.seen == ["enter", None]
    calls.seen.clear()
    answers += [{one: 7}, RuntimeError("not connected")]
    with pytest.raises(BarrierRefused):
        block.run(lambda _: None)
    assert calls.seen == ["enter", [1], "enter", None]


def test_what_a_body_raises_is_no_refusal(answers: list[object]) -> None:
    one = Device(1)
    answers += [{one: 7}, {one: 7}]
    with pytest.raises(ZeroDivisionError):
        LiveDevices([one], Calls()).run(lambda _: 1 / 0)
