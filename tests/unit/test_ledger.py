"""`elastic-train ledger verify`: what it reads, what it prints, and its exit codes."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from elastic_train import cli
from elastic_train.data import ledger
from elastic_train.data.ledger import format_report, verify
from elastic_train.data.sampler import Sampler
from elastic_train.telemetry.records import RunDirectory


def commit_steps(run: RunDirectory, steps: range) -> None:
    """Steps of 30 samples, 100 to a pass."""
    for step in steps:
        first = (step - 1) * 30
        passes = [list(span) for span in Sampler(100, 30, 1, 0).spans(first)]
        record = {"step": step, "samples": first + 30, "loss": 1.0 / step, "learning_rate": 0.1, "workers": [0, 1]}
        record |= {"first_sample": first, "num_samples": 30, "passes": passes, "pass_size": 100}
        record |= {"epoch": 1, "step_time_s": 0.01, "time": 1000.0 + step}
        if step == steps.start:
            record["recovered"] = {"epoch": 1, "kind": "formed"}
        run.commit(record)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 20 steps that has ended."""
    with RunDirectory(tmp_path, log_every=5) as run:
        run.write_job({})
        run.write_config("seed = 4\n")
        commit_steps(run, range(1, 21))
        run.summary({"status": "done", "exit_code": 0, "step": 20, "samples": 600})
    return tmp_path


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "ledger.jsonl").read_text().splitlines(keepends=True)


def verify_command(capsys: pytest.CaptureFixture[str], run_dir: Path) -> tuple[int, str]:
    code = cli.main(["ledger", "verify", str(run_dir)])
    return code, capsys.readouterr().out


def test_a_whole_run(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    code, printed = verify_command(capsys, run_dir)
    assert code == 0
    assert printed.splitlines() == [
        "steps    1 to 20, 20 lines",
        "samples  600, from position 0",
        "passes   6 complete, of 100 samples",
        "orders   6 of 6 looked up: each is a permutation of all samples",
        "worst    no sample left out, none consumed twice",
        "result   proven",
    ]


def test_a_line_left_out_is_named(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    (run_dir / "ledger.jsonl").write_text("".join(lines(run_dir)[:6] + lines(run_dir)[7:]))
    code, printed = verify_command(capsys, run_dir)
    assert code == 1
    assert "30 samples left out, or consumed again, at one place" in printed
    assert "NOT proven. line 7, step 8: step: expected 7, found 8" in printed


def test_lines_missing_at_the_end_are_found_once_the_job_has_ended(
    capsys: pytest.CaptureFixture[str], run_dir: Path
) -> None:
    (run_dir / "ledger.jsonl").write_text("".join(lines(run_dir)[:-1]))
    code, printed = verify_command(capsys, run_dir)
    assert code == 1 and "line 20, step 20: the last step (according to summary.json): expected 20, found 19" in printed
    (run_dir / "summary.json").unlink()
    assert verify_command(capsys, run_dir)[0] == 0


def test_the_first_lines_must_not_be_missing(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    (run_dir / "ledger.jsonl").write_text("".join(lines(run_dir)[4:]))
    code, printed = verify_command(capsys, run_dir)
    assert code == 1 and "line 1, step 5: step: expected 1, found 5" in printed


def test_metrics_are_witnesses(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    changed = lines(run_dir)
    changed[9] = changed[9].replace("[0, 1]", "[0]")
    (run_dir / "ledger.jsonl").write_text("".join(changed))
    code, printed = verify_command(capsys, run_dir)
    assert code == 1 and "line 10, step 10: workers (according to metrics.jsonl): expected [0, 1], found [0]" in printed


def test_a_line_that_is_being_written_is_left_out(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    (run_dir / "summary.json").unlink()
    (run_dir / "ledger.jsonl").write_text("".join(lines(run_dir))[:-7])
    code, printed = verify_command(capsys, run_dir)
    assert code == 0 and "1 to 19, 19 lines; the last line is not complete" in printed
    assert "5 complete, of 100 samples; 70 samples of pass 5" in printed


def test_a_line_that_is_no_json(capsys: pytest.CaptureFixture[str], run_dir: Path) -> None:
    changed = lines(run_dir)
    changed[2] = "\x00\xff\n"
    (run_dir / "ledger.jsonl").write_text("".join(changed))
    code, printed = verify_command(capsys, run_dir)
    assert (
        code == 1 and "NOT proven. line 3: the line: expected a JSON object" in printed and "problems:" not in printed
    )


def test_a_job_from_a_checkpoint_begins_where_its_first_epoch_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with RunDirectory(tmp_path, resume=7) as run:
        run.fill_up(7, ())
        run.write_config("seed = 4\n")
        commit_steps(run, range(8, 12))
    code, printed = verify_command(capsys, tmp_path)
    assert code == 0 and "8 to 11, 4 lines" in printed and "0 complete" in printed


def test_records_lost_at_the_beginning_are_no_checkpoint(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.write_config("seed = 4\n")
        commit_steps(run, range(3, 9))
    code, printed = verify_command(capsys, tmp_path)
    assert code == 1 and "line 1, step 3: step: expected 1, found 3" in printed


def test_nothing_is_proven_without_steps_or_seed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.write_job({})
        code, printed = verify_command(capsys, tmp_path)
        assert code == 1 and "the number of steps: expected at least 1, found 0" in printed
        commit_steps(run, range(1, 4))
    code, printed = verify_command(capsys, tmp_path)
    assert code == 1 and "the seed in config.toml" in printed


def test_no_run_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["ledger", "verify", str(tmp_path)]) == 2
    assert f"{tmp_path} is no run directory" in capsys.readouterr().err


def long_ledger(num_steps: int, pass_size: int) -> Iterator[str]:
    for step in range(1, num_steps + 1):
        first = (step - 1) * 1000
        line = {"step": step, "pass": first // pass_size, "first_sample": first, "num_samples": 1000}
        yield json.dumps({**line, "pass_size": pass_size, "workers": [0]}) + "\n"


def test_a_wrong_order_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sampler, "sample_ids", lambda self, first, count: np.zeros(count, np.int64))
    report = verify(long_ledger(3, 1000), seed=0)
    assert report.first_problem is not None and report.first_problem.what == "the order of pass 0"


def test_few_passes_of_many_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "MAX_LOOKED_UP", 3500)
    report = verify(long_ledger(50, 1000), seed=0)
    assert report.passes_looked_up == [0, 24, 49] and "3 of 50 looked up" in format_report(report)
    monkeypatch.setattr(ledger, "MAX_PASSES", 2)
    assert verify(long_ledger(50, 1000), seed=0).passes_looked_up == [0, 49]


def test_memory_does_not_grow_with_the_ledger() -> None:
    tracemalloc.start()
    report = verify(long_ledger(5000, 10**9), seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.proven and peak < 200_000
    assert "not looked up: a pass has more than 10000000 samples" in format_report(report)
