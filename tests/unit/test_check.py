"""What the check of a recipe refuses, and what it hands back. Trainer and JAX are small fakes."""

from __future__ import annotations

import abc
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

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
