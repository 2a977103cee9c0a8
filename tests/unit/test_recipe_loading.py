"""From a recipe's name to its trainer class. The trainer and the recipes package are small fakes."""

from __future__ import annotations

import abc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from elastic_train.config import Config
from elastic_train.errors import UsageError
from elastic_train.launch.recipe import config_class_of, load_recipe, recipe_name

RECIPE = """
from dataclasses import dataclass
from elastic_train.config import Config
from elastic_train.trainer import Trainer

@dataclass(frozen=True, kw_only=True)
class {name}Config(Config):
    width: int = 3

class {name}(Trainer):
    config: {name}Config
    def loss(self): ...
"""


class FakeTrainer(abc.ABC):
    config: Config

    @abc.abstractmethod
    def loss(self) -> None: ...


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    trainer = ModuleType("elastic_train.trainer")
    trainer.Trainer = FakeTrainer  # type: ignore[attr-defined]
    before = dict(sys.modules)
    for name in [name for name in sys.modules if name.split(".")[0] == "recipes"]:
        del sys.modules[name]
    monkeypatch.setitem(sys.modules, "elastic_train.trainer", trainer)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "recipes/__init__.py", "")
    write(tmp_path / "recipes/digits_mlp.py", RECIPE.format(name="Digits"))
    write(tmp_path / "recipes/linear.py", RECIPE.format(name="Linear"))
    sys.path_importer_cache.clear()
    yield
    for name in set(sys.modules) - set(before):
        if name.startswith("recipe") or name == "mine":
            del sys.modules[name]
    sys.modules.update({name: module for name, module in before.items() if name.split(".")[0] == "recipes"})


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "spec",
    [
        "digits_mlp",
        "recipes.digits_mlp",
        "recipes/digits_mlp.py",
        "digits_mlp:Digits",
        "recipes/digits_mlp.py:Digits",
    ],
)
def test_ways_to_name_a_recipe(spec: str) -> None:
    trainer = load_recipe(spec)
    assert (trainer.__module__, trainer.__name__) == ("recipes.digits_mlp", "Digits")
    assert recipe_name(spec) == "digits_mlp"
    assert config_class_of(trainer)().width == 3


def test_a_path_into_the_package_works_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_recipe("recipes/digits_mlp.py").__module__ == "recipes.digits_mlp"


def test_own_file_and_the_module_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "my/mine.py", "WIDTH = 7")
    path = write(tmp_path / "my/linear.py", f"import mine\n{RECIPE.format(name='Own')}\nOwn.width = mine.WIDTH")
    trainer = load_recipe(str(path))
    assert trainer.__name__ == "Own" and trainer.width == 7
    assert config_class_of(trainer).__name__ == "OwnConfig"


@dataclass(frozen=True)
class Other:
    pass


def test_config_of_the_wrong_kind() -> None:
    class Wrong(FakeTrainer):
        config: Other  # type: ignore[assignment]

    with pytest.raises(UsageError, match=r"Wrong\.config .* subclasses elastic_train\.Config"):
        config_class_of(Wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", ["digits_mlq", "recipes.digits_mlq", "recipes/digits_mlq.py"])
def test_unknown_recipe_suggests_a_near_one(spec: str) -> None:
    with pytest.raises(UsageError, match="Did you mean 'digits_mlp'") as error:
        load_recipe(spec)
    assert "digits_mlp, linear" in str(error.value)


@pytest.mark.parametrize("spec", ["no.such.module", "/no/such/file.py", "a-b", "recipes"])
def test_unknown(spec: str) -> None:
    with pytest.raises(UsageError):
        load_recipe(spec)


@pytest.mark.parametrize("spec", ["", ":A", "a:", "a:b c"])
def test_malformed(spec: str) -> None:
    with pytest.raises(UsageError, match="no recipe"):
        load_recipe(spec)


def test_directory_instead_of_file() -> None:
    with pytest.raises(UsageError, match="is a directory"):
        load_recipe("./recipes/")


def test_import_error_shows_the_users_traceback_and_not_ours(tmp_path: Path) -> None:
    write(tmp_path / "bad.py", "def f():\n    raise KeyError('no such thing')\nf()\n")
    for spec in ("bad.py", "bad"):
        with pytest.raises(UsageError, match="no such thing") as error:
            load_recipe(spec)
        assert 'bad.py", line 3' in str(error.value)
        assert "launch/recipe.py" not in str(error.value)
        assert "importlib" not in str(error.value)


def test_missing_library_and_syntax_error(tmp_path: Path) -> None:
    write(tmp_path / "lacks.py", "import no_such_library")
    with pytest.raises(UsageError, match="No module named 'no_such_library'"):
        load_recipe("lacks.py")
    write(tmp_path / "typo.py", "def f(:\n")
    with pytest.raises(UsageError, match="SyntaxError"):
        load_recipe("typo.py")


def test_none_several_and_abstract(tmp_path: Path) -> None:
    write(tmp_path / "none.py", "from recipes.linear import Linear\n")
    with pytest.raises(UsageError, match=r"none\.py defines no trainer"):
        load_recipe("none.py")
    write(tmp_path / "two.py", RECIPE.format(name="A") + RECIPE.format(name="B"))
    with pytest.raises(UsageError, match=r"several trainers: A, B\. .* two\.py:A"):
        load_recipe("two.py")
    assert load_recipe("two.py:B").__name__ == "B"
    with pytest.raises(UsageError, match="defines no trainer 'C'; it defines: A, B"):
        load_recipe("two.py:C")
    write(tmp_path / "half.py", "from elastic_train.trainer import Trainer\nclass Half(Trainer): ...\n")
    with pytest.raises(UsageError, match=r"Half in half\.py is not complete: it does not define loss"):
        load_recipe("half.py")
