"""The table in docs/guarantees.md names tests that exist; every row has one, or says that it promises nothing yet."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = re.compile(r"^\| (\d+) \| .* \| (.*) \| (.*) \|$", re.MULTILINE)


def test_every_row_of_the_catalogue_has_a_test() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text()
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_row_\w+)", path.read_text())
    }
    rows = {
        int(number): (promise, re.findall(r"`(test_row_\w+)`", tests)) for number, promise, tests in TABLE.findall(text)
    }
    assert list(rows) == list(range(1, 26))
    for number, (promise, tests) in rows.items():
        assert all(name in defined and name.startswith(f"test_row_{number:02d}_") for name in tests), (number, tests)
        assert bool(tests) != promise.startswith("nothing yet"), number
