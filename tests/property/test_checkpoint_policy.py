"""Which checkpoints are made and stay; a manifest that is not what was written is never taken for one."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from elastic_train.checkpoint.manifest import File, Leaf, Manifest, ManifestError, Position, Run, dump, parse
from elastic_train.checkpoint.policy import is_due, retry_delay_s, to_delete
from elastic_train.config import CheckpointConfig

policies = st.builds(
    CheckpointConfig,
    every_steps=st.integers(0, 20),
    keep=st.integers(0, 6),
    keep_every_steps=st.integers(0, 40),
)


@given(policies, st.integers(1, 300), st.data())
def test_the_newest_stay_and_every_nth_stays_for_ever(config: CheckpointConfig, last_step: int, data) -> None:
    assume(config.keep > 0)
    asked = data.draw(st.sets(st.integers(1, last_step), max_size=10))
    on_disk: list[int] = []
    made: list[int] = []
    for step in range(1, last_step + 1):
        if not is_due(config, step, last_step, step in asked):
            continue
        made.append(step)
        on_disk.append(step)
        for gone in to_delete(config, on_disk):
            on_disk.remove(gone)
        assert set(made[-config.keep :]) <= set(on_disk)
    every = config.keep_every_steps
    forever = {step for step in range(1, last_step + 1) if every and step % every == 0}
    assert forever <= set(on_disk) <= forever | set(made[-config.keep :])
    assert last_step in on_disk and asked <= set(made)
    if config.every_steps:
        assert set(range(config.every_steps, last_step + 1, config.every_steps)) <= set(made)


@given(policies, st.integers(1, 100), st.booleans())
def test_with_keep_0_nothing_is_saved(config: CheckpointConfig, step: int, asked: bool) -> None:
    if config.keep == 0:
        assert not is_due(config, step, 100, asked)


@given(st.integers(1, 10_000))
def test_retries_come_ever_later_but_always_come(failures: int) -> None:
    assert 0 < retry_delay_s(failures) <= retry_delay_s(failures + 1) <= 300.0


texts = st.text(max_size=8)
values = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts | st.lists(st.integers())
manifests = st.builds(
    Manifest,
    position=st.builds(
        Position,
        step=st.integers(0, 2**60),
        samples=st.integers(0, 2**60),
        pass_size=st.integers(1, 2**40),
        epoch=st.integers(0, 1000),
        generation=st.integers(0, 10),
        workers=st.lists(st.integers(0, 100)).map(tuple),
        metrics=st.dictionaries(texts, st.floats(allow_nan=False)),
        records=st.lists(texts).map(tuple),
    ),
    run=st.builds(
        Run,
        trainer=texts,
        config=st.dictionaries(texts, values),
        config_digest=texts,
        versions=st.dictionaries(texts, texts),
    ),
    leaves=st.dictionaries(
        texts,
        st.builds(Leaf, dtype=texts, shape=st.lists(st.integers(0, 9)).map(tuple), sha256=texts, broken=st.booleans()),
    ),
    files=st.dictionaries(texts, st.builds(File, num_bytes=st.integers(0, 2**60), sha256=texts, leaf=texts)),
    time=st.floats(0, 1e10),
)


@given(manifests)
def test_a_manifest_comes_back_as_it_was(manifest: Manifest) -> None:
    assert parse(dump(manifest)) == manifest


@given(manifests, st.data())
def test_no_changed_byte_and_no_cut_goes_unnoticed(manifest: Manifest, data) -> None:
    content = dump(manifest).encode()
    place = data.draw(st.integers(0, len(content) - 1))
    changed = bytearray(content)
    changed[place] ^= data.draw(st.integers(1, 255))
    for other in (bytes(changed), content[:place], content + b" "):
        try:
            text = other.decode()
        except UnicodeDecodeError:
            continue
        with pytest.raises(ManifestError):
            parse(text)
