"""From a config class, a TOML file and the command line to one config, and back to TOML."""

from __future__ import annotations

import contextlib
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


class SettingsError(ConfigError):
    """Settings are wrong.

    Attributes:
      right: values of those fields of the config that are not, given or by default. A group of settings is among them
        with defaults in place of what is wrong in it.
    """

    def __init__(self, message: str, right: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.right = right


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

    The result is built from all sources together, so that settings that depend on each other may come from different
    ones. All that is wrong is told at once, as far as that can be known: nothing is said of what depends on a setting
    that is wrong.

    Args:
      config_class: the recipe's config; also a field's nested dataclass is filled.
      file: a TOML file.
      overrides: texts `key=value`; dots reach into nested dataclasses (`faults.keepalive_s=2`). A tuple is
        written `64,32` or as a TOML array, None as `none`.
      flags: typed values of command-line options of their own, by key; None means that it was not given.

    Raises:
      SettingsError: a file that is missing or no TOML, unknown keys, wrong types, and values out of range.
    """
    known = dict(_keys(config_class))
    wrong = _Wrong()
    given: list[tuple[str, Setting]] = []
    with wrong.noting(_SOURCE):
        given += _from_file(file)
    given += (*_from_overrides(overrides, wrong), *_from_flags(flags or {}))
    unknown = {key: setting.source for key, setting in given if key not in known}
    wrong.keys.update(unknown)
    settings = _settled([(key, setting) for key, setting in given if key in known])
    config = _build(config_class, None, "", settings, wrong)
    if unknown or wrong.texts:
        raise SettingsError(_message(config_class, unknown, known, wrong.texts), wrong.right())
    return config


_SOURCE = ""
"""In place of a key: what is in a whole file is not known."""


class _Wrong:
    """What is wrong with the settings.

    Attributes:
      keys: those that are wrong, or whose value cannot be judged because of others.
      texts: what is said of them.
      values: of the fields of the config, as far as they could be read.
    """

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.texts: list[str] = []
        self.values: dict[str, Any] = {}

    def right(self) -> dict[str, Any]:
        """The values of fields that are not wrong."""
        return {name: value for name, value in self.values.items() if name not in self.keys}

    @contextlib.contextmanager
    def noting(self, key: str) -> Iterator[None]:
        """Around what reads the setting `key`."""
        try:
            yield
        except ConfigError as error:
            self.keys.add(key)
            self.texts.append(str(error))

    def note_value(self, key: str, error: ConfigError) -> None:
        """The value of `key` is out of range. Nothing is said of it if the message names a setting that is wrong: a
        default has been taken in its place."""
        words = re.findall(r"\w+(?:\.\w+)*", str(error))
        if self.keys.isdisjoint(words) and {other.rpartition(".")[2] for other in self.keys}.isdisjoint(words):
            self.texts.append(str(error))
        self.keys.add(key)


def _settled(given: Sequence[tuple[str, Setting]]) -> dict[str, Setting]:
    """What counts, if some is given several times."""
    settings: dict[str, Setting] = {}
    for key, setting in given:
        for earlier in [other for other in settings if f"{other}.".startswith(f"{key}.")]:
            if setting.value != {}:
                del settings[earlier]
        for parent in [other for other in settings if key.startswith(f"{other}.")]:
            del settings[parent]
        settings[key] = setting
    return settings


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


def _build(config_class: type, base: Any, prefix: str, settings: Mapping[str, Setting], wrong: _Wrong) -> Any:
    """The config. If something is wrong, one with defaults in its place, or None if there are none: worth nothing, but
    in making it what else is wrong is found."""
    values: dict[str, Any] = {}
    needed = set[str]()
    for field in _fields(config_class):
        key = prefix + field.name
        setting = settings.get(key)
        is_opened = any(other.startswith(f"{key}.") for other in settings)
        if base is None and field.default is dataclasses.MISSING:
            needed.add(field.name)
        with wrong.noting(key):
            if field.nested and (is_opened or (setting and setting.value == {})):
                before = field.default if base is None else getattr(base, field.name)
                before = before if isinstance(before, field.nested) else None
                if (made := _build(field.nested, before, f"{key}.", settings, wrong)) is not None:
                    values[field.name] = made
            elif setting:
                values[field.name] = _value(field, key, setting)
            elif field.name in needed and _SOURCE not in wrong.keys:
                raise ConfigError(f"{key}: has no default; set it in the config file or with --set {key}=...")
        if not prefix and (field.name in values or (field.name not in needed and _SOURCE not in wrong.keys)):
            wrong.values[field.name] = values.get(field.name, field.default)
    while needed <= values.keys() and _SOURCE not in wrong.keys:
        try:
            return config_class(**values) if base is None else dataclasses.replace(base, **values)
        except ConfigError as error:
            name = error.field.removeprefix(prefix)
            wrong.note_value(prefix + name, error)
            if name not in values:
                break
            del values[name]
        except Exception:  # the config's own code, which need not stand values that it has refused before
            if not wrong.keys:
                raise
            break
    return None


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


def _message(config_class: type, unknown: Mapping[str, str], known: Mapping[str, bool], others: Sequence[str]) -> str:
    """What is said of unknown keys, by their sources: a line for each, and what there is. Between them, what else is
    wrong."""
    lines = [f"unknown setting {key!r} ({source}).{_hint(key, known)}" for key, source in unknown.items()]
    if not lines:
        return "\n".join(others)
    base = dict(_keys(Config))
    settable = [name for name, is_group in known.items() if not is_group]
    faults = [name for name in settable if name.startswith("faults.")]
    common = [name for name in settable if name in base and name not in faults]
    own = [name for name in settable if name not in base]
    in_faults = any(key.startswith("faults") for key in unknown)
    listed = own + common + (faults if in_faults else ["faults.… (see docs/timeouts.md)"])
    end = f"{config_class.__name__} knows: {', '.join(listed)}"
    return f"{lines[0]} {end}" if len(lines) + len(others) == 1 else "\n".join([*lines, *others, end])


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


def _from_overrides(overrides: Sequence[str], wrong: _Wrong) -> Iterator[tuple[str, Setting]]:
    refused = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if key.strip() and equals:
            yield key.strip(), Setting(text, True, "--set")
        else:
            refused.append(override)
    if refused:
        wrong.keys.update(key for override in refused if (key := override.partition("=")[0].strip()))
        shown = ", ".join(map(repr, refused))
        wrong.texts.append(f"--set {shown}: expected key=value, for example --set batch_size=64")


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
