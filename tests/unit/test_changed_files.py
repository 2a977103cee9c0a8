"""What commands that read a run directory make of files that no run writes: one message, never a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_train import cli
from elastic_train.data.ledger import format_report
from elastic_train.data.ledger_files import verify_run
from elastic_train.errors import UsageError
from elastic_train.membership.group import Identity, View
from elastic_train.telemetry import compare
from elastic_train.telemetry.barriers import format_barriers, verify_barriers
from elastic_train.telemetry.blocks import BlockTrace
from elastic_train.telemetry.json_files import CHANGED
from elastic_train.telemetry.leaves import write_leaves
from elastic_train.telemetry.records import RunDirectory
from elastic_train.telemetry.status import format_status, live_status


def _compared(run: Path) -> str:
    one, other = compare.read_run(run), compare.read_run(run.with_name("OTHER"))
    return compare.format_comparison(compare.compare(one, other), one, other)


READERS: dict[str, Callable[[Path], str]] = {
    "ledger": lambda run: format_report(verify_run(run)),
    "barriers": lambda run: format_barriers(verify_barriers(run)),
    "compare": _compared,
    "status": lambda run: format_status(live_status(run)),
}
"""What the commands do, without the reading of options, which takes far longer."""

LINES = {
    "ledger": ["events", "metrics", "ledger"],
    "barriers": ["events", "ledger", "blocks/0-0", "blocks/1-0"],
    "compare": ["metrics", "ledger"],
    "status": ["events", "ledger"],
}
OBJECTS = {"ledger": ["summary"], "barriers": [], "compare": ["summary", "leaves"], "status": ["job", "summary"]}
WRONG = [None, True, -1, 0.5, 10**400, "", "x", [], [[None]], [10**30], {}, {"x": None}]
WORKERS = [Identity(0, 0, 1), Identity(1, 0, 2)]


def write_run(path: Path, scale: float) -> None:
    """A run of three steps of two workers, of which one dies after the second; its blocks were traced."""
    both, one = View(1, tuple(WORKERS)), View(2, (WORKERS[0],))
    with RunDirectory(path) as run:
        run.write_job({"address": None, "steps": 3})
        run.write_config("seed = 4\n")
        run.event("job_started", recipe="x", trainer="X", workers=2)
        for worker in WORKERS:
            run.event("worker_started", **worker._asdict(), pid=7, host="here")
        run.event("view_changed", epoch=1, members=[0, 1], came=[0, 1], left=[], step=0)
        traces = [BlockTrace(path, worker, "secret") for worker in WORKERS]
        for step, view in ((1, both), (2, both), (3, one)):
            if view is one:
                run.event("worker_died", **WORKERS[1]._asdict(), exit_code=-9, step=2, state="member")
                run.event("view_changed", epoch=2, members=[0], came=[], left=[1], step=2)
            members = [traces[member.slot] for member in view.members]
            for trace in members if step != 2 else ():
                trace.begin(view)
            for _ in range(2 if step != 2 else 1):  # an epoch's first barrier is an entry, all others are exits
                for trace in members:
                    trace.enter()
                for trace in members:
                    trace.exit([member.node for member in view.members])
            for trace in members:
                trace.concluded("commit", view, step)
            first = (step - 1) * 30
            passes = [[0, first, 30]] if step < 3 else [[0, 60, 10], [1, 0, 20]]
            record: dict[str, Any] = {"step": step, "samples": first + 30, "loss": 1.0 / step, "learning_rate": 0.1}
            record |= {"first_sample": first, "num_samples": 30, "passes": passes, "pass_size": 70}
            record |= {"epoch": view.epoch, "step_time_s": 0.01, "time": 1000.0 + step}
            record["workers"] = [member.slot for member in view.members]
            if step != 2:
                record["recovered"] = {"epoch": view.epoch, "kind": "formed", "came": [], "gone": []}
            run.commit(record)
        ended = {"status": "done", "exit_code": 0, "params_sha256": f"{scale}", "state_sha256": f"{scale}"}
        run.event("end", status="done", exit_code=0)
        run.summary(ended)
    kernel = np.linspace(-scale, scale, 6, dtype=np.float32).reshape(2, 3)
    write_leaves(path, 3, {"kernel": kernel}.items())


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "RUN", 1.0)
    write_run(tmp_path / "OTHER", 2.0)
    return tmp_path / "RUN"


def refusal(run: Path, command: str) -> str:
    """What is wrong with the files; "" if the command can do its work with them. Nothing else may be raised."""
    try:
        assert READERS[command](run)
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["ledger", "verify", "RUN"], 0),
        (["barriers", "verify", "RUN"], 0),
        (["compare", "RUN", "OTHER"], 1),
        (["status", "RUN"], 0),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], runs: Path, argv: list[str], code: int) -> None:
    argv = [str(runs.with_name(word)) if word.isupper() else word for word in argv]
    assert cli.main(argv) == code, capsys.readouterr().out
    assert capsys.readouterr().err == ""
    path = runs / "ledger.jsonl"
    path.unlink()
    path.mkdir()
    assert cli.main(argv) == 2
    assert capsys.readouterr() == ("", f"elastic-train: cannot read {path}: Is a directory\n")


def changed(value: Any, depth: int = 3) -> Iterator[Any]:
    """`value` with one thing in it changed: another kind of value in its place, or something left out."""
    yield from (wrong for wrong in WRONG if depth < 3)
    if depth == 0 or not isinstance(value, dict | list):
        return
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        for inner in changed(value[key], depth - 1):
            copy = value.copy()
            copy[key] = inner
            yield copy
        copy = value.copy()
        del copy[key]
        yield copy


@pytest.mark.parametrize(("command", "name"), [(command, name) for command in LINES for name in LINES[command]])
def test_a_line_with_another_field(runs: Path, command: str, name: str) -> None:
    path = runs / f"{name}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    numbers = {str(line.get("event") or line.get("line")): number for number, line in enumerate(lines)}.values()
    has_refused = False
    for number in numbers:
        for other in changed(lines[number]):
            texts = [json.dumps(line) for line in [*lines[:number], other, *lines[number + 1 :]]]
            path.write_text("\n".join(texts) + "\n")
            if text := refusal(runs, command):
                has_refused = True
                is_of_its_kind = "no members can have written that" in text or "does not begin with" in text
                assert is_of_its_kind or text.startswith(f"{path}, line {number + 1}, is not what a run writes: ")
                assert text.endswith(CHANGED)
    assert has_refused or (command, name) == ("ledger", "ledger")  # what is wrong there is a finding


@pytest.mark.parametrize(("command", "name"), [(command, name) for command in OBJECTS for name in OBJECTS[command]])
def test_a_file_with_another_field(runs: Path, command: str, name: str) -> None:
    path = runs / f"{name}.json"
    texts = set()
    for other in changed(json.loads(path.read_text())):
        path.write_text(json.dumps(other))
        texts.add(refusal(runs, command))
    assert len(texts) > 5
    assert all(
        text.startswith(f"{path} is not what a run writes: ") and text.endswith(CHANGED) for text in texts - {""}
    )


CONTENTS = {
    "nothing": b"",
    "garbage": b"\x89PNG\r\n\x1a\n\x00\xff\xfe" + bytes(range(256)) + b"\n\n",
    "zeros": bytes(4096) + b"\n",
    "no object": b'3\n[]\n"x"\nnull\n',
    "nested": b"[" * 100_000 + b"\n",
    "an object": b"{}\n",
    "a huge number": b'{"step": ' + b"9" * 5000 + b"}\n",
}


@pytest.mark.parametrize("command", READERS)
@pytest.mark.parametrize("content", CONTENTS)
def test_files_of_another_content(runs: Path, command: str, content: str) -> None:
    for path in sorted(path for path in runs.rglob("*") if path.is_file()):
        before = path.read_bytes()
        path.write_bytes(CONTENTS[content])
        text = refusal(runs, command)
        assert str(path) in text or not text
        if content in ("garbage", "no object") and path.name.removesuffix(".jsonl") in LINES[command]:
            assert text or (command, path.name) == ("ledger", "ledger.jsonl")
        path.write_bytes(before)


@pytest.mark.parametrize("command", READERS)
def test_files_that_are_missing_or_directories(runs: Path, command: str) -> None:
    for path in sorted(path for path in runs.rglob("*") if path.is_file()):
        before = path.read_bytes()
        path.unlink()
        assert refusal(runs, command) == ""
        path.mkdir()
        assert refusal(runs, command) in ("", f"cannot read {path}: Is a directory")
        path.rmdir()
        path.write_bytes(before)


@pytest.mark.parametrize("command", READERS)
def test_a_name_that_no_directory_can_have(tmp_path: Path, command: str) -> None:
    assert "is no run directory" in refusal(tmp_path / ("x" * 5000), command)


def test_a_field_is_named_with_file_and_line(runs: Path) -> None:
    path = runs / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].replace('"step": 2', '"step": "2"'), *lines[2:]]))
    for command in ("ledger", "compare"):
        assert refusal(runs, command) == (
            f'{path}, line 2, is not what a run writes: step = "2": expected a whole number; '
            "the file was changed; bring it back as the run wrote it"
        )


def test_a_dtype_that_there_is_not(runs: Path) -> None:
    path = runs / "leaves.json"
    path.write_text(path.read_text().replace("float32", "float33"))
    assert f"{path} is not what a run writes: leaves.kernel.dtype = 'float33'" in refusal(runs, "compare")


def test_a_file_of_blocks_with_another_name(runs: Path) -> None:
    path = runs / "blocks" / "0-0.jsonl"
    path.rename(path.with_name("copy of 0-0.jsonl"))
    assert "copy of 0-0.jsonl is not named as a run does it" in refusal(runs, "barriers")
