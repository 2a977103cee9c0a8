"""What the check of a recipe refuses, and what it hands back. Trainer and JAX are small fakes."""

from __future__ import annotations

import abc
import dataclasses
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest

from elastic_train.config import Config
from elastic_train.errors import UsageError
from elastic_train.launch import check as check_module
from elastic_train.launch.check import CheckFailed, CheckRequest, check, inspect_recipe

RUN = subprocess.run
RECIPE = """
from elastic_train.config import Config
from elastic_train.trainer import Trainer

class Small(Trainer):
    config: Config
    def loss(self): ...
"""


class FakeTrainer(abc.ABC):
    config: Config
    requires: ClassVar[Mapping[str, str]] = {}

    @abc.abstractmethod
    def loss(self) -> None: ...


@pytest.fixture(autouse=True)
def jax(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    trainer, private = ModuleType("elastic_train.trainer"), ModuleType("elastic_train.jax_private")
    trainer.Trainer = FakeTrainer  # type: ignore[attr-defined]
    private.backends_initialized = lambda: False  # type: ignore[attr-defined]
    for name, module in (("trainer", trainer), ("jax_private", private)):
        monkeypatch.setitem(sys.modules, f"elastic_train.{name}", module)
        monkeypatch.setattr(f"elastic_train.{name}", module, raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return private


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(RECIPE)
    return str(path)


def test_hands_back_what_the_job_needs(recipe: str, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("batch_size = 32\n[faults]\nmax_restarts = 4\n")
    request = CheckRequest(recipe=recipe, workers=2, config=str(config), overrides=("log_every=5",), flags={"steps": 9})
    found = inspect_recipe(request)
    assert (found.trainer, found.steps, found.log_every) == ("Small", 9, 5)
    assert found.faults.max_restarts == 4
    assert "batch_size = 32" in found.config_toml


def test_jax_already_initialised(recipe: str, jax: ModuleType) -> None:
    jax.backends_initialized = lambda: True  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"jax already initialised: importing the recipe .*small\.py"):
        inspect_recipe(CheckRequest(recipe=recipe, workers=1))


def test_more_workers_than_shards(recipe: str) -> None:
    with pytest.raises(UsageError, match=r"9 workers, but the batch is cut into shards = 8"):
        inspect_recipe(CheckRequest(recipe=recipe, workers=9))
    inspect_recipe(CheckRequest(recipe=recipe, workers=9, overrides=("shards=9",)))


def test_wrong_settings(recipe: str) -> None:
    for override in ("stepz=3", "steps=x", "steps=0"):
        with pytest.raises(UsageError, match="step"):
            inspect_recipe(CheckRequest(recipe=recipe, workers=1, overrides=(override,)))


def test_a_host_that_only_joins_needs_the_client_of_the_object_store_too(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    inspect_recipe(CheckRequest(recipe=recipe, workers=1, overrides=("checkpoint.path=/mnt/run",)))
    request = CheckRequest(recipe=recipe, workers=1, overrides=("checkpoint.path=gs://nowhere/run",))
    assert request.run_dir is None
    with pytest.raises(UsageError, match=r"gs://nowhere/run needs a package.*pip install 'elastic-train\[gcs\]'"):
        inspect_recipe(request)
    with pytest.raises(UsageError) as refused:  # and all else that the settings ask for in vain
        inspect_recipe(dataclasses.replace(request, workers=9))
    first, second = str(refused.value).splitlines()
    assert first.startswith("gs://nowhere/run needs a package") and second.startswith("9 workers, but the batch is cut")
    protocols: list[str] = []
    monkeypatch.setattr("fsspec.get_filesystem_class", protocols.append)  # as if it were there
    assert inspect_recipe(request).steps == 100 and protocols == ["gs"]


NEEDY = """
from dataclasses import dataclass
from elastic_train.config import Config
from elastic_train.trainer import Trainer

@dataclass(frozen=True, kw_only=True)
class NeedyConfig(Config):
    width: int = 4
    data: str

class Needy(Trainer):
    config: NeedyConfig
    requires = {"no_such_module": "pip install such", "sklearn": "pip install it", "json": "", "a.b": "no way"}
    def loss(self): ...
"""


def refusal(path: Path, workers: int, *overrides: str) -> list[str]:
    with pytest.raises(UsageError) as refused:
        inspect_recipe(CheckRequest(recipe=str(path), workers=workers, overrides=overrides))
    return str(refused.value).splitlines()


def test_missing_packages_are_told_with_all_else_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gcsfs", "sklearn", "tensorboardX"):
        monkeypatch.setitem(sys.modules, name, None)
    path = tmp_path / "needy.py"
    path.write_text(NEEDY)
    lacking = "no_such_module (pip install such), sklearn (pip install it), a.b (no way)"
    needs = f"Needy needs what is not installed: {lacking}"
    asked = ("tensorboard=true", "checkpoint.path=gs://nowhere/run")
    assert refusal(path, 1, "data=x") == [needs]
    wrong, first, second, third, fourth = refusal(path, 9, *asked, "width=wide", "data=x")
    assert wrong.startswith("width = 'wide' (--set): expected")
    assert first == needs and second.startswith("tensorboard = true, but the package tensorboardX is not installed")
    assert third.startswith("gs://nowhere/run needs a package") and fourth.startswith("9 workers, but the batch is cut")
    assert len(refusal(path, 9, *asked)) == 5  # without the one that has no default
    assert len(refusal(path, 9, *asked, "data=x")) == 4


def test_nothing_is_said_of_what_depends_on_a_setting_that_is_wrong(tmp_path: Path, recipe: str) -> None:
    for shards in ("shards=x", "shards=0"):
        (text,) = refusal(Path(recipe), 9, shards)
        assert text.startswith("shards = ")
    asked, workers = refusal(Path(recipe), 9, "tensorboard=perhaps")
    assert asked.startswith("tensorboard = 'perhaps'") and workers.startswith("9 workers")
    file = tmp_path / "no.toml"
    request = CheckRequest(recipe=recipe, workers=9, config=str(file))
    with pytest.raises(UsageError) as refused:
        inspect_recipe(request)
    assert str(refused.value) == f"config file {file} does not exist; check the path given to --config"


def test_what_a_recipe_requires_is_a_dict(tmp_path: Path) -> None:
    path = tmp_path / "needy.py"
    path.write_text(NEEDY.replace('requires = {"no_such_module"', 'requires = {"x": None, "no_such_module"'))
    (text,) = refusal(path, 1, "data=x")
    assert text.startswith("Needy.requires = {") and "expected a dict from the names of modules" in text


def fake_process(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Has `check` start `code` instead; it finds the descriptor for the answer in `answer`."""

    def start(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        return RUN([sys.executable, "-c", f"answer = {command[4]}\n{code}"], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(check_module.subprocess, "run", start)


def test_shards_to_expect(recipe: str) -> None:
    assert inspect_recipe(CheckRequest(recipe=recipe, workers=2)).shards == 8
    each = CheckRequest(recipe=recipe, workers=2, overrides=("batch_policy=per_worker",))
    assert inspect_recipe(each).shards == 2


def test_answer_of_any_size_comes_back(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "trainer": "T",
        "steps": 1,
        "log_every": 1,
        "tensorboard": False,
        "shards": 8,
        "max_workers": 8,
        "deterministic": False,
        "batch_policy": "fixed",
        "faults": {"max_restarts": 4},
        "resume": {"step": 3, "records": ["{}"]},
    }
    more = "{**found, 'config_toml': '#' * (1 << 18)}"
    fake_process(monkeypatch, f"import json; found = {found}; json.dump({more}, open(answer, 'w'))")
    checked = check(CheckRequest(recipe=recipe, workers=1), os.environ)
    assert len(checked.config_toml) == 1 << 18 and checked.faults.max_restarts == 4
    assert checked.resume is not None and (checked.resume.step, checked.resume.records) == (3, ("{}",))


def test_exit_of_the_process(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    request = CheckRequest(recipe=recipe, workers=1)
    fake_process(monkeypatch, "raise SystemExit(2)")
    with pytest.raises(CheckFailed) as refused:
        check(request, os.environ)
    assert refused.value.exit_code == 2
    fake_process(monkeypatch, "import os; os.abort()")
    with pytest.raises(UsageError, match="ended the process with code -6"):
        check(request, os.environ)
