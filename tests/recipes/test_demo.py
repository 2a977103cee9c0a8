"""What the demo concludes from a run directory, and that it leaves no process behind."""

import json
import sys
from pathlib import Path

import pytest

from recipes import demo


def write_run(directory: Path, commits: list[dict], faults: list[dict]) -> None:
    (directory / "ledger.jsonl").write_text("".join(json.dumps(commit) + "\n" for commit in commits))
    (directory / "summary.json").write_text(json.dumps({"faults": faults}))


def commits_with_a_gap(steps: int, away: range) -> list[dict]:
    return [
        {
            "step": step,
            "pass": 0,
            "first_sample": (step - 1) * 8,
            "num_samples": 8,
            "workers": [0, 2] if step in away else [0, 1, 2],
        }
        for step in range(1, steps + 1)
    ]


KILLED = {"kind": "killed", "slot": 1, "step": 2, "total_s": 0.25}


def test_nothing_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(demo, "STEPS", 9)
    write_run(tmp_path, commits_with_a_gap(9, range(3, 6)), [KILLED])
    assert demo.report(tmp_path) == 0
    printed = capsys.readouterr().out
    assert "9 of 9 committed, each once" in printed
    assert "none left out, none used twice" in printed
    assert "worker 1 killed: 0.25 s until the next committed step" in printed
    assert "took part again from step 6 on" in printed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda commits: commits.pop(4), "8 of 9 committed, NOT each once"),
        (lambda commits: commits[4].update(first_sample=33), "LEFT OUT OR USED TWICE"),
        (lambda commits: [commit.update(workers=[0, 2]) for commit in commits[5:]], "DID NOT COME BACK"),
    ],
)
def test_what_was_lost_is_said(
    change, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(demo, "STEPS", 9)
    commits = commits_with_a_gap(9, range(3, 6))
    change(commits)
    write_run(tmp_path, commits, [KILLED])
    assert demo.report(tmp_path) == 1
    assert says in capsys.readouterr().out


def test_a_half_written_line_is_left_for_later(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"step": 1}\n{"ste')
    assert demo.read_lines(path) == [{"step": 1}]


def test_the_run_is_ended_when_the_demo_fails():
    with (
        pytest.raises(ZeroDivisionError),
        demo.running([sys.executable, "-c", "import signal; signal.pause()"]) as job,
    ):
        raise ZeroDivisionError
    assert job.returncode is not None


def test_a_run_that_ends_early_ends_the_demo_with_its_exit_code(tmp_path: Path):
    with demo.running([sys.executable, "-c", "raise SystemExit(3)"]) as job:
        with pytest.raises(SystemExit) as ended:
            demo.wait_for_step(job, tmp_path / "ledger.jsonl")
        assert ended.value.code == 3
