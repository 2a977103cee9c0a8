"""Whatever is changed in a valid ledger, the verifier finds it."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_train.data.ledger import Report, Witness, verify
from elastic_train.data.sampler import Sampler
from tests.property.examples import examples

property_test = examples(300)
Lines = list[dict[str, Any]]


@st.composite
def ledgers(draw: st.DrawFn) -> Lines:
    """Of at least two steps, whose sizes differ, and which may cross several passes at once."""
    pass_size = draw(st.integers(1, 60))
    position, lines = 0, []
    for step, size in enumerate(draw(st.lists(st.integers(1, 3 * pass_size), min_size=2, max_size=10)), start=1):
        spans = [list(span) for span in Sampler(pass_size, size, 1, 0).spans(position)]
        line = {"step": step, "pass": spans[0][0], "first_sample": position, "num_samples": size}
        line |= {"pass_size": pass_size, "workers": sorted(draw(st.sets(st.integers(0, 4), min_size=1)))}
        lines.append(line | ({"crosses": spans} if len(spans) > 1 else {}))
        position += size
    return lines


def samples(line: dict[str, Any]) -> int:
    return line["first_sample"] + line["num_samples"]


def verified(lines: Lines, original: Lines | None = None) -> Report:
    """With what metrics.jsonl and summary.json say of the original, if one is given."""
    texts = [json.dumps(line) + "\n" for line in lines]
    if original is None:
        return verify(texts, seed=3)
    witnesses = {line["step"]: Witness(samples(line), line["workers"]) for line in original}
    return verify(texts, seed=3, witnesses=witnesses, end=(original[-1]["step"], samples(original[-1])))


@given(ledgers())
@property_test
def test_a_valid_ledger_is_proven(lines: Lines) -> None:
    for report in (verified(lines), verified(lines, lines)):
        assert report.proven and report.worst == 0, report.first_problem
        assert (report.first_step, report.last_step, report.end_sample) == (1, len(lines), samples(lines[-1]))
        assert report.num_complete_passes == report.end_sample // lines[0]["pass_size"]
        assert report.passes_looked_up == list(report.passes)


@given(ledgers(), st.data())
@property_test
def test_a_line_left_out_is_found(lines: Lines, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(lines) - 1))
    problem = verified(lines[:place] + lines[place + 1 :], lines).first_problem
    assert problem is not None and problem.line == place + 1
    assert problem.what.startswith(("step", "the last step"))
    if place < len(lines) - 1:
        assert (problem.expected, problem.found) == (place + 1, place + 2)
        alone = verified(lines[:place] + lines[place + 1 :])  # nothing else is known of the run
        assert not alone.proven and alone.worst == lines[place]["num_samples"]


@given(ledgers(), st.data())
@property_test
def test_a_line_that_is_there_twice_is_found(lines: Lines, data: st.DataObject) -> None:
    place, to = data.draw(st.integers(0, len(lines) - 1)), data.draw(st.integers(0, len(lines)))
    changed = [*lines[:to], lines[place], *lines[to:]]
    assert not verified(changed).proven
    problem = verified(changed).first_problem
    assert problem is not None and problem.what == "step"
    assert problem.line == (to + 1 if to != place else to + 2)


@given(ledgers(), st.data())
@property_test
def test_lines_that_changed_places_are_found(lines: Lines, data: st.DataObject) -> None:
    place, other = data.draw(st.lists(st.integers(0, len(lines) - 1), min_size=2, max_size=2, unique=True))
    changed = list(lines)
    changed[place], changed[other] = changed[other], changed[place]
    report = verified(changed)
    assert report.first_problem is not None
    assert (report.first_problem.line, report.first_problem.what) == (min(place, other) + 1, "step")


values = st.one_of(
    st.integers(-3, 200),
    st.integers(),
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.text(max_size=3),
    st.lists(st.integers(-1, 5), max_size=4),
    st.lists(st.lists(st.integers(0, 60), min_size=3, max_size=3), max_size=4),
    st.just("left out"),
)


def changed_field(lines: Lines, place: int, name: str, value: object) -> Lines:
    changed = copy.deepcopy(lines)
    if value == "left out":
        changed[place].pop(name, None)
    else:
        changed[place][name] = value
    return changed


@given(ledgers(), st.data())
@property_test
def test_a_changed_field_is_found(lines: Lines, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(lines) - 1))
    name = data.draw(st.sampled_from([*lines[place], "crosses"]))
    before = lines[place].get(name)
    near = st.nothing() if type(before) is not int else st.sampled_from([before - 1, before + 1, -before - 1])
    changed = changed_field(lines, place, name, data.draw(values | near))
    if json.dumps(changed) == json.dumps(lines):
        return
    report = verified(changed, lines)
    assert report.first_problem is not None
    # The line itself or, where it is only odd beside the others, the next one.
    assert report.first_problem.line in (place + 1, place + 2)
    if name not in ("workers", "num_samples"):
        assert not verified(changed).proven  # even if nothing else is known of the run


@given(ledgers(), st.data())
@property_test
def test_a_changed_character_is_found(lines: Lines, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(lines) - 1))
    texts = [json.dumps(line) + "\n" for line in lines]
    at = data.draw(st.integers(0, len(texts[place]) - 2))
    character = data.draw(st.sampled_from('0123456789{}[]",: -x\N{BLACK STAR}'))
    texts[place] = texts[place][:at] + character + texts[place][at + 1 :]
    try:
        if json.dumps(json.loads(texts[place])) == json.dumps(lines[place]):
            return
    except ValueError:
        pass
    witnesses = {line["step"]: Witness(samples(line), line["workers"]) for line in lines}
    assert not verify(texts, seed=3, witnesses=witnesses, end=(len(lines), samples(lines[-1]))).proven


@given(ledgers(), st.data())
@property_test
def test_a_ledger_that_is_still_written_is_proven_as_far_as_it_goes(lines: Lines, data: st.DataObject) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    first_line = text.index("\n") + 1
    report = verify(text[: data.draw(st.integers(first_line, len(text)))].splitlines(keepends=True), seed=3)
    assert report.proven and report.num_lines >= 1


@given(ledgers(), st.data())
@property_test
def test_a_job_that_began_from_a_checkpoint(lines: Lines, data: st.DataObject) -> None:
    begin = data.draw(st.integers(1, len(lines) - 1))
    texts = [json.dumps(line) + "\n" for line in lines[begin:]]
    report = verify(texts, seed=3, first_step=begin + 1)
    assert report.proven and report.first_step == begin + 1
    first, size = lines[begin]["first_sample"], lines[0]["pass_size"]
    assert report.num_complete_passes == max(0, samples(lines[-1]) // size - -(-first // size))
    assert not verify(texts, seed=3).proven
