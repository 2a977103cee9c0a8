"""Weights out of a checkpoint, for a script that trains nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import elastic_train as et
from elastic_train.checkpoint import places, show, store
from elastic_train.checkpoint.manifest import Position, Run
from elastic_train.checkpoint.snapshot import NamedArray, named_leaves
from elastic_train.checkpoint.weights import export_safetensors
from elastic_train.cli import main
from elastic_train.errors import UsageError


class Net(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(3, width, rngs=rngs), nnx.Linear(width, 2, rngs=rngs)])
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(nnx.relu(self.layers[0](self.norm(x)))))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Net]:
    model = Net(4, nnx.Rngs(1))
    model(jnp.arange(6.0).reshape(2, 3))  # the statistics are not those of a new model
    _, params, _, rest = nnx.split(model, nnx.Param, nnx.RngState, ...)
    tree = {"params": nnx.to_pure_dict(params), "model_state": nnx.to_pure_dict(rest), "opt_state": {"n": jnp.ones(2)}}
    leaves = [NamedArray(keys, np.asarray(leaf)) for keys, leaf in named_leaves(tree)]
    run = Run(trainer="T", config={"width": 4}, config_digest="d", versions={})
    for step in (5, 7):
        about = dict(samples=1, pass_size=9, epoch=1, generation=0, workers=(0,), metrics={}, records=())
        store.save(places.Path(tmp_path / "checkpoints"), leaves, Position(step=step, **about), run)
    (tmp_path / "job.json").write_text("{}")
    return tmp_path, model


def test_a_model_is_filled_and_computes_the_same(saved: tuple[Path, Net]) -> None:
    run_dir, trained = saved
    trained.eval()
    model = et.load_model(run_dir, Net(4, nnx.Rngs(2)))
    x = jnp.ones((2, 3))
    np.testing.assert_array_equal(model(x), trained(x))
    with pytest.raises(UsageError, match=r"params/layers/0/kernel: saved as float32\[3, 4\]; float32\[3, 8\]"):
        et.load_model(run_dir, Net(8, nnx.Rngs(2)))


def test_parameters_alone(saved: tuple[Path, Net]) -> None:
    run_dir, trained = saved
    for number in (0, 1):  # the optimizer's state may be damaged or gone
        for file in list((run_dir / "checkpoints" / "7" / "opt_state").rglob("*"))[number:]:
            if file.is_file():
                file.unlink()
    params = et.load_params(run_dir)
    np.testing.assert_array_equal(params["layers"]["0"]["kernel"], trained.layers[0].kernel[...])
    assert set(params) == {"layers", "norm"}


def test_safetensors(saved: tuple[Path, Net], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    run_dir, trained = saved
    assert export_safetensors(run_dir, tmp_path / "w.safetensors", 5) == 5
    tensors = load_file(tmp_path / "w.safetensors")
    np.testing.assert_array_equal(tensors["layers.1.bias"], trained.layers[1].bias[...])
    assert set(tensors) == {"layers.0.kernel", "layers.0.bias", "layers.1.kernel", "layers.1.bias"} | {
        "norm.scale",
        "norm.bias",
    }


def test_wrong_steps_and_damage_are_said(saved: tuple[Path, Net]) -> None:
    run_dir, _ = saved
    with pytest.raises(UsageError, match="no checkpoint of step 6; there are those of steps 5, 7"):
        et.load_params(run_dir, 6)
    (run_dir / "checkpoints" / "7" / "manifest.json").write_text("{}")
    with pytest.raises(UsageError, match="is damaged"):
        et.load_params(run_dir)
    with pytest.raises(UsageError, match="no run directory"):
        et.load_params(run_dir / "nothing")


def test_listing_verifying_and_comparing(saved: tuple[Path, Net]) -> None:
    run_dir, _ = saved
    assert show.listing(run_dir).splitlines()[2].startswith("5     1")
    assert show.verification(run_dir, None)[0] and show.verification(run_dir, 5)[0]
    is_same, text = show.comparison(run_dir, 5, 7, None)
    assert is_same and "leaves: 9 of 9 are equal" in text
    assert show.comparison(run_dir, None, None, None) == (is_same, text)  # the last two
    (run_dir / "checkpoints" / "7" / "params" / "_METADATA").write_text("{}")
    are_good, text = show.verification(run_dir, None)
    assert not are_good and "5: good" in text and "7: DAMAGED" in text and "params/_METADATA" in text
    (run_dir / "checkpoints" / "5").rename(run_dir / "checkpoints" / "5.damaged-1")
    assert "set aside:" in show.listing(run_dir)
    with pytest.raises(UsageError, match="fewer than two checkpoints"):
        show.comparison(run_dir, None, None, None)


def test_sizes_have_a_unit_in_which_they_are_not_nothing(saved: tuple[Path, Net]) -> None:
    run_dir, _ = saved
    num_bytes = places.read_manifest(places.Path(run_dir / "checkpoints" / "5")).num_bytes
    assert 1e3 <= num_bytes < 1e5
    assert f"  {num_bytes / 1e3:.1f} kB  " in show.listing(run_dir).splitlines()[2]
    assert f" files, {num_bytes / 1e3:.1f} kB)" in show.verification(run_dir, 5)[1]
    shown = {num_bytes: show._size(num_bytes) for num_bytes in (0, 999, 1000, 999_949, 999_950, 1_234_567, 14 * 10**9)}
    assert list(shown.values()) == ["0 B", "999 B", "1.0 kB", "999.9 kB", "1.0 MB", "1.2 MB", "14000.0 MB"]


def test_checkpoints_that_cannot_be_read_are_told_in_a_line(
    saved: tuple[Path, Net], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, _ = saved

    def away(*_: object) -> None:
        raise RuntimeError("503, try again")  # clients of object stores have errors of all kinds

    def no_answer(command: str, *more: str) -> str:
        assert main(["checkpoint", command, str(run_dir), *more]) == 2
        return capsys.readouterr().err

    monkeypatch.setattr(places, "is_remote", lambda path: True)
    monkeypatch.setattr(places.Path, "read_bytes", away)
    out = ("--out", str(run_dir / "w.safetensors"))
    for command, more in (("ls", ()), ("verify", ()), ("verify", ("--step", "5")), ("diff", ()), ("export", out)):
        text = f"elastic-train: the checkpoints in {run_dir}/checkpoints cannot be read: RuntimeError: 503, try again."
        assert no_answer(command, *more).startswith(text), command
    with pytest.raises(UsageError, match="cannot be read"):
        et.load_params(run_dir)

    (run_dir / "config.toml").write_text('[checkpoint]\npath = "gs://nowhere/run"\n')
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for command, more in (("ls", ()), ("verify", ()), ("diff", ()), ("export", out)):
        missing = no_answer(command, *more)
        assert missing.startswith("elastic-train: gs://nowhere/run needs a package"), command
        assert missing.endswith("pip install 'elastic-train[gcs]'\n")
    with pytest.raises(UsageError, match="needs a package"):
        et.load_model(run_dir, Net(4, nnx.Rngs(2)))


def test_the_command_line_knows_neither_jax_nor_orbax_to_list(saved: tuple[Path, Net]) -> None:
    code = (
        "import sys; from elastic_train.cli import main; code = main(sys.argv[1:]); "
        "sys.exit(code or ('jax' in sys.modules and 9))"
    )
    for action in ("ls", "verify"):
        ended = subprocess.run([sys.executable, "-c", code, "checkpoint", action, str(saved[0])], check=False)
        assert ended.returncode == 0
