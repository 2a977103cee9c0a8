"""`elastic-train compare` on directories made for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_train import cli
from elastic_train.telemetry.compare import ABSENT, Comparison, compare, format_comparison, read_run
from elastic_train.telemetry.leaves import write_leaves

KERNEL = np.linspace(-1, 1, 50, dtype=np.float32).reshape(5, 10)


def write_run(
    path: Path,
    *,
    num_steps: int = 5,
    digest: str | None = "a" * 64,
    params_digest: str | None = None,
    config: str = "steps = 5\n\n[faults]\nkeepalive_s = 5.0\n",
    metrics: dict[int, dict[str, Any]] | None = None,
    ledger: dict[int, dict[str, Any]] | None = None,
    leaves: dict[str, np.ndarray] | None = None,
    workers: tuple[int, ...] = (0,),
) -> Path:
    """`metrics` and `ledger` change the lines of some steps; None as a field's value leaves it out."""
    path.mkdir()
    (path / "job.json").write_text("{}")
    (path / "config.toml").write_text(config)
    lines: dict[str, list[dict[str, Any]]] = {"metrics": [], "ledger": []}
    for step in range(1, num_steps + 1):
        where = {"step": step, "workers": list(workers)}
        times = {"time": hash(path) * step, "step_time_s": 0.1 * len(workers), "epoch": len(workers)}
        values = {"loss": 1.0 / step, "accuracy": 0.0, "samples": step * 8, "learning_rate": 0.1}
        positions = {"first_sample": (step - 1) * 8, "num_samples": 8, "pass": 0, "pass_size": 100}
        for name, line, changes in (("metrics", values | times, metrics), ("ledger", positions, ledger)):
            line = where | line | (changes or {}).get(step, {})
            lines[name].append({field: value for field, value in line.items() if value is not None})
    for name, content in lines.items():
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    if digest is not None:
        end = {"step": num_steps, "samples": num_steps * 8, "params_sha256": params_digest or digest}
        (path / "summary.json").write_text(json.dumps({**end, "state_sha256": digest}))
    write_leaves(path, num_steps, (leaves or {"kernel": KERNEL}).items())
    return path


def compared(a: Path, b: Path) -> tuple[Comparison, str]:
    one, other = read_run(a), read_run(b)
    comparison = compare(one, other)
    return comparison, format_comparison(comparison, one, other)


def test_the_same_with_other_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", workers=(0, 1, 2))
    comparison, text = compared(a, b)
    assert comparison == Comparison(True, (True, True), None, 5, [], [], (5, 5))
    assert text == f"same: {a} and {b} have equal digests after step 5 (parameters {'a' * 12}, state {'a' * 12})"
    assert cli.main(["compare", str(a), str(b)]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_settings_without_effect_are_named(tmp_path: Path) -> None:
    config = "steps = 9\nlog_every = 3\n\n[faults]\nkeepalive_s = 2.0\n"
    comparison, text = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", config=config))
    assert comparison.same
    assert comparison.settings == [("faults.keepalive_s", 5.0, 2.0), ("log_every", ABSENT, 3), ("steps", 5, 9)]
    assert "setting steps: 5 and 9; it made no difference" in text


def test_settings_that_may_be_why(tmp_path: Path) -> None:
    config = 'steps = 5\nseed = 1\n\n[faults]\nkeepalive_s = 2.0\nnonfinite = "skip"\n'
    _, text = compared(write_run(tmp_path / "a"), write_run(tmp_path / "b", config=config, digest="b" * 64))
    assert "setting seed: 'absent' and 1; it may be why" in text
    assert "setting faults.keepalive_s: 5.0 and 2.0; it cannot matter" in text
    assert "setting faults.nonfinite: 'absent' and 'skip'; it may be why" in text


METRICS, LEDGER = "metrics.jsonl", "ledger.jsonl"
PARTS = [[0, 32, 5], [1, 0, 3]]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"metrics": {3: {"loss": math.nextafter(1 / 3, 1)}}}, (3, METRICS, "loss", (1 / 3, math.nextafter(1 / 3, 1)))),
        ({"metrics": {2: {"accuracy": -0.0}}}, (2, METRICS, "accuracy", (0.0, -0.0))),
        ({"metrics": {2: {"accuracy": None}}}, (2, METRICS, "accuracy", (0.0, ABSENT))),
        ({"metrics": {4: {"learning_rate": 0.2}, 5: {"loss": 0}}}, (4, METRICS, "learning_rate", (0.1, 0.2))),
        ({"ledger": {2: {"first_sample": 9}}, "metrics": {2: {"loss": 0}}}, (2, LEDGER, "first_sample", (8, 9))),
        ({"ledger": {4: {"pass": 1}}, "metrics": {3: {"samples": 0}}}, (3, METRICS, "samples", (24, 0))),
        ({"ledger": {3: {"step": 30}}}, (3, LEDGER, "the line", ("there", ABSENT))),
        ({"ledger": {5: {"crosses": PARTS}}}, (5, LEDGER, "crosses", (ABSENT, PARTS))),
    ],
)
def test_the_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], expected: tuple[object, ...]
) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", digest="b" * 64, **changes)
    comparison, text = compared(a, b)
    # Their texts: 0.0 and -0.0 are equal.
    assert not comparison.same and comparison.first is not None and repr(tuple(comparison.first)) == repr(expected)
    assert f"first difference: step {expected[0]}, {expected[2]} in {expected[1]}" in text
    assert cli.main(["compare", str(a), str(b)]) == 1


def test_steps_that_only_one_has_logged_or_evaluated(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a", metrics={2: {"eval_loss": 1.0}, 4: {"eval_loss": 0.5}})
    b = write_run(tmp_path / "b", metrics={4: {"eval_loss": 0.5}}, num_steps=4, digest="b" * 64)
    kept = [line for line in (b / "metrics.jsonl").read_text().splitlines(keepends=True) if '"step": 3' not in line]
    (b / "metrics.jsonl").write_text("".join(kept))
    comparison, text = compared(a, b)
    assert comparison.first is None and comparison.num_common == 4
    assert "ended after different steps, 5 and 4" in text and "parameters after steps 5 and 4" in text
    assert "no difference in the ledger and the logged metrics of 4 common steps" in text
    (tmp_path / "c").mkdir()
    c = write_run(tmp_path / "c" / "c", metrics={2: {"eval_loss": 1.5}}, digest="b" * 64)
    assert compared(a, c)[0].first == (2, "metrics.jsonl", "eval_loss", (1.0, 1.5))


def test_a_run_that_goes_on_is_not_known_to_be_the_same(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", digest=None)
    comparison, text = compared(a, b)
    assert not comparison.same and comparison.digests == (None, None)
    assert text.startswith(f"not known to be the same: no digests in {b}")


def test_equal_parameters_and_another_state(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", digest="b" * 64, params_digest="a" * 64)
    assert "the parameters of" in compared(a, b)[1] and "another part of the state is not" in compared(a, b)[1]


def test_leaves_that_differ_the_worst_first(tmp_path: Path) -> None:
    ours = {"kernel": KERNEL, "bias": np.zeros(3, np.float32), "same": KERNEL, "old": KERNEL, "grown": KERNEL}
    nudged = KERNEL.copy()
    nudged[1, 2] = np.nextafter(nudged[1, 2], np.float32(2))
    nudged[4, 9] -= np.float32(4 * 2**-24)
    theirs = {"kernel": nudged, "bias": np.array([0, -0.0, 0], np.float32), "same": KERNEL, "grown": KERNEL.T}
    a, b = write_run(tmp_path / "a", leaves=ours), write_run(tmp_path / "b", leaves=theirs, digest="b" * 64)
    comparison, text = compared(a, b)
    leaves = {leaf.path: leaf for leaf in comparison.leaves or ()}
    assert list(leaves) == ["grown", "old", "kernel", "bias"]
    kernel = leaves["kernel"]
    assert (kernel.num_differing, kernel.num_elements, kernel.max_ulps) == (2, 50, 4)
    assert kernel.max_abs == 4 * 2**-24
    assert kernel.relative == pytest.approx(math.sqrt(4**2 + 1**2) * 2**-24 / np.linalg.norm(KERNEL), rel=1e-6)
    assert (leaves["bias"].num_differing, leaves["bias"].max_abs, leaves["bias"].max_ulps) == (1, 0.0, 0)
    assert f"leaf old: only in {a}" in text
    assert "leaf grown: float32[5, 10] and float32[10, 5]" in text
    assert "leaf kernel: 2 of 50 elements differ, by 2.38e-07 at most" in text and "at most 4 units" in text


def test_without_the_values_there_are_norms(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a")
    b = write_run(tmp_path / "b", leaves={"kernel": 2 * KERNEL}, digest="b" * 64)
    (b / "final_params.npz").unlink()
    norm = json.loads((a / "leaves.json").read_text())["leaves"]["kernel"]["norm"]
    assert f"leaf kernel: norms {norm!r} and {2 * norm!r}" in compared(a, b)[1]
    (b / "leaves.json").unlink()
    assert compared(a, b)[0].leaves is None and "has no leaves.json" in compared(a, b)[1]


def test_no_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, missing = write_run(tmp_path / "a"), tmp_path / "b"
    for pair in ((a, missing), (missing, a)):
        assert cli.main(["compare", *map(str, pair)]) == 2
        assert f"{missing} is no run directory" in capsys.readouterr().err
