"""The mathematics does not notice: thousands of schedules of changing members, retries and pass boundaries.

No processes: the same pure parts that the workers use, driven by made-up groups.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.data.ledger import verify
from elastic_train.data.sampler import Sampler
from elastic_train.step.plan import Node, finish, fold, partials, run_of
from tests.property.examples import examples
from tests.property.plans import evaluate

SIZE = 5
"""Length of a made-up gradient."""


@dataclass(frozen=True)
class Attempt:
    """One try at a step: by so many members, and whether it committed."""

    members: int
    commits: bool


@st.composite
def runs(draw: st.DrawFn) -> tuple[Sampler, list[Attempt]]:
    """A sampler, and a schedule of attempts with any number of members up to the number of shards."""
    num_shards = draw(st.integers(1, 9))
    sampler = Sampler(
        num_samples=draw(st.integers(1, 60)),
        batch_size=draw(st.integers(num_shards, 3 * num_shards)),
        num_shards=num_shards,
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    attempt = st.builds(Attempt, st.integers(1, num_shards), st.sampled_from([True, True, False]))
    return sampler, draw(st.lists(attempt, min_size=1, max_size=15))


def gradient(sampler: Sampler, first_sample: int, shard: int) -> np.ndarray:
    """float32[SIZE], a sum over a shard's samples whose size varies enough for the order of additions to matter."""
    ids, weight = sampler.shard_ids(first_sample, shard)
    values = np.sin((ids[:, None] + 1.0) * np.arange(1, SIZE + 1)) * 10.0 ** (ids[:, None] % 9 - 4)
    return (values * weight[:, None]).sum(axis=0).astype(np.float32)


def total(sampler: Sampler, first_sample: int, members: int) -> np.ndarray:
    """A step's sum as `members` members compute it: each its partials, padding of NaN, then the exchange's plan."""
    plan = finish(sampler.num_shards, members)
    table = np.full((members, plan.slots_per_member, SIZE), np.nan, np.float32)
    for rank in range(members):
        run = run_of(sampler.num_shards, members, rank)
        for index, node in enumerate(partials(run.start, run.stop, sampler.num_shards)):
            table[rank, index] = fold(node, lambda shard: gradient(sampler, first_sample, shard), np.add)
    return evaluate(plan, table)


def train(sampler: Sampler, attempts: list[Attempt]) -> tuple[bytes, list[str]]:
    """The weights after a run, and its ledger."""
    weights, samples, lines = np.zeros(SIZE, np.float32), 0, []
    for attempt in attempts:
        summed = total(sampler, samples, attempt.members)
        if not attempt.commits:
            continue  # nothing was changed, so nothing is to be undone
        weights = weights - np.float32(0.1) * summed / np.float32(sampler.batch_size)
        lines.append(ledger_line(sampler, len(lines) + 1, samples, attempt.members))
        samples += sampler.batch_size
    return weights.tobytes(), lines


def ledger_line(sampler: Sampler, step: int, first_sample: int, members: int) -> str:
    spans = [list(span) for span in sampler.spans(first_sample)]
    line = {"step": step, "pass": spans[0][0], "first_sample": first_sample, "num_samples": sampler.batch_size}
    line |= {"workers": list(range(members)), "pass_size": sampler.num_samples}
    if len(spans) > 1:
        line["crosses"] = spans
    return json.dumps(line) + "\n"


def without_workers(lines: list[str]) -> Iterator[dict]:
    for text in lines:
        line = json.loads(text)
        del line["workers"]
        yield line


@examples(2500)
@given(runs())
def test_a_disturbed_run_equals_that_of_one_undisturbed_member(run: tuple[Sampler, list[Attempt]]) -> None:
    sampler, attempts = run
    weights, lines = train(sampler, attempts)
    alone = [Attempt(1, True) for attempt in attempts if attempt.commits]
    undisturbed, ledger = train(sampler, alone)
    assert weights == undisturbed
    assert list(without_workers(lines)) == list(without_workers(ledger))
    if lines:
        report = verify(lines, seed=sampler.seed)
        assert report.proven, report


def test_the_order_of_additions_would_be_noticed() -> None:
    """The made-up gradients are no accident of exact sums: another tree gives other bits."""
    sampler = Sampler(60, 24, 8, seed=3)
    shards = [gradient(sampler, 0, shard) for shard in range(8)]
    one_by_one = shards[0]
    for value in shards[1:]:
        one_by_one = one_by_one + value
    assert fold(Node(0, 8), shards.__getitem__, np.add).tobytes() != one_by_one.tobytes()
