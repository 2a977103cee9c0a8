"""Annotations of the command line's options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from elastic_train.errors import UsageError

RunDir = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]


def shown_as(metavar: str) -> Any:
    """An option that may be left out: its help names the value by `metavar` and no default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


def whole(option: str, metavar: str) -> PrimitiveConstructorSpec[Any]:
    """Has `option` take a whole number. Another text raises UsageError, which is to be caught around `tyro.cli`."""

    def number(texts: list[str]) -> int:
        try:
            return int(texts[0])
        except ValueError:
            raise UsageError(f"{option} {texts[0]}: not a whole number; write digits, as in {option} 4") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=number,
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )
