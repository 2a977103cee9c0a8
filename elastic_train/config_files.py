"""From a config class, a TOML file and the command line to one config, and back to TOML."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from elastic_train import config_values
from elastic_train.config import Config, ConfigError

ConfigType = TypeVar("ConfigType", bound=Config)


class Setting(NamedTuple):
    """One value that somebody set, and where."""

    value: object
    is_text: bool
    source: str


def resolve(
    config_class: type[ConfigType],
    file: Path | None = None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, object] | None = None,
) -> ConfigType:
    """The config of a run. Later sources win: the class's defaults, `file`, `overrides`, `flags`.

    The result is built once, from all sources together, so that settings that depend on each other may come
    from different ones.

    Args:
      config_class: the recipe's config; also a field's nested dataclass is filled.
      file: a TOML file.
      overrides: texts `key=value`; dots reach into nested dataclasses (`faults.keepalive_s=2`). A tuple is
        written `64,32` or as a TOML array, None as `none`.
      flags: typed values of command-line options of their own, by key; None means that it was not given.

    Raises:
      ConfigError: a file that is missing or no TOML, all unknown keys, all wrong types, or a value out of range.
    """
    known = dict(_keys(config_class))
    given = (*_from_file(file), *_from_overrides(overrides), *_from_flags(flags or {}))
    if unknown := {key: setting.source for key, setting in given if key not in known}:
        raise ConfigError(_unknown(config_class, unknown, known))
    settings: dict[str, Setting] = {}
    for key, setting in given:
        for earlier in [other for other in settings if f"{other}.".startswith(f"{key}.")]:
            if setting.value != {}:
                del settings[earlier]
        for parent in [other for other in settings if key.startswith(f"{other}.")]:
            del settings[parent]
        settings[key] = setting
    return _build(config_class, None, "", settings)


def to_toml(config: Config) -> str:
    """`config` as TOML: `resolve(type(config), file)` gives an equal config back."""
    return "\n".join(_lines(config, "")) + "\n"


def to_values(config: Config) -> dict[str, object]:
    """Every setting by its dotted key, as TOML has it."""
    return {key: setting.value for key, setting in _flatten(tomllib.loads(to_toml(config)), "", "")}


def config_digest(config: Config) -> str:
    """SHA-256, in hexadecimal, over the class's qualified name and every value: equal on all workers.

    The module is left out: the same recipe is `__main__` when run as a script.
    """
    return hashlib.sha256(f"{type(config).__qualname__}\n{to_toml(config)}".encode()).hexdigest()


class _Field(NamedTuple):
    name: str
    annotation: Any
    nested: type | None  # the dataclass it holds, if it is a group of settings
    default: Any  # MISSING if there is none


def _fields(config_class: type) -> Iterator[_Field]:
    annotations = get_type_hints(config_class)
    for field in dataclasses.fields(config_class):
        if not field.init:
            continue
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        annotation = annotations[field.name]
        arms = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        nested = next((arm for arm in arms if isinstance(arm, type) and dataclasses.is_dataclass(arm)), None)
        if nested and isinstance(default, nested):
            nested = type(default)
        yield _Field(field.name, annotation, nested, default)


def _keys(config_class: type, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every key that may be set, and whether it is a group."""
    for field in _fields(config_class):
        yield prefix + field.name, field.nested is not None
        if field.nested:
            yield from _keys(field.nested, f"{prefix}{field.name}.")


def _build(config_class: type, base: Any, prefix: str, settings: Mapping[str, Setting]) -> Any:
    values, wrong = {}, []
    for field in _fields(config_class):
        key = prefix + field.name
        setting = settings.get(key)
        is_opened = any(other.startswith(f"{key}.") for other in settings)
        try:
            if field.nested and (is_opened or (setting and setting.value == {})):
                before = field.default if base is None else getattr(base, field.name)
                before = before if isinstance(before, field.nested) else None
                values[field.name] = _build(field.nested, before, f"{key}.", settings)
            elif setting:
                values[field.name] = _value(field, key, setting)
            elif base is None and field.default is dataclasses.MISSING:
                raise ConfigError(f"{key}: has no default; set it in the config file or with --set {key}=...")
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return config_class(**values) if base is None else dataclasses.replace(base, **values)


def _value(field: _Field, key: str, setting: Setting) -> Any:
    shown = f"{key} = {setting.value!r} ({setting.source})"
    if field.nested:
        if setting.value == config_values.NONE and NoneType in get_args(field.annotation):
            return None
        first = next(_keys(field.nested, f"{key}."))[0]
        raise ConfigError(f"{shown}: {key} is a group of settings; set its parts, for example {first}")
    try:
        return config_values.read(field.annotation, setting.value, setting.is_text)
    except config_values.MismatchError as error:
        instance = config_values.example(field.annotation)
        fix = f"--set {key}={instance}" if setting.is_text else f"{key} = {instance}"
        expected = config_values.describe(field.annotation)
        raise ConfigError(f"{shown}: expected {expected}; write for example {fix}") from error
    except TypeError as error:
        raise TypeError(f"{key}: {error}") from error


def _unknown(config_class: type, unknown: Mapping[str, str], known: Mapping[str, bool]) -> str:
    """What is said of unknown keys, by their sources: a line for each, and what there is."""
    lines = [f"unknown setting {key!r} ({source}).{_hint(key, known)}" for key, source in unknown.items()]
    base = dict(_keys(Config))
    settable = [name for name, is_group in known.items() if not is_group]
    faults = [name for name in settable if name.startswith("faults.")]
    common = [name for name in settable if name in base and name not in faults]
    own = [name for name in settable if name not in base]
    in_faults = any(key.startswith("faults") for key in unknown)
    listed = own + common + (faults if in_faults else ["faults.… (see docs/timeouts.md)"])
    end = f"{config_class.__name__} knows: {', '.join(listed)}"
    return f"{lines[0]} {end}" if len(lines) == 1 else "\n".join([*lines, end])


def _hint(key: str, known: Mapping[str, bool]) -> str:
    last = key.rpartition(".")[2]
    same_name = [other for other in known if other.rpartition(".")[2] == last]
    near = difflib.get_close_matches(key, known, n=1) or same_name
    near = near or difflib.get_close_matches(last, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def _from_file(file: Path | None) -> Iterator[tuple[str, Setting]]:
    if file is None:
        return
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"config file {file} does not exist; check the path given to --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {file} cannot be read: {error}; give a TOML file in UTF-8") from error
    try:
        settings = list(_flatten(tomllib.loads(text), "", str(file)))
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"at line (\d+)", str(error))
        line = place[1] if place else len(text.splitlines())
        raise ConfigError(f"{file}, line {line}: not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{file}: arrays or tables are nested too deeply; settings need two levels at most") from None
    yield from settings


def _flatten(table: Mapping[str, object], prefix: str, source: str) -> Iterator[tuple[str, Setting]]:
    for name, value in table.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.", source)
        else:
            yield f"{prefix}{name}", Setting(value, False, source)


def _from_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, Setting]]:
    pairs = [override.partition("=") for override in overrides]
    if wrong := [text for text, (key, equals, _) in zip(overrides, pairs, strict=True) if not (key.strip() and equals)]:
        shown = ", ".join(map(repr, wrong))
        raise ConfigError(f"--set {shown}: expected key=value, for example --set batch_size=64")
    for key, _, text in pairs:
        yield key.strip(), Setting(text, True, "--set")


def _from_flags(flags: Mapping[str, object]) -> Iterator[tuple[str, Setting]]:
    for key, value in flags.items():
        if value is not None:
            yield key, Setting(value, False, f"--{key}")


def _lines(config: Any, prefix: str) -> Iterator[str]:
    groups = []
    for field in _fields(type(config)):
        value = getattr(config, field.name)
        if field.nested and value is not None:
            groups.append((f"{prefix}{field.name}", value))
            continue
        try:
            yield f"{field.name} = {config_values.write(field.annotation, value)}"
        except config_values.MismatchError:
            raise ConfigError(
                f"{prefix}{field.name} = {value!r}: cannot be written to a TOML file; expected "
                f"{config_values.describe(field.annotation)}"
            ) from None
    # In TOML every line after a table's header belongs to that table, so plain values come first.
    for name, group in groups:
        yield f"\n[{name}]"
        yield from _lines(group, f"{name}.")
