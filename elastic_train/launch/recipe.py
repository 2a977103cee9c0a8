"""From a recipe's name to the one `Trainer` class in it. Runs the user's code; starts no JAX backend."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
import typing
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NoReturn

from elastic_train.config import Config
from elastic_train.errors import UsageError

if TYPE_CHECKING:
    from elastic_train.trainer import Trainer

BUILT_IN = "recipes"
"""The package whose recipes may be named without it."""

NO_RECIPES = frozenset({"demo"})
"""Its modules that define no trainer."""


def load_recipe(spec: str) -> type[Trainer]:
    """The trainer class that `spec` means.

    Args:
      spec: a file (`my/recipe.py`), a module (`recipes.digits_mlp`), or a module of the package `recipes`
        (`digits_mlp`); with `:ClassName` behind it if the recipe defines several trainers.

    Raises:
      UsageError: there is no such recipe, it cannot be imported (the message holds the user's own traceback),
        or it does not define exactly one concrete trainer.
    """
    place, class_name = _split(spec)
    module = _load_file(place) if _is_file(place) else _load_module(place)
    return _choose(module, place, class_name)


def recipe_name(spec: str) -> str:
    """A short name for `spec`, fit for a directory: `recipes/digits_mlp.py` gives `digits_mlp`."""
    place, _ = _split(spec)
    return Path(place).stem if _is_file(place) else place.rpartition(".")[2]


def config_class_of(trainer: type[Trainer]) -> type[Config]:
    """What the trainer's `config` is annotated with."""
    annotation = typing.get_type_hints(trainer).get("config", Config)
    if not (isinstance(annotation, type) and issubclass(annotation, Config)):
        raise UsageError(
            f"{trainer.__name__}.config is annotated with {annotation!r}; "
            "annotate it with a dataclass that subclasses elastic_train.Config"
        )
    return annotation


def _split(spec: str) -> tuple[str, str | None]:
    place, colon, class_name = spec.partition(":")
    if not place or (colon and not class_name.isidentifier()):
        raise UsageError(f"{spec!r} is no recipe; write a file or a module, with :ClassName behind it if needed")
    return place, class_name or None


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _load_file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if path.is_dir():
        raise UsageError(f"{place} is a directory; name one recipe in it")
    packaged = f"{BUILT_IN}.{path.stem}" if path.parent.name == BUILT_IN else None
    if packaged is not None and (found := _find(packaged)) and (not path.exists() or found == path):
        return _import(packaged)  # an installed recipe, whether or not the working directory holds its source
    if not path.exists():
        raise UsageError(f"no recipe file {place} (looked for {path}).{_suggest(path.stem)}")
    # As `python FILE` does: a recipe may import the modules beside it.
    sys.path.insert(0, str(path.parent))
    name = f"recipe_{path.stem}"  # not the bare stem, which may be that of a library, as in linear.py or jax.py
    specification = importlib.util.spec_from_file_location(name, path)
    if specification is None or specification.loader is None:
        raise UsageError(f"{place} is no Python file; a recipe's name ends in .py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        _fail(place, error)
    return module


def _load_module(place: str) -> ModuleType:
    for name in (place, f"{BUILT_IN}.{place}"):
        if all(part.isidentifier() for part in name.split(".")) and _find(name) is not None:
            # A bare word may be the name of a library, too; the recipe of that name is meant.
            if name == place and "." not in place and _find(f"{BUILT_IN}.{place}") is not None:
                continue
            return _import(name)
    raise UsageError(f"unknown recipe {place!r}: no file and no module of that name.{_suggest(place)}")


def _find(name: str) -> Path | None:
    """The source file of a module that could be imported; None if there is none."""
    parent = name.rpartition(".")[0]
    if parent and _find(parent) is None:
        return None
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):  # the parent is no package; or a module without a specification
        return None
    except Exception as error:  # a package's own code ran and failed
        _fail(name, error)
    if found is None:
        return None
    if found.origin is None:  # a namespace package has directories only
        return Path(next(iter(found.submodule_search_locations or ["."])))
    return Path(found.origin).resolve()


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        _fail(name, error)


def _fail(place: str, error: Exception) -> NoReturn:
    shown = "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__)))
    raise UsageError(f"the recipe {place} cannot be imported:\n{shown.rstrip()}") from error


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame on that is neither ours nor the import system's."""
    while frames is not None:
        file = frames.tb_frame.f_code.co_filename
        if file != __file__ and "importlib" not in file:
            return frames
        frames = frames.tb_next
    return None


def _choose(module: ModuleType, place: str, class_name: str | None) -> type[Trainer]:
    from elastic_train.trainer import Trainer  # imports jax

    trainers = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Trainer) and value.__module__ == module.__name__
    }
    concrete = {name: value for name, value in trainers.items() if not inspect.isabstract(value)}
    names = ", ".join(sorted(concrete))
    if class_name is not None:
        if class_name in concrete:
            return concrete[class_name]
        if class_name in trainers:
            _refuse_abstract(trainers[class_name], place)
        raise UsageError(f"{place} defines no trainer {class_name!r}; it defines: {names or 'none'}")
    if len(concrete) == 1:
        return next(iter(concrete.values()))
    if concrete:
        first = min(concrete)
        raise UsageError(f"{place} defines several trainers: {names}. Say which, for example {place}:{first}")
    if trainers:
        _refuse_abstract(next(iter(trainers.values())), place)
    raise UsageError(f"{place} defines no trainer. A recipe defines one class that subclasses elastic_train.Trainer.")


def _refuse_abstract(trainer: type, place: str) -> NoReturn:
    missing = ", ".join(sorted(getattr(trainer, "__abstractmethods__", ())))
    raise UsageError(f"{trainer.__name__} in {place} is not complete: it does not define {missing}")


def _suggest(name: str) -> str:
    if _find(BUILT_IN) is None:
        return ""
    names = (module.name for module in pkgutil.iter_modules(importlib.import_module(BUILT_IN).__path__))
    known = sorted(name for name in names if name not in NO_RECIPES)
    near = difflib.get_close_matches(name.rpartition(".")[2], known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{hint} Recipes that come along: {', '.join(known)}" if known else hint
