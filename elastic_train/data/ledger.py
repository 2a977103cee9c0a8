"""Proves from ledger.jsonl that every sample was consumed exactly once per pass, or says where not. Pure.

The proof has three parts. Steps follow each other without a gap, each is there once, and each begins at the position
where the one before ended: so positions 0, 1, 2, … are each consumed once. What a line says about its passes is what
its positions mean: pass `p // pass_size`, place `p % pass_size`. And the order of a pass, computed again from the seed,
is a permutation of all samples.

A change to the ledger that leaves it consistent in itself (another worker, another size of the last step) is found
through the other files, where those mention the step.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from elastic_train.data.sampler import Sampler

MAX_LOOKED_UP = 10_000_000
"""How many sample ids are computed at most. A pass with more samples than that is not looked up."""

MAX_PASSES = 1000
"""How many passes are looked up at most."""

_MAX_NUMBER = 2**63 - 1

_CHUNK = 1 << 18


class Problem(NamedTuple):
    """Something that must not be: `what` was expected to be one thing and found to be another one."""

    line: int  # of ledger.jsonl, from 1; one more than it has if something is missing at its end
    step: int | None
    what: str
    expected: object
    found: object

    def __str__(self) -> str:
        step = "" if self.step is None else f", step {self.step}"
        return f"line {self.line}{step}: {self.what}: expected {self.expected}, found {self.found}"


class Witness(NamedTuple):
    """What metrics.jsonl says about a step."""

    samples: int
    workers: Sequence[int]


@dataclass
class Report:
    """What a ledger shows."""

    num_lines: int = 0
    first_step: int | None = None
    last_step: int | None = None
    first_sample: int = 0
    end_sample: int = 0
    pass_size: int | None = None
    passes_looked_up: list[int] = field(default_factory=list)
    first_problem: Problem | None = None
    num_problems: int = 0
    worst: int = 0  # the most samples left out, or consumed again, at one place
    is_cut: bool = False  # the last line is not complete: the job runs, or its writer was killed

    @property
    def proven(self) -> bool:
        return self.first_problem is None

    @property
    def passes(self) -> range:
        """All that were begun."""
        size = self.pass_size or 0
        if size < 1 or self.end_sample <= self.first_sample:
            return range(0)
        return range(self.first_sample // size, (self.end_sample - 1) // size + 1)

    @property
    def num_complete_passes(self) -> int:
        """Those all of whose samples are in this ledger."""
        size = self.pass_size or 0
        return max(0, self.end_sample // size - -(-self.first_sample // size)) if size > 0 else 0

    def add(self, problem: Problem) -> None:
        self.first_problem = self.first_problem or problem
        self.num_problems += 1


def verify(
    lines: Iterable[str],
    *,
    seed: int | None,
    first_step: int = 1,
    witnesses: Mapping[int, Witness] | None = None,
    end: tuple[int, int] | None = None,
) -> Report:
    """Goes through a ledger once, in constant memory.

    Args:
      lines: of ledger.jsonl, with their line ends. One without a line end was cut off, and is left out.
      seed: of the order of the samples; None if it is not known, which leaves nothing proven.
      first_step: the step that the ledger must begin with. A job that began from a checkpoint has no first one.
      witnesses: by step.
      end: the last step and the samples consumed by then, once the job has ended. A ledger may go on after it: the job
        was resumed.
    """
    report = Report()
    check = _Lines(report, first_step, witnesses or {}, end)
    for number, text in enumerate(lines, start=1):
        if not text.endswith("\n"):
            report.is_cut = True
            break
        report.num_lines += 1
        check.line(number, text)
    check.ended()
    if report.proven:
        _look_up(report, seed)
    return report


def format_report(report: Report) -> str:
    """A short table, without a newline at the end."""
    steps = "none" if report.first_step is None else f"{report.first_step} to {report.last_step}"
    lines = [
        ("steps", f"{steps}, {report.num_lines} lines" + ("; the last line is not complete" if report.is_cut else "")),
        ("samples", f"{report.end_sample - report.first_sample}, from position {report.first_sample}"),
    ]
    if report.pass_size is not None:
        passes = f"{report.num_complete_passes} complete, of {report.pass_size} samples"
        if rest := report.end_sample % report.pass_size if report.pass_size > 0 else 0:
            passes += f"; {rest} samples of pass {report.passes.stop - 1}"
        lines.append(("passes", passes))
    if report.proven:
        looked_up = len(report.passes_looked_up)
        orders = f"{looked_up} of {len(report.passes)} looked up: each is a permutation of all samples"
        if not looked_up:
            orders = f"not looked up: a pass has more than {MAX_LOOKED_UP} samples"
        lines += [("orders", orders), ("worst", "no sample left out, none consumed twice"), ("result", "proven")]
    else:
        others = f" (problems: {report.num_problems}, this is the first)" if report.num_problems > 1 else ""
        worst = f"{report.worst} samples left out, or consumed again, at one place" if report.worst else "see below"
        lines += [("worst", worst), ("result", f"NOT proven. {report.first_problem}{others}")]
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


class _Lines:
    """Where the next line must begin."""

    def __init__(
        self, report: Report, first_step: int, witnesses: Mapping[int, Witness], end: tuple[int, int] | None
    ) -> None:
        self._report, self._witnesses, self._end = report, witnesses, end
        self._step = first_step
        self._sample: int | None = 0 if first_step == 1 else None

    def line(self, number: int, text: str) -> None:
        """Checks one line; a line has one problem at most. The next line is expected to follow this one."""
        report = self._report
        line, problem = _parse(text)
        if line is None:
            report.add(Problem(number, None, *problem))
            self._step += 1  # the line may be the right one, and only damaged
            self._sample = None
            return
        step, first, count = line["step"], line["first_sample"], line["num_samples"]
        if report.pass_size is None:
            report.first_step, report.first_sample, report.pass_size = step, first, line["pass_size"]
        found = self._wrong(line)
        if found is not None:
            report.add(Problem(number, step, *found))
        if self._sample is not None:
            report.worst = max(report.worst, abs(first - self._sample))
        report.last_step, report.end_sample = step, first + count
        self._step, self._sample = step + 1, first + count

    def ended(self) -> None:
        report = self._report
        number = report.num_lines + 1
        if report.last_step is None:
            if not report.num_problems:
                report.add(Problem(number, None, "the number of steps", "at least 1", 0))
        elif self._end is not None and report.last_step < self._end[0]:
            what = "the last step (according to summary.json)"
            report.add(Problem(number, report.last_step + 1, what, self._end[0], report.last_step))

    def _wrong(self, line: Mapping[str, Any]) -> tuple[str, object, object] | None:
        """What is wrong with a line of the right form: a name, what was expected, what was found."""
        step, first, count = line["step"], line["first_sample"], line["num_samples"]
        size = self._report.pass_size or 1
        samples = first + count
        if step != self._step:
            return "step", self._step, step
        if line["pass_size"] != size:
            return "pass_size", size, line["pass_size"]
        if self._sample is not None and first != self._sample:
            return "first_sample", self._sample, first
        if line["pass"] != first // size:
            return "pass", first // size, line["pass"]
        num_passes = (samples - 1) // size - first // size + 1
        crosses = line.get("crosses")
        if num_passes != (len(crosses) if crosses is not None else 1):
            return "number of passes in crosses", num_passes, len(crosses) if crosses is not None else "no crosses"
        if crosses is not None and json.dumps(crosses) != json.dumps(expected := _spans(first, count, size)):
            return "crosses", expected, crosses
        witness = self._witnesses.get(step)
        if witness is not None and samples != witness.samples:
            return "first_sample + num_samples (according to metrics.jsonl)", witness.samples, samples
        if witness is not None and line["workers"] != list(witness.workers):
            return "workers (according to metrics.jsonl)", list(witness.workers), line["workers"]
        if self._end is not None and step == self._end[0] and samples != self._end[1]:
            return "first_sample + num_samples (according to summary.json)", self._end[1], samples
        return None


def _parse(text: str) -> tuple[dict[str, Any] | None, tuple[str, object, object]]:
    """The object of a line, if it has the right form; else what is wrong."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        line = None
    if not isinstance(line, dict):
        return None, ("the line", "a JSON object", repr(text.rstrip("\n")[:80]))
    for name, least in (("step", 1), ("pass", 0), ("first_sample", 0), ("num_samples", 1), ("pass_size", 1)):
        if type(line.get(name)) is not int or not least <= line[name] <= _MAX_NUMBER:
            return None, (name, f"an integer from {least} to 2**63-1", json.dumps(line.get(name)))
    workers = line.get("workers")
    if not isinstance(workers, list) or not workers or not _ascend(workers):
        return None, ("workers", "ascending numbers of slots, at least one", json.dumps(workers))
    crosses = line.get("crosses")
    if "crosses" in line and not (isinstance(crosses, list) and len(crosses) > 1):
        return None, ("crosses", "absent, or a list of at least two parts", json.dumps(crosses))
    return line, ("", "", "")


def _ascend(numbers: Sequence[Any]) -> bool:
    are_slots = all(type(number) is int and number >= 0 for number in numbers)
    return are_slots and all(a < b for a, b in itertools.pairwise(numbers))


def _spans(first: int, count: int, size: int) -> list[list[int]]:
    """[pass, first place in it, number] of each part; the lines write it down, and this says it anew."""
    edges = [first, *range((first // size + 1) * size, first + count, size), first + count]
    return [[start // size, start % size, stop - start] for start, stop in itertools.pairwise(edges)]


def _look_up(report: Report, seed: int | None) -> None:
    """Computes the order of the passes again: of all, or as many as the limits allow, evenly chosen."""
    if seed is None or not 0 <= seed < 2**64:
        report.add(Problem(1, report.first_step, "the seed in config.toml", "a number from 0 to 2**64-1", seed))
        return
    size, passes = report.pass_size or 1, report.passes
    number = min(len(passes), MAX_PASSES, MAX_LOOKED_UP // size)
    for place in np.unique(np.linspace(0, len(passes) - 1, number).astype(np.int64)):
        index = passes[int(place)]
        if not _is_permutation(Sampler(size, 1, 1, seed), index):
            what = f"the order of pass {index}"
            report.add(Problem(1, report.first_step, what, "each sample once", "some twice, some not at all"))
            return
        report.passes_looked_up.append(index)


def _is_permutation(sampler: Sampler, index: int) -> bool:
    """As many ids as samples, all in range: if each sample is among them, each is so once."""
    size = sampler.num_samples
    is_seen = np.zeros(size, bool)
    for start in range(0, size, _CHUNK):
        ids = sampler.sample_ids(index * size + start, min(_CHUNK, size - start))
        if ids.min() < 0 or ids.max() >= size:
            return False
        is_seen[ids] = True
    return bool(is_seen.all())
