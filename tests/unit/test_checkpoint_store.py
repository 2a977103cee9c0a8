"""One checkpoint: what is written comes back, and what is not what was written is never used."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from elastic_train.checkpoint import places, store, writing
from elastic_train.checkpoint.choose import newest_good
from elastic_train.checkpoint.keeping import Keeping
from elastic_train.checkpoint.load import load_newest
from elastic_train.checkpoint.manifest import Position, Run
from elastic_train.checkpoint.snapshot import NamedArray, Snapshot, arrays, leaf_kinds
from elastic_train.checkpoint.verify import find_damage
from elastic_train.config import CheckpointConfig, Config
from elastic_train.errors import UsageError
from elastic_train.state import TrainState, state_sha256

RUN = Run(trainer="T", config={"seed": 0}, config_digest="d", versions={})


def position(step: int, **fields) -> Position:
    about = dict(samples=10 * step, pass_size=100, epoch=1, generation=0, workers=(0, 1), metrics={}, records=())
    return Position(step=step, **{**about, **fields})


def leaves(seed: int = 0) -> list[NamedArray]:
    rng = np.random.default_rng(seed)
    return [
        NamedArray(("params", "layers", "0", "kernel"), rng.standard_normal((3, 4)).astype(np.float32)),
        NamedArray(("params", "scale"), rng.standard_normal(5).astype(ml_dtypes.bfloat16)),
        NamedArray(("model_state", "seen"), np.array([True, False])),
        NamedArray(("model_state", "small"), np.ones(3, ml_dtypes.float8_e4m3fn)),
        NamedArray(("opt_state", "0", "count"), np.array(seed, np.int32)),
        NamedArray(("opt_state", "0", "best"), np.array(np.inf, np.float32)),
        NamedArray(("opt_state", "0", "nothing"), np.zeros((0, 3), np.float32)),
    ]


def save(root: Path, step: int) -> Path:
    store.save(places.Path(root), leaves(step), position(step), RUN)
    return root / str(step)


def state(seed: int) -> TrainState:
    keys = jax.random.split(jax.random.key(seed), 2)
    params = {"layer": {"a": jax.numpy.arange(6.0).reshape(2, 3) + seed, "b": jax.numpy.ones(2, jax.numpy.bfloat16)}}
    return TrainState(seed, 7 * seed, params, {"noise": keys}, ({"count": jax.numpy.int32(seed)}, None))


def test_all_kinds_of_arrays_come_back_bit_for_bit(tmp_path: Path) -> None:
    saved = store.save(places.Path(tmp_path), leaves(3), position(3), RUN)
    found = store.load(places.Path(tmp_path / "3"), saved)
    assert found.keys() == {leaf.path for leaf in leaves(3)}
    for leaf in leaves(3):
        assert (found[leaf.path].dtype, found[leaf.path].shape) == (leaf.array.dtype, leaf.array.shape)
        assert found[leaf.path].tobytes() == leaf.array.tobytes()
    only = store.load(places.Path(tmp_path / "3"), saved, ("params",))
    assert only.keys() == {"params/layers/0/kernel", "params/scale"}


def test_a_state_goes_through_shared_memory_and_disk_and_is_the_same(tmp_path: Path) -> None:
    before = state(5)
    snapshot = Snapshot(before.arrays)
    snapshot.copy(before.arrays)
    os.set_inheritable(snapshot.descriptor, False)
    named = arrays(snapshot._memory, snapshot.layout)
    store.save(places.Path(tmp_path), named, position(5, samples=35), RUN)
    loaded = load_newest(places.Path(tmp_path), state(0), jax.local_devices()[0], pytest.fail)
    assert loaded is not None and loaded.state.step == 5
    assert state_sha256(loaded.state) == state_sha256(before)
    assert jax.tree.structure(loaded.state.arrays) == jax.tree.structure(before.arrays)


def damages() -> list[str]:
    return ["flipped", "cut", "emptied", "missing"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    save(root, 1)
    save(root, 2)
    return root


@pytest.mark.parametrize("damage", damages())
def test_row_18_damage_in_any_file_is_found_and_the_one_before_used(two: Path, damage: str) -> None:
    files = sorted(path for path in (two / "2").rglob("*") if path.is_file())
    assert len(files) > 20
    for number, file in enumerate(files):
        good = file.read_bytes()
        if damage == "flipped" and not good:
            continue
        place = number % max(1, len(good))
        if damage == "flipped":
            file.write_bytes(good[:place] + bytes([good[place] ^ (1 << number % 8)]) + good[place + 1 :])
        elif damage == "missing":
            file.unlink()
        else:
            if not good:
                continue
            file.write_bytes(good[: len(good) - 1 if damage == "cut" else 0])
        notes: list[str] = []
        chosen = newest_good(places.Path(two), notes.append)
        assert chosen is not None and chosen.manifest.step == 1, (file, damage)
        aside = two / "2.damaged-1"
        assert aside.is_dir() and "expected" in notes[0] and "found" in notes[0]
        relative = str(file.relative_to(two / "2"))
        assert relative in notes[0]
        if relative.startswith("params/scale/"):
            assert "leaf params/scale" in notes[0]
        aside.rename(two / "2")
        file.write_bytes(good)
    assert find_damage(places.Path(two / "2"))[1] == []


# Of a restore that fails Orbax leaves reads under way, which find its event loop closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_row_18_a_loader_never_takes_changed_values(tmp_path: Path) -> None:
    """Without the digests of files: those of the leaves alone find it."""
    before = state(5)
    for step in (4, 5):
        snapshot = Snapshot(before.arrays)
        snapshot.copy(before.arrays)
        store.save(places.Path(tmp_path), arrays(snapshot._memory, snapshot.layout), position(step), RUN)
    data = [path for path in (tmp_path / "5" / "params").rglob("*") if path.is_file()]
    for file in data:
        good = file.read_bytes()
        place = len(good) // 2
        file.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        notes: list[str] = []
        loaded = load_newest(places.Path(tmp_path), state(0), jax.local_devices()[0], notes.append)
        assert loaded is not None
        if loaded.state.step == 5:  # the byte did not matter: the values are those that were saved
            expected = TrainState(5, 50, before.params, before.model_state, before.opt_state)
            assert state_sha256(loaded.state) == state_sha256(expected)
            assert not notes
        else:
            assert loaded.state.step == 4 and "5 is damaged" in notes[0]
            (tmp_path / "5.damaged-1").rename(tmp_path / "5")
        file.write_bytes(good)


def test_damaged_checkpoints_pile_up_and_are_never_deleted(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for number in (1, 2, 3):
        (save(tmp_path, 2) / "manifest.json").write_text("{}")
        chosen = newest_good(places.Path(tmp_path), lambda text: None)
        assert chosen is not None and chosen.manifest.step == 1
        assert (tmp_path / f"2.damaged-{number}").is_dir()
    assert places.saved_steps(places.Path(tmp_path)) == [1]
    assert len(places.damaged(places.Path(tmp_path))) == 3


def test_what_a_broken_off_save_leaves_is_no_checkpoint_and_is_cleaned(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in ("2.partial-ab", "3.partial-ab.orbax-checkpoint-tmp", "1.deleted-ab"):
        (tmp_path / name / "params").mkdir(parents=True)
    assert places.saved_steps(places.Path(tmp_path)) == [1]
    store.clean(places.Path(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]


def test_a_save_that_fails_leaves_nothing_and_takes_nothing(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, 1)
    before = (tmp_path / "1" / "manifest.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write_manifest", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1"]
    assert (tmp_path / "1" / "manifest.json").read_bytes() == before


def test_a_checkpoint_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, 1)
    inode = (tmp_path / "1").stat().st_ino
    save(tmp_path, 1)
    assert (tmp_path / "1").stat().st_ino == inode


@pytest.mark.parametrize(("path", "value"), [("params", np.nan), ("params", np.inf), ("opt_state", np.nan)])
def test_a_state_that_is_not_finite_takes_no_finite_ones_place(tmp_path: Path, path: str, value: float) -> None:
    root = places.Path(tmp_path)
    good = [NamedArray(("params", "x"), np.ones(3, np.float32)), NamedArray(("opt_state", "x"), np.ones(3, np.float32))]
    bad = [leaf._replace(array=np.full(3, value, np.float32)) if leaf.keys[0] == path else leaf for leaf in good]
    store.save(root, good, position(1), RUN)
    with pytest.raises(store.NotFinite, match=f"{path}/x"):
        store.save(root, bad, position(2), RUN)
    assert places.saved_steps(root) == [1]


def test_what_was_never_finite_may_be_saved(tmp_path: Path) -> None:
    root = places.Path(tmp_path)
    mask = [NamedArray(("params", "x"), np.ones(3)), NamedArray(("model_state", "m"), np.array([np.nan, 1.0]))]
    for step in (1, 2):
        assert store.save(root, mask, position(step), RUN).broken == ["model_state/m"]


def test_another_model_is_refused_with_the_key_paths_that_differ(tmp_path: Path) -> None:
    before = state(5)
    snapshot = Snapshot(before.arrays)
    snapshot.copy(before.arrays)
    store.save(places.Path(tmp_path), arrays(snapshot._memory, snapshot.layout), position(5), RUN)
    other = {"layer": {"a": jax.numpy.ones((2, 4)), "c": jax.numpy.ones(2)}}
    with pytest.raises(UsageError) as error:
        load_newest(
            places.Path(tmp_path),
            TrainState(0, 0, other, before.model_state, before.opt_state),
            jax.local_devices()[0],
            pytest.fail,
        )
    assert "params/layer/a: saved as float32[2, 3]; float32[2, 4] in the model" in str(error.value)
    assert "params/layer/b: saved as bfloat16[2]; the model has no such leaf" in str(error.value)
    assert "params/layer/c: float32[2] in the model; not in the checkpoint" in str(error.value)
    assert (tmp_path / "5").is_dir()


def test_kinds_of_shapes_are_those_of_arrays() -> None:
    assert leaf_kinds(state(1).arrays) == leaf_kinds(jax.eval_shape(lambda: state(1).arrays))
    assert leaf_kinds({"k": nnx.Rngs(0).params()})["k"].startswith("key<fry>[")


def test_where_nothing_can_be_renamed_the_manifest_makes_a_checkpoint(tmp_path: Path, monkeypatch) -> None:
    root = places.Path(tmp_path)
    monkeypatch.setattr(places, "is_remote", lambda path: True)
    save(tmp_path, 1)
    original = store._write_manifest

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "_write_manifest", killed)
    monkeypatch.setattr(store, "_remove_unfinished", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    monkeypatch.setattr(store, "_write_manifest", original)
    assert (tmp_path / "2" / "params").is_dir()
    save(tmp_path, 2)  # what was left is set aside
    assert (tmp_path / "2.damaged-1" / "params").is_dir()
    chosen = newest_good(root, pytest.fail)
    assert chosen is not None and chosen.manifest.step == 2
    places.delete(root, 1)
    assert places.saved_steps(root) == [2]


# Where clients have errors of their own ----------------------------------------------------------------------


class StoreError(Exception):
    """As clients of object stores raise them: no OSError."""


def away(*_: object, **__: object) -> None:
    raise StoreError("503, try again")


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> places.Path:
    """A place that is taken for one in an object store."""
    monkeypatch.setattr(places, "is_remote", lambda path: True)
    return places.Path(tmp_path)


def save_state(root: places.Path, step: int) -> TrainState:
    saved = state(step)
    snapshot = Snapshot(saved.arrays)
    snapshot.copy(saved.arrays)
    store.save(root, arrays(snapshot._memory, snapshot.layout), position(step), RUN)
    return saved


@pytest.mark.parametrize("error", [kind("no answer") for kind in (StoreError, ValueError, OSError)])
def test_a_store_that_is_away_sets_no_good_checkpoint_aside(
    remote: places.Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for step in (4, 5):
        save_state(remote, step)
    restore = store.ocp.Checkpointer.restore

    def failing(self: object, path: Path, *more: object) -> object:
        if Path(path).parent.name == "5":
            raise error
        return restore(self, path, *more)

    monkeypatch.setattr(store.ocp.Checkpointer, "restore", failing)
    with pytest.raises(OSError, match="no answer"):
        load_newest(remote, state(0), jax.local_devices()[0], pytest.fail)
    assert places.saved_steps(remote) == [4, 5]

    if isinstance(error, OSError):
        return
    file = next(path for path in (Path(remote) / "5").rglob("*") if path.is_file() and path.name != "manifest.json")
    file.write_bytes(file.read_bytes() + b"more")
    notes: list[str] = []
    loaded = load_newest(remote, state(0), jax.local_devices()[0], notes.append)
    assert loaded is not None and loaded.state.step == 4
    assert "checkpoint 5 is damaged" in notes[0] and file.name in notes[0]


def test_a_store_that_is_away_while_digests_are_compared(remote: places.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Path(remote), 1)
    monkeypatch.setattr(type(remote), "open", away)
    with pytest.raises(OSError, match="StoreError: 503, try again"):
        newest_good(remote, pytest.fail)
    assert places.saved_steps(remote) == [1]


def test_an_old_checkpoint_that_cannot_be_deleted_fails_no_save(
    remote: places.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Path(remote), 1)
    (Path(remote) / "1.deleted-ab").mkdir()  # in the way of `clean`
    saved = state(2)
    snapshot = Snapshot(saved.arrays)
    snapshot.copy(saved.arrays)

    def save_next(step: int) -> dict[str, object]:
        config = CheckpointConfig(keep=1)
        request = writing.request_for(str(remote), config, snapshot.layout, position(step), RUN)
        return writing._answer(request, snapshot._memory, set())

    rmtree = type(remote).rmtree
    monkeypatch.setattr(type(remote), "rmtree", away)
    answer = save_next(2)
    assert answer["deleted"] == [] and answer["trouble"] == (
        "an old checkpoint could not be deleted: StoreError: 503, try again"
    )
    assert find_damage(remote / "2")[1] == []
    monkeypatch.setattr(type(remote), "rmtree", rmtree)
    answer = save_next(3)  # the manifest of the first is gone, the rest of it was left
    assert (answer["deleted"], answer["trouble"]) == ([1, 2], "")
    assert [path.name for path in Path(remote).iterdir()] == ["3"]


def test_what_cannot_be_removed_of_a_failed_save_hides_no_error(
    remote: places.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_write_manifest", full)
    monkeypatch.setattr(type(remote), "rmtree", away)
    with pytest.raises(OSError, match="No space left"):
        save(Path(remote), 1)


def test_a_mistake_of_ours_is_none_of_the_place(tmp_path: Path) -> None:
    with pytest.raises(StoreError), places.access(places.Path(tmp_path)):
        away()
    with pytest.raises(places.PlaceError, match="StoreError: 503"), places.access(places.Path("gs://bucket/run")):
        away()


def test_a_save_without_the_client_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(places.ClientMissing, match=r"gs://nowhere/run/1 needs a package.*elastic-train\[gcs\]"):
        store.save(places.Path("gs://nowhere/run"), leaves(), position(1), RUN)


@pytest.mark.parametrize("where", ["read_bytes", "restore"])
def test_a_member_that_cannot_read_the_newest_says_so_in_a_line(
    remote: places.Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    save_state(remote, 5)
    like = state(0)
    recipe = SimpleNamespace(
        trainer=None,
        config=Config(),
        device=jax.local_devices()[0],
        local=SimpleNamespace(initial=like),
        batches=SimpleNamespace(sampler=SimpleNamespace(num_samples=100)),
    )
    outside: Any = SimpleNamespace(has_checkpoints=True, set_aside=pytest.fail)
    keeping = Keeping(cast(Any, recipe), cast(Any, None), outside, str(remote))
    monkeypatch.setattr(type(remote) if where == "read_bytes" else store.ocp.Checkpointer, where, away)
    with pytest.raises(UsageError, match=rf"the checkpoints in {remote} cannot be read: .*StoreError: 503, try again"):
        keeping.load(like)
    assert places.saved_steps(remote) == [5]
