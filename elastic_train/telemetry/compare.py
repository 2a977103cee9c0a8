"""Whether two runs are the same computation: equal digests, or where they part. Pure on loaded files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from elastic_train.telemetry.json_files import read_lines
from elastic_train.telemetry.leaves import read_array, read_leaves
from elastic_train.telemetry.run_files import read_config, read_summary, require_run_directory

ABSENT = "absent"

SUMMARY = {"step": int, "params_sha256?": (str, None), "state_sha256?": (str, None)}
"""What is read of a run's end, as `kinds` has it."""

STEP = {"step": int}
"""What each line of ledger.jsonl and metrics.jsonl must have. Whatever else is there is compared as it is."""

MAX_SHOWN = 10
"""How many leaves are printed."""

# Of a step's lines: what may differ between two runs of the same computation.
_CIRCUMSTANCES = frozenset({"step", "time", "step_time_s", "epoch", "workers", "phases"})
# Settings that decide how a run is watched and kept alive, never what it computes.
_HARMLESS = ("log_every", "eval_every", "faults.", "checkpoint.")
# Of those, the ones that decide what becomes of a step that is not finite, and of states that differ.
_NUMERIC = frozenset({"faults.nonfinite", "faults.max_skipped_steps", "faults.undecided"})


@dataclass(frozen=True)
class Run:
    """What a run directory holds.

    Attributes:
      name: how the run is called in what is printed.
      summary, config: empty if it is not there; keys of nested settings are dotted.
      ledger, metrics: lines in the order of their steps.
      leaves: content of leaves.json, None if it is not there.
      array: gives the final values of a leaf, None if they were not kept.
    """

    name: str
    summary: Mapping[str, Any]
    config: Mapping[str, Any]
    ledger: Sequence[Mapping[str, Any]]
    metrics: Sequence[Mapping[str, Any]]
    leaves: Mapping[str, Any] | None
    array: Callable[[str], np.ndarray | None]


class Difference(NamedTuple):
    """The first place at which the steps differ."""

    step: int
    file: str
    field: str
    values: tuple[object, object]


class LeafDifference(NamedTuple):
    """A leaf that is not the same in both runs. Numbers are None if the values themselves were not kept."""

    path: str
    what: str  # how its description differs
    max_abs: float | None = None
    relative: float | None = None  # L2 norm of the difference, over the first run's
    num_differing: int | None = None
    num_elements: int | None = None
    max_ulps: int | None = None  # float32 only: how many representable numbers lie between the two


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common.

    Attributes:
      same: the digests of parameters and state are there, and equal.
      digests: for parameters and state: whether they are equal; None if a run has none.
      first: where the steps of both runs differ first.
      num_common: steps that both ledgers have.
      settings: key and both values of each setting that differs.
      leaves: those that differ, the worst first; None if a run has no description of them.
      leaf_steps: the steps whose parameters were described.
    """

    same: bool
    digests: tuple[bool | None, bool | None]
    first: Difference | None
    num_common: int
    settings: list[tuple[str, object, object]]
    leaves: list[LeafDifference] | None
    leaf_steps: tuple[object, object]


def read_run(run_dir: Path) -> Run:
    """Raises UsageError if `run_dir` is no run directory, or a file of it cannot be read."""
    require_run_directory(run_dir)
    leaves = read_leaves(run_dir)

    def array(path: str) -> np.ndarray | None:
        return read_array(run_dir, path, leaves["leaves"][path]) if leaves is not None else None

    return Run(
        name=str(run_dir),
        summary=read_summary(run_dir, SUMMARY),
        config=read_config(run_dir),
        ledger=read_lines(run_dir / "ledger.jsonl", lambda line: STEP),
        metrics=read_lines(run_dir / "metrics.jsonl", lambda line: STEP),
        leaves=leaves,
        array=array,
    )


def compare(a: Run, b: Run) -> Comparison:
    """Compares two runs: digests, steps, settings and leaves."""
    digests = _equal_digests(a, b, "params_sha256"), _equal_digests(a, b, "state_sha256")
    keys = sorted({*a.config, *b.config})
    settings = [(key, a.config.get(key, ABSENT), b.config.get(key, ABSENT)) for key in keys]
    steps = {line["step"] for line in a.ledger} & {line["step"] for line in b.ledger}
    return Comparison(
        same=digests == (True, True),
        digests=digests,
        first=_first_difference(a, b),
        num_common=len(steps),
        settings=[(key, one, other) for key, one, other in settings if not _is_same(one, other)],
        leaves=_leaves(a, b),
        leaf_steps=((a.leaves or {}).get("step"), (b.leaves or {}).get("step")),
    )


def _equal_digests(a: Run, b: Run, name: str) -> bool | None:
    one, other = a.summary.get(name), b.summary.get(name)
    return one == other if one and other else None


def _is_same(one: object, other: object) -> bool:
    """Numbers are the same if their bits are: 0.0 and -0.0 are not."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other and (one != 0 or math.copysign(1, one) == math.copysign(1, other))
    return one == other


def _first_difference(a: Run, b: Run) -> Difference | None:
    files = (
        ("ledger.jsonl", _by_step(a.ledger), _by_step(b.ledger), True),
        ("metrics.jsonl", _by_step(a.metrics), _by_step(b.metrics), False),
    )
    found = [_first_in(*file) for file in files]
    # At one step the ledger comes first: other samples explain another loss.
    return min((each for each in found if each is not None), key=lambda each: each.step, default=None)


def _by_step(lines: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    return {line["step"]: line for line in lines}


def _first_in(
    file: str, a: Mapping[int, Mapping[str, Any]], b: Mapping[int, Mapping[str, Any]], is_complete: bool
) -> Difference | None:
    """The first difference in one file. One that is complete has every step that it covers; in others, steps that
    only one run has logged are left out."""
    common_end = min(max(a, default=0), max(b, default=0))
    for step in sorted({*a, *b} if is_complete else {*a} & {*b}):
        if step > common_end:
            break
        if step not in a or step not in b:
            there = ("there", ABSENT) if step in a else (ABSENT, "there")
            return Difference(step, file, "the line", there)
        for field in dict.fromkeys((*a[step], *b[step])):
            one, other = a[step].get(field, ABSENT), b[step].get(field, ABSENT)
            # One run may have been evaluated at steps at which the other was not.
            is_left_out = field in _CIRCUMSTANCES or (field.startswith("eval_") and ABSENT in (one, other))
            if not is_left_out and not _is_same(one, other):
                return Difference(step, file, field, (one, other))
    return None


def _leaves(a: Run, b: Run) -> list[LeafDifference] | None:
    if a.leaves is None or b.leaves is None:
        return None
    ours, theirs = a.leaves["leaves"], b.leaves["leaves"]
    found = []
    for path in sorted({*ours, *theirs}):
        if path not in ours or path not in theirs:
            found.append(LeafDifference(path, f"only in {(a if path in ours else b).name}"))
        elif any(ours[path][name] != theirs[path][name] for name in ("dtype", "shape")):
            shapes = (f"{each[path]['dtype']}{each[path]['shape']}" for each in (ours, theirs))
            found.append(LeafDifference(path, " and ".join(shapes)))
        elif ours[path]["sha256"] != theirs[path]["sha256"]:
            norms = f"norms {ours[path]['norm']!r} and {theirs[path]['norm']!r}"
            found.append(_with_numbers(LeafDifference(path, norms), a.array(path), b.array(path)))
    return sorted(found, key=_badness, reverse=True)


def _badness(leaf: LeafDifference) -> float:
    return math.inf if leaf.relative is None or math.isnan(leaf.relative) else leaf.relative


def _with_numbers(leaf: LeafDifference, a: np.ndarray | None, b: np.ndarray | None) -> LeafDifference:
    """By how much two arrays of one dtype and shape differ, if both are there."""
    if a is None or b is None:
        return leaf
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    with np.errstate(invalid="ignore"):  # the difference of two infinities
        difference = np.abs(a.astype(wide) - b.astype(wide))
    norm, distance = float(np.linalg.norm(a.astype(wide))), float(np.linalg.norm(difference))
    bits = [np.ascontiguousarray(each).reshape(-1).view(np.uint8).reshape(each.size, -1) for each in (a, b)]
    return leaf._replace(
        max_abs=float(difference.max()),
        relative=distance / norm if norm else math.inf if distance else 0.0,
        num_differing=int((bits[0] != bits[1]).any(axis=1).sum()),
        num_elements=a.size,
        max_ulps=_ulps(a, b),
    )


def _ulps(a: np.ndarray, b: np.ndarray) -> int | None:
    if a.dtype != np.float32:
        return None
    # As integers the bits of positive floats ascend like the floats; those of negative ones descend.
    places = [np.ascontiguousarray(each).view(np.int32).astype(np.int64) for each in (a, b)]
    one, other = (np.where(place < 0, -(place & 0x7FFFFFFF), place) for place in places)
    return int(np.abs(one - other).max())


def format_comparison(comparison: Comparison, a: Run, b: Run) -> str:
    """In words, without a newline at the end."""
    lines = [_verdict(comparison, a, b)]
    if comparison.first is not None:
        step, file, field, (one, other) = comparison.first
        lines.append(f"first difference: step {step}, {field} in {file}: {one!r} and {other!r}")
    elif not comparison.same:
        lines.append(f"no difference in the ledger and the logged metrics of {comparison.num_common} common steps")
    lines += _settings(comparison)
    if not comparison.same:
        lines += _shown_leaves(comparison)
    return "\n".join(lines)


def _verdict(comparison: Comparison, a: Run, b: Run) -> str:
    names = f"{a.name} and {b.name}"
    if comparison.same:
        step, params, state = (a.summary[name] for name in ("step", "params_sha256", "state_sha256"))
        return f"same: {names} have equal digests after step {step} (parameters {params[:12]}, state {state[:12]})"
    if None in comparison.digests:
        without = " and ".join(run.name for run in (a, b) if not run.summary.get("state_sha256"))
        return f"not known to be the same: no digests in {without}, which has not reached its end"
    steps = [run.summary.get("step") for run in (a, b)]
    if steps[0] != steps[1]:
        return f"different: {names} ended after different steps, {steps[0]} and {steps[1]}"
    if comparison.digests[0]:
        return f"different: the parameters of {names} are equal, another part of the state is not"
    return f"different: {names} have different parameters after step {steps[0]}"


def _settings(comparison: Comparison) -> list[str]:
    lines = []
    for key, one, other in comparison.settings:
        if comparison.same:
            remark = "it made no difference"
        elif key.startswith(_HARMLESS) and key not in _NUMERIC:
            remark = "it cannot matter"
        else:
            remark = "it may be why"
        lines.append(f"setting {key}: {one!r} and {other!r}; {remark}")
    return lines


def _shown_leaves(comparison: Comparison) -> list[str]:
    if comparison.leaves is None:
        return ["a run has no leaves.json, so it is not known which parameters differ"]
    lines = []
    if comparison.leaf_steps[0] != comparison.leaf_steps[1]:
        lines.append(f"parameters after steps {comparison.leaf_steps[0]} and {comparison.leaf_steps[1]}:")
    lines += [_leaf(leaf) for leaf in comparison.leaves[:MAX_SHOWN]]
    if len(comparison.leaves) > MAX_SHOWN:
        lines.append(f"and {len(comparison.leaves) - MAX_SHOWN} more leaves that differ by less")
    return lines


def _leaf(leaf: LeafDifference) -> str:
    if leaf.max_abs is None:
        return f"leaf {leaf.path}: {leaf.what}"
    ulps = "" if leaf.max_ulps is None else f", at most {leaf.max_ulps} units in the last place"
    return (
        f"leaf {leaf.path}: {leaf.num_differing} of {leaf.num_elements} elements differ, by {leaf.max_abs:.3g} "
        f"at most, {leaf.relative:.3g} in relative L2 norm{ulps}"
    )
