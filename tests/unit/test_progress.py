"""The display: a redrawn bar on a terminal, few plain lines elsewhere."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastic_train.launch.coordinating import _JobRecords
from elastic_train.telemetry.progress import Display, Pace


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def plain(**options: object) -> tuple[Display, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    display = Display(stream, 3, 300, clock=clock, **options)  # type: ignore[arg-type]
    display.start()
    return display, stream, clock


def test_plain_lines_come_at_a_slow_pace_and_at_changes_of_members():
    display, stream, clock = plain()
    steps = []
    for step in range(1, 121):
        clock.now = step * 0.1
        members = [0, 1, 2] if step < 30 or step > 90 else [0, 2]
        epoch = 1 + (step >= 30) + (step > 90)
        display.update({"step": step, "loss": 1 / step, "workers": members, "epoch": epoch})
        if (lines := stream.getvalue().splitlines()) and len(lines) > len(steps):
            steps.append(step)
    display.stop()
    assert steps == [1, 30, 80, 91]
    assert len(stream.getvalue().splitlines()) == 5
    assert stream.getvalue().splitlines()[-1].startswith("step 120/300")


def test_before_the_first_commit_only_news_of_the_start_are_told():
    display, stream, clock = plain()
    for second in range(40):
        clock.now = float(second)
        ready = [0] if second > 10 else []
        display.update({"step": 0, "epoch": 0, "workers": [], "ready": ready})
    display.update({"ready": [0, 1, 2], "workers": [0, 1, 2], "epoch": 1})
    clock.now = 60.0
    display.update({"ready": [0, 1, 2], "workers": [0, 1, 2], "epoch": 1})
    display.update({"step": 1, "loss": 0.5, "workers": [0, 1, 2], "epoch": 1})
    display.stop()
    assert stream.getvalue().splitlines() == [
        "starting 3 workers (ready 0/3)",
        "starting 3 workers (ready 1/3)",
        "starting 3 workers (ready 3/3)",
        "step   1/300  loss 0.5000  members 3/3  epoch 1",
    ]


def test_no_lines_while_nothing_happens_and_records_of_an_older_epoch_are_late():
    display, stream, clock = plain()
    record = {"step": 7, "loss": 0.5, "workers": [0, 1, 2], "epoch": 1}
    display.update(record)
    display.update({"step": 7, "workers": [0, 2], "epoch": 2})
    for second in range(0, 60, 2):
        clock.now = float(second)
        display.update({"step": 7, "workers": [0, 2], "epoch": 2} if second % 4 else record)
    display.stop()
    assert stream.getvalue().splitlines() == [
        "step   7/300  loss 0.5000  members 3/3  epoch 1",
        "step   7/300  loss 0.5000  members 2/3  epoch 2",
    ]


def test_a_line_says_everything_known():
    display, stream, clock = plain()
    record = {"step": 119, "loss": 0.5, "workers": [0, 1], "epoch": 2, "other": 1}
    display.update(record)
    clock.now = 1.0
    display.update(
        {**record, "step": 120, "samples_per_s": 12_300, "loss": 0.1234, "workers": [0, 1, 2], "time_lost_s": 0.42}
        | {"evaluation": {"accuracy": 0.9512, "count": 3}, "epoch": 3}
    )
    display.stop()
    first, second = stream.getvalue().splitlines()
    assert first == "step 119/300  loss 0.5000  members 2/3  epoch 2"
    assert second == (
        "step 120/300  loss 0.1234  12.3k samples/s  members 3/3  epoch 3  lost 0.4 s  eval_accuracy 0.9512  "
        "eval_count 3"
    )


def test_the_last_evaluation_stays_and_a_loss_may_be_unknown():
    display, stream, clock = plain()
    display.update({"step": 1, "loss": None, "evaluation": {"accuracy": 0.5}})
    clock.now = 10
    display.update({"step": 2, "loss": 0.25})
    display.stop()
    assert stream.getvalue() == "step   1/300  eval_accuracy 0.5\nstep   2/300  loss 0.2500  eval_accuracy 0.5\n"


def rates(*steps: tuple[int, float | None] | str) -> list[float | None]:
    """Samples per second after each step of (samples, seconds); a text in front of one makes it an epoch's first."""
    pace, found, recovered = Pace(), [], {}
    for step in steps:
        if isinstance(step, str):
            recovered = {"recovered": {"kind": step}}
            continue
        record = {"num_samples": step[0], "step_time_s": step[1], **recovered}
        found.append(pace.committed(record).get("samples_per_s"))
        recovered = {}
    return found


def test_samples_per_second_are_those_of_the_last_seconds_of_steps():
    assert rates(*[(100, 0.5)] * 20, *[(100, 2.5)] * 4) == pytest.approx([200.0] * 20 + [120.0, 40.0, 40.0, 40.0])
    assert rates((64, 60.0), (64, 30.0)) == pytest.approx([64 / 60, 64 / 30])  # however long one takes
    assert rates((64, None), (64, 0.0), (64, 2.0)) == [None, None, 32.0]


def test_samples_per_second_hold_no_pause():
    """Ten minutes below the floor lie between two commits, and so in the time of the epoch's first step."""
    before, after = [(100, 0.5)] * 4, [(100, 1.0)] * 2
    assert rates("formed", (100, 20.0), *before, "death", (100, 600.0), *after) == [
        *[None, 200.0, 200.0, 200.0, 200.0],
        *[None, 100.0, 100.0],
    ]


def test_samples_per_second_stay_until_they_are_known_anew():
    display, stream, clock = plain()
    display.update({"step": 1, "epoch": 1, "samples_per_s": 200.0})
    clock.now = 600.0
    display.update({"step": 2, "epoch": 2})
    display.stop()
    assert [line.partition("/300  ")[2] for line in stream.getvalue().splitlines()] == [
        "200 samples/s  epoch 1",
        "200 samples/s  epoch 2",
    ]


def test_notes_and_an_early_end():
    display, stream, _ = plain()
    display.note("worker 1 [died]")
    display.stop()
    display.stop()
    assert stream.getvalue() == "worker 1 [died]\n"


@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_what_a_terminal_would_take_for_orders_is_shown(monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = kind()
    display = Display(stream, 3, 300)
    display.start()
    display.note('Traceback\n\tFile "x"\nValueError: \x1b]0;title\x07\x1b[2J\x9b1m\r over')
    display.update({"step": 1, "evaluation": {"\x1b[31mred": 1.0, "kind": "\x08\x7f"}})
    display.stop()
    text = stream.getvalue()
    assert "ValueError: \\x1b]0;title\\x07\\x1b[2J\\x9b1m\\r over" in text
    assert "eval_\\x1b[31mred 1  eval_kind \\x08\\x7f" in text
    for order in ("\x1b]0;", "\x07", "\x1b[2J", "\x9b", "\r over", "\x1b[31mred", "\x08", "\x7f"):
        assert order not in text


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    display = Display(stream, 3, 300)
    display.update({"step": 1})
    assert stream.getvalue() == "step   1/300\n"


def test_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    display = Display(stream, 3, 300, first_step=150)
    display.start()
    display.update({"ready": [0]})
    first = stream.getvalue()
    assert "50%" in first and "starting 3 workers (ready 1/3)" in first
    display.note("worker 1 [died]")
    display.update({"step": 300, "loss": 0.5, "workers": [0, 2], "epoch": 2})
    display.stop()
    text = stream.getvalue()
    assert "worker 1 [died]" in text
    assert "step 300/300  loss 0.5000  members 2/3  epoch 2" in text
    assert text.rstrip("\n").count("\n") > first.count("\n")


def test_rich_is_not_imported_without_a_terminal():
    code = (
        "import io, sys; from elastic_train.telemetry.progress import Display;"
        "display = Display(io.StringIO(), 1, 1); display.start();"
        "display.update({'step': 1}); display.stop();"
        "from elastic_train.telemetry import records, report, status;"
        "assert not {'rich', 'jax', 'grpc', 'numpy'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_the_coordinator_tells_the_samples_per_second_of_every_step_that_it_writes():
    told: list[dict[str, object]] = []
    records = SimpleNamespace(commit=lambda record: [record], newest=None, time_lost_s=1.5)
    messages = SimpleNamespace(record=told.append)
    job = _JobRecords(records, messages, Path("run"), SimpleNamespace())  # type: ignore[arg-type]
    for step, more in ((1, {"recovered": {}}), (2, {}), (3, {})):
        job.commit({"step": step, "num_samples": 64, "step_time_s": 0.5 * step, **more})
    assert [(each.get("samples_per_s"), each["time_lost_s"]) for each in told] == [
        (None, 1.5),
        (64.0, 1.5),
        (pytest.approx(128 / 2.5), 1.5),
    ]
