"""No damage of one word and no exchange of two goes unnoticed by the fingerprint of a state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from elastic_train.state import fingerprint, leaf_fingerprints

SHAPES = {
    "params": {"a": ((3, 5), "float32"), "b": ((15,), "float32"), "c": ((7,), "bfloat16")},
    "opt": [((), "int32"), ((4, 2), "uint8"), ((9,), "bool"), ((3, 5), "float32"), ((6,), "uint32")],
}
PROGRAM = jax.jit(lambda tree: (fingerprint(tree), leaf_fingerprints(tree)))

property_test = settings(derandomize=True, deadline=None, max_examples=300)
seeds = st.integers(0, 2**32 - 1)


def is_leaf(value: object) -> bool:
    return isinstance(value, tuple)


def tree_of(seed: int) -> tuple[list[np.ndarray], object]:
    """A tree with leaves of several dtypes: arbitrary bits, NaN and infinities included."""
    generator = np.random.default_rng(seed)
    shapes, treedef = jax.tree.flatten(SHAPES, is_leaf=is_leaf)
    leaves = []
    for shape, name in shapes:
        dtype = jnp.dtype(name)
        if name == "bool":
            leaves.append(generator.integers(0, 2, shape).astype(bool))
        else:
            raw = generator.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
            leaves.append(raw.view(dtype).reshape(shape))
    return leaves, treedef


def prints(leaves: list[np.ndarray], treedef: object) -> tuple[list[int], np.ndarray]:
    whole, each = PROGRAM(jax.tree.unflatten(treedef, leaves))
    return np.asarray(whole).tolist(), np.asarray(each)


@given(seeds, st.integers(0, 7), st.integers(0, 10**6))
@property_test
def test_every_flipped_bit_shows_in_the_whole_and_in_its_leaf_alone(seed: int, number: int, place: int) -> None:
    leaves, treedef = tree_of(seed)
    before, each_before = prints(leaves, treedef)
    damaged = leaves[number].copy()
    if damaged.dtype == bool:
        damaged.reshape(-1)[place % damaged.size] ^= True
    else:
        raw = damaged.reshape(-1).view(np.uint8)
        raw[place // 8 % raw.size] ^= np.uint8(1 << place % 8)
    leaves[number] = damaged
    after, each_after = prints(leaves, treedef)
    # A change within one word shows for certain, in both halves: each is a bijection of the word.
    assert before[0] != after[0] and before[1] != after[1]
    assert np.flatnonzero(np.any(each_before != each_after, axis=1)).tolist() == [number]


@given(seeds, st.integers(0, 7), st.integers(0, 100), st.integers(0, 100))
@property_test
def test_two_elements_that_change_places_show(seed: int, number: int, first: int, second: int) -> None:
    leaves, treedef = tree_of(seed)
    before, _ = prints(leaves, treedef)
    swapped = leaves[number].copy()
    flat = swapped.reshape(-1)
    first, second = first % flat.size, second % flat.size
    assume(flat[first].tobytes() != flat[second].tobytes())
    flat[[first, second]] = flat[[second, first]]
    leaves[number] = swapped
    assert prints(leaves, treedef)[0] != before


@given(seeds)
@property_test
def test_two_leaves_that_change_places_show(seed: int) -> None:
    leaves, treedef = tree_of(seed)
    before, _ = prints(leaves, treedef)
    shapes = [(leaf.shape, leaf.dtype) for leaf in leaves]
    same = [i for i, shape in enumerate(shapes) if shapes.count(shape) > 1]
    assert len(same) == 2
    leaves[same[0]], leaves[same[1]] = leaves[same[1]], leaves[same[0]]
    assert prints(leaves, treedef)[0] != before
