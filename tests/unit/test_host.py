"""What a host needs before its agent starts."""

import os
from pathlib import Path

import pytest

from elastic_train.errors import UsageError
from elastic_train.launch import host
from elastic_train.launch.check import CheckFailed
from elastic_train.launch.environment import SECRET_VARIABLE
from elastic_train.launch.host import find_secret, run_agent
from elastic_train.launch.options import JobOptions


@pytest.mark.parametrize("content", ["s3cret", "s3cret\n", " s3cret\r\n"])
def test_a_secret_that_was_copied_with_a_newline_fits(tmp_path: Path, content: str) -> None:
    (tmp_path / "secret").write_bytes(content.encode())
    assert find_secret(tmp_path, {}) == "s3cret"


def test_the_environment_comes_before_the_file_and_one_of_them_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{SECRET_VARIABLE} is not set"):
        find_secret(tmp_path, {})
    (tmp_path / "secret").write_text("other")
    assert find_secret(tmp_path, {SECRET_VARIABLE: "s3cret"}) == "s3cret"


def test_a_host_that_joins_says_before_it_starts_a_worker_that_it_cannot_reach_the_checkpoints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gcsfs.py").write_text("raise ImportError('not installed here')")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", SECRET_VARIABLE: "s3cret"}
    options = JobOptions(
        recipe="recipes/linear.py",
        config=None,
        overrides=("checkpoint.path=gs://nowhere/run",),
        workers=2,
        min_workers=1,
        slots=(1,),
        steps=None,
        seed=None,
        run_dir=tmp_path / "run",
        bind="127.0.0.1:0",
    )
    monkeypatch.setattr(host, "start_agent", None)
    with pytest.raises(CheckFailed) as refused:
        run_agent(options, "127.0.0.1:1", environ)
    assert refused.value.exit_code == 2 and not (tmp_path / "run").exists()
    said = capfd.readouterr().err
    assert "elastic-train: gs://nowhere/run needs a package" in said and "pip install 'elastic-train[gcs]'" in said
