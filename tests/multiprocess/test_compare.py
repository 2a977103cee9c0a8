"""Runs with one and two workers are the same computation, and each proves its samples; another seed is another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from job import FAULTY, ROOT, UNSAVED, Job, plain_run

pytestmark = pytest.mark.timeout(300)
PARAMS = ("inner/bias", "inner/kernel", "norm/bias", "norm/scale", "outer/bias", "outer/kernel")


def command(*argv: str | Path) -> tuple[int, str]:
    whole = [sys.executable, "-m", "elastic_train.cli", *map(str, argv)]
    done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("runs")
    found = {name: directory / name for name in ("one", "two", "other")}
    for name, workers in (("one", 1), ("two", 2)):
        with Job(found[name], FAULTY, "--steps", "25", "--seed", "0", *UNSAVED, workers=workers) as job:
            assert job.finish() == 0, job.logs()
    plain_run(found["other"], 25, "--seed", "1")
    return found


def test_the_number_of_workers_makes_no_difference(runs: dict[str, Path]) -> None:
    code, printed = command("compare", runs["one"], runs["two"])
    assert code == 0 and printed.startswith("same: "), printed
    assert "first difference" not in printed


def test_another_seed_differs_from_the_first_step_on(runs: dict[str, Path]) -> None:
    code, printed = command("compare", runs["one"], runs["other"])
    assert code == 1 and "first difference: step 1, loss in metrics.jsonl" in printed
    assert "setting seed: 0 and 1; it may be why" in printed
    assert {line.split()[1].rstrip(":") for line in printed.splitlines() if line.startswith("leaf ")} == set(PARAMS)
    assert "units in the last place" in printed


@pytest.mark.parametrize("name", ["one", "two"])
def test_every_sample_is_consumed_once(runs: dict[str, Path], name: str) -> None:
    code, printed = command("ledger", "verify", runs[name])
    assert code == 0 and "1 complete, of 1000 samples; 200 samples of pass 1" in printed, printed
