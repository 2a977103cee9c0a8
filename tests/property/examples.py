"""How many examples the tests try that are slow because they try thousands.

By default a quarter. With `ALL_EXAMPLES=1` all of them; `.ci/run` does that in one of its cells. Examples are the same
every time.
"""

from __future__ import annotations

import os

from hypothesis import settings

SHARE = 1 if os.environ.get("ALL_EXAMPLES") == "1" else 4


def examples(number: int) -> settings:
    """The settings of a test with `number` examples in all."""
    return settings(derandomize=True, deadline=None, max_examples=number // SHARE)
