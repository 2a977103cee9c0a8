"""`elastic-train report`: the summary of a run that has ended, or why there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_train import cli
from elastic_train.telemetry.records import RunDirectory
from elastic_train.telemetry.report import format_summary
from elastic_train.telemetry.summary import summarize

COMMIT = {"step": 1, "samples": 10, "loss": 0.25, "time": 1.0, "step_time_s": 0.5}


def finished(run_dir: Path, **end: Any) -> dict[str, Any]:
    about = {"status": "done", "exit_code": 0, "time": 2.0, "step": 1, "samples": 10, **end}
    summary = summarize([], [COMMIT], about)
    (run_dir / "job.json").write_text("{}")
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return summary


def refused(capsys: pytest.CaptureFixture[str], run_dir: Path) -> str:
    assert cli.main(["report", str(run_dir)]) == 2
    assert not (run_dir / "report.html").exists()
    return capsys.readouterr().err


def test_what_was_printed_at_the_end_is_printed_again_and_written_to_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = finished(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed == format_summary(summary, tmp_path) + "\n"
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and f"<h1>Run {tmp_path.name}</h1>" in page
    assert "loss        0.25" in page


def test_the_traceback_of_a_run_that_failed_comes_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traceback = 'Traceback (most recent call last):\n  File "<string>"\nValueError: no\n'
    finished(tmp_path, status="failed", exit_code=3, message="user code failed", traceback=traceback)
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(traceback + "\nstatus      failed\n")
    assert "File &quot;&lt;string&gt;&quot;" in (tmp_path / "report.html").read_text()


def test_a_traceback_gives_the_terminal_no_orders(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    traceback = 'Traceback (most recent call last):\n\tFile "x"\nValueError: \x1b[2Jgone\x00\udc80\n'
    finished(tmp_path, status="failed", exit_code=3, message="failed: \x9b2J", traceback=traceback)
    assert cli.main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert '\n\tFile "x"\nValueError: \\x1b[2Jgone\\x00\\udc80\n' in printed and "\nfailed: \\x9b2J\n" in printed
    assert "ValueError: \\x1b[2Jgone\\x00\\udc80\n" in (tmp_path / "report.html").read_text()


def test_there_is_no_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert f"{tmp_path} is no run directory" in refused(capsys, tmp_path)
    assert "is no run directory" in refused(capsys, tmp_path / "missing")


def test_the_run_has_not_ended(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as records:
        records.write_job({"address": None})
        message = refused(capsys, tmp_path)
    assert "has not ended, so there is no summary; `elastic-train status" in message
    assert "was broken off, so there is no summary; the command that started it goes on" in refused(capsys, tmp_path)


FAULT = {"kind": "killed", "slot": 1, "step": 3, "cause": None, "detect_s": 0.1, "rebuild_s": None, "heal_s": 0.0}
FAULT |= {"total_s": None}
REJOIN = {"slot": 1, "step": None, "stall_s": 0.5, "start_to_member_s": None}
MISSED = {"kind": "kill", "slot": "random", "where": "exchange"}


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"step_time_s": "fast"}, 'step_time_s = "fast": expected a number or null'),
        ({"step": "seven"}, 'step = "seven": expected a whole number'),
        ({"step": 1.0}, "step = 1.0: expected a whole number"),
        ({"samples": "many"}, 'samples = "many": expected a whole number'),
        ({"samples": True}, "samples = true: expected a whole number"),
        ({"status": ["done"]}, 'status = ["done"]: expected text'),
        ({"message": {"a": "b"}}, 'message = {"a": "b"}: expected text'),
        ({"metrics": 1}, "metrics = 1: expected an object"),
        ({"metrics": {"eval_loss": ["x"]}}, 'metrics.eval_loss = ["x"]: expected a number or null'),
        ({"wall_s": float("nan")}, "wall_s = NaN: expected a number"),
        ({"wall_s": 10**400}, f"wall_s = 1{'0' * 59}…: expected a number"),
        ({"goodput": "0.9"}, 'goodput = "0.9": expected a number or null'),
        ({"time_accounts": {"saving": {"share": "x"}}}, 'time_accounts.saving.share = "x": expected a number'),
        ({"resumes": "twice"}, 'resumes = "twice": expected a whole number'),
        ({"params_sha256": 5}, "params_sha256 = 5: expected text or null"),
        ({"faults": {}}, "faults = {}: expected a list"),
        ({"faults": [3]}, "faults[0] = 3: expected an object"),
        ({"faults": [FAULT, {**FAULT, "slot": "1"}]}, 'faults[1].slot = "1": expected a whole number or null'),
        ({"faults": [{**FAULT, "kind": "eaten"}]}, 'faults[0].kind = "eaten": expected one of coordinator, differs'),
        ({"faults": [{"kind": "killed"}]}, "faults[0] lacks 'slot'"),
        ({"rejoins": [{**REJOIN, "stall_s": None}]}, "rejoins[0].stall_s = null: expected a number"),
        ({"faults_missed": [MISSED]}, "faults_missed[0] lacks 'step'"),
        ({"faults_missed": [{**MISSED, "step": "x"}]}, 'faults_missed[0].step = "x": expected a whole number'),
    ],
)
def test_a_summary_with_values_of_another_kind(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, changed: dict[str, Any], wrong: str
) -> None:
    summary = finished(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps({**summary, **changed}))
    message = refused(capsys, tmp_path)
    assert f"{tmp_path / 'summary.json'} is not what a run writes: {wrong}" in message
    assert "the file was changed" in message


def test_a_summary_with_everything_that_a_run_writes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missed = [{**MISSED, "step": 9}, {**MISSED, "after_s": 1.5, "slot": 2}]
    kinds = ("killed", "raised", "nonfinite", "differs", "coordinator")
    faults = [{**FAULT, "kind": kind, "total_s": 1.0} for kind in kinds]
    more = {"faults": [*faults, {**FAULT, "slot": None, "step": None}], "rejoins": [REJOIN], "faults_missed": missed}
    numbers = {"final_loss": None, "goodput": None, "metrics": {"eval_loss": None, "eval_count": 3}, "resumes": 1}
    (tmp_path / "summary.json").write_text(json.dumps({**finished(tmp_path), **more, **numbers}))
    assert cli.main(["report", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "worker 1 was killed after step 3: 1.00 s" in printed and "the coordinator died after step 3" in printed


@pytest.mark.parametrize(("text", "reason"), [("{", "not JSON"), ('{"status": "done"}', "lacks 'step'")])
def test_a_summary_that_was_changed(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, reason: str) -> None:
    finished(tmp_path)
    (tmp_path / "summary.json").write_text(text)
    message = refused(capsys, tmp_path)
    assert "summary.json" in message and reason in message and "the file was changed" in message


def test_the_page_cannot_be_written_and_the_summary_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = finished(tmp_path)
    monkeypatch.setattr("os.open", refuse)
    assert cli.main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert f"cannot write {tmp_path / 'report.html'}: Permission denied" in said.err
    assert said.out == format_summary(summary, tmp_path) + "\n"


def refuse(*_: object, **__: object) -> int:
    raise PermissionError(13, "Permission denied")
