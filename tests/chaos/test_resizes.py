"""Row 25: nothing grows with the number of resizes. Six here; `benchmarks/resizes.py` does two hundred."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 560

SLACK = 8
"""Descriptors and threads that may come with the first use of something, however many resizes follow."""


@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S + 20)
def test_row_25_resizes_leave_no_threads_or_descriptors_behind(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "resizes.py"), "--resizes", "6", "--every", "2"]
    command += ["--run-dir", str(tmp_path / "run"), "--out", str(tmp_path / "report.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    out = tmp_path / "run.out"
    assert ended.returncode == 0, ended.stderr + (out.read_text()[-5000:] if out.exists() else "")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["same_member_throughout"] and report["resizes"] >= 6
    first, *_, last = report["samples"]
    for who in ("coordinator", "agent", "member"):
        for name in ("num_threads", "num_fds"):
            assert last[who][name] <= first[who][name] + SLACK, report["samples"]
