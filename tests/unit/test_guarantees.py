"""The table in docs/guarantees.md names tests that exist and are for that row, and says which the default run has."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = re.compile(r"^\| (\d+) \| .* \| (.*) \| (.*) \|$", re.MULTILINE)
NAME = r"test_rows?_((?:\d\d_)+)\w+"
NAMED = re.compile(rf"`({NAME})`( \((?:soak|gpu))?")
DEFINED = re.compile(rf"((?:^@.*\n(?:^[ )\]].*\n)*)*)^def ({NAME})\(", re.MULTILINE)
NEVER_BY_DEFAULT = {25}


def defined() -> dict[str, bool]:
    """The tests for rows, and whether the default run has any of them by that name."""
    found: dict[str, bool] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        for decorators, name, _ in DEFINED.findall(text):
            is_left_out = path.parent.name == "gpu" or "@pytest.mark.soak\n" in decorators
            found[name] = found.get(name, False) or not is_left_out
    return found


def test_every_row_of_the_catalogue_has_a_test() -> None:
    tests, rows = defined(), {}
    for row, promise, text in TABLE.findall((ROOT / "docs" / "guarantees.md").read_text()):
        rows[int(row)] = promise, NAMED.findall(text)
    assert list(rows) == list(range(1, 26))
    for row, (promise, named) in rows.items():
        assert bool(named) != promise.startswith("nothing yet"), row
        for name, of_rows, left_out in named:
            assert f"{row:02d}" in of_rows.split("_"), (row, name)
            assert name in tests, (row, name)
            assert tests[name] == (not left_out), (row, name)
        assert any(not left_out for _, _, left_out in named) == (row not in NEVER_BY_DEFAULT), row
