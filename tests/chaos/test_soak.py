"""The soak at the foot of the catalogue, in three minutes: random faults of many kinds, and an exact result.

`benchmarks/soak.py --seconds 1800` is the long one. `.ci/run` runs "catalogue" in one of its cells, after the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 180
LIMIT_S = 560


OTHERS = ("--kinds", "endless", "slow", "nonfinite", "flip", "corrupt", "leave", "stop_short")
"""Kinds that the soak at the foot of the catalogue lacks."""


@pytest.mark.soak
@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("kinds", [(), OTHERS], ids=["catalogue", "others"])
def test_soak_of_random_faults_is_exact(tmp_path, kinds):
    command = [sys.executable, str(ROOT / "benchmarks" / "soak.py"), "--seconds", str(SECONDS), "--every", "12", *kinds]
    command += ["--no-reference", "--run-dir", str(tmp_path / "soak"), "--out", str(tmp_path / "report.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    log = tmp_path / "soak" / "soak.out"
    about = ended.stdout + ended.stderr + (log.read_text()[-5000:] if log.exists() else "")
    assert (tmp_path / "report.json").exists(), about
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exact"], about
    assert report["all_survived"], about
    assert report["num_faults"] >= 4, about
    assert report["coordinator"]["at_end"]["num_fds"] <= report["coordinator"]["at_start"]["num_fds"] + 10, about
    print(about)  # the throughput kept is for whoever reads it: this machine may be doing other things, too
