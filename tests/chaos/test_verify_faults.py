"""`elastic-train verify-faults`: what it runs, and what it concludes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 560


@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_recipe_is_verified(tmp_path):
    command = [sys.executable, "-m", "elastic_train.cli", "verify-faults", "recipes/digits_mlp.py", "--json"]
    command += ["--run-dir", str(tmp_path / "runs"), "--set", "faults.keepalive_s=1.0", "faults.first_backoff_s=0.1"]
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    verdict = json.loads(ended.stdout)
    assert verdict["passed"] and verdict["exact"] and verdict["survived"]
    assert verdict["num_injected"] == 5
    kinds = Counter(fault["kind"] for fault in verdict["faults"])
    assert kinds >= Counter(["killed", "raised", "killed", "stopped", "exited"])
    assert verdict["kept"]["share"] > 0
    assert json.loads((tmp_path / "runs" / "verify-faults.json").read_text()) == verdict
