"""One setting's value: from TOML or command-line text to the type its field is annotated with, and back."""

from __future__ import annotations

import json
import tomllib
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

NONE = "none"
"""How None is written. TOML has no null, so an optional text cannot hold this word."""


class MismatchError(Exception):
    """A value does not fit an annotation. The caller knows the field's name and makes a ConfigError of it."""


def read(annotation: Any, value: object, is_text: bool) -> Any:
    """Turns `value` into the annotated type.

    Args:
      annotation: int, float, bool, str, an Enum, a Literal, a tuple of those, or a union of those with None.
      value: what TOML gave, or a text from the command line.
      is_text: `value` comes from the command line: numbers, true/false and lists are still to be parsed.

    Raises:
      MismatchError: the value is of another type.
      TypeError: no setting can have this annotation; an error in the config class, not in the value.
    """
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return _read_union(get_args(annotation), value, is_text)
    if origin is Literal:
        return _read_literal(get_args(annotation), value, is_text)
    if origin is tuple:
        return _read_tuple(get_args(annotation), value, is_text)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _read_enum(annotation, value)
    if annotation in _SCALARS:
        return _read_scalar(annotation, value, is_text)
    raise TypeError(
        f"a setting cannot be annotated with {annotation!r}; use int, float, bool, str, an Enum, a Literal, "
        "a tuple of those, an optional of those, or a nested dataclass"
    )


def write(annotation: Any, value: object) -> str:
    """`value` as a TOML value that `read` with the same annotation turns back into it.

    Raises:
      MismatchError: no TOML text stands for `value`.
    """
    arms = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    if value is None:
        return _quote(NONE)
    if isinstance(value, str | Enum):
        text = _enum_text(value) if isinstance(value, Enum) else value
        if text == NONE and NoneType in arms:
            raise MismatchError
        return _quote(text)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) or (isinstance(value, int) and annotation is float):
        return repr(float(value))
    if isinstance(value, int):
        return repr(value)
    if isinstance(value, tuple):
        arguments = next((get_args(arm) for arm in arms if get_origin(arm) is tuple), ())
        if arguments[-1:] == (...,):
            arguments = arguments[:1] * len(value)
        return "[" + ", ".join(write(a, item) for a, item in zip(arguments, value, strict=True)) + "]"
    raise MismatchError


def describe(annotation: Any) -> str:
    """What a value must be, in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " or ".join(_quote(NONE) if arm is NoneType else describe(arm) for arm in arguments)
    if origin is Literal:
        named = [str(choice) for choice in arguments if choice != ""]
        return ("one of " if len(named) > 1 else "") + ", ".join(named) + (", or empty" if "" in arguments else "")
    if origin is tuple and arguments[-1] is ...:
        return f"a list, each item {describe(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}: " + ", ".join(describe(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return "one of " + ", ".join(_enum_text(member) for member in annotation)
    return _SCALARS[annotation][0] if annotation in _SCALARS else str(annotation)


def example(annotation: Any) -> str:
    """A value that fits, as TOML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return example(next(arm for arm in arguments if arm is not NoneType))
    if origin is Literal:
        return write(annotation, next((choice for choice in arguments if choice != ""), arguments[0]))
    if origin is tuple and arguments[-1] is ...:
        return f"[{example(arguments[0])}, {example(arguments[0])}]"
    if origin is tuple:
        return "[" + ", ".join(example(argument) for argument in arguments) + "]"
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return write(annotation, next(iter(annotation)))
    return _SCALARS[annotation][1]


_SCALARS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "10"),
    float: ("a number", "0.5"),
    bool: ("true or false", "true"),
    str: ("text", '"text"'),
}


def _read_scalar(annotation: Any, value: Any, is_text: bool) -> Any:
    if annotation is str and isinstance(value, str):
        return value
    if annotation is bool and is_text and value in ("true", "false"):
        return value == "true"
    if annotation is bool and isinstance(value, bool):
        return value
    if annotation is int and type(value) is int:
        return value
    try:
        if annotation is float and type(value) in (int, float):
            return float(value)
        if annotation in (int, float) and is_text:
            return annotation(value)
    except (ValueError, OverflowError) as error:
        raise MismatchError from error
    raise MismatchError


def _read_union(arms: tuple[Any, ...], value: object, is_text: bool) -> Any:
    if NoneType in arms and (value is None or value == NONE):
        return None
    for arm in arms:
        if arm is not NoneType:
            try:
                return read(arm, value, is_text)
            except MismatchError:
                continue  # the next arm may fit; the error below names them all
    raise MismatchError


def _read_literal(choices: tuple[Any, ...], value: object, is_text: bool) -> Any:
    for choice in choices:
        text = str(choice).lower() if isinstance(choice, bool) else str(choice)
        if (is_text and value == text) or (type(value) is type(choice) and value == choice):
            return choice
    raise MismatchError


def _read_enum(annotation: type[Enum], value: object) -> Enum:
    for member in annotation:
        if value is member or value == _enum_text(member):
            return member
    raise MismatchError


def _enum_text(member: Enum) -> str:
    return str(member.value) if isinstance(member.value, str) else member.name


def _read_tuple(arguments: tuple[Any, ...], value: object, is_text: bool) -> tuple[Any, ...]:
    if is_text and isinstance(value, str):
        if value.lstrip().startswith("["):
            try:
                value, is_text = tomllib.loads(f"value = {value}")["value"], False
            except tomllib.TOMLDecodeError as error:
                raise MismatchError from error
        else:
            value = [item.strip() for item in value.split(",")] if value.strip() else []
    if not isinstance(value, list | tuple):
        raise MismatchError
    if arguments[-1] is ...:
        arguments = (arguments[0],) * len(value)
    if arguments == ((),):  # tuple[()]
        arguments = ()
    if len(arguments) != len(value):
        raise MismatchError
    return tuple(read(argument, item, is_text) for argument, item in zip(arguments, value, strict=True))


def _quote(text: str) -> str:
    # JSON's escapes are a subset of TOML's, except that TOML also forbids a bare DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
