"""Leaves of a partial sum come back from the arrays that they are strung together in, and are checked there."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elastic_train.step.flat import Layout, Packing
from tests.property.examples import examples

LARGE_BYTES = 64
leaves = st.tuples(
    st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["float32", "bfloat16", "int32", "int8"]), st.booleans()
)


@given(st.lists(leaves, min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 2**31))
@examples(200)
def test_what_is_packed_comes_back(described, weight, seed):
    shapes = [jax.ShapeDtypeStruct((1, *shape), dtype) for shape, dtype, _ in described]
    shapes.append(jax.ShapeDtypeStruct((1,), "float32"))
    checked = [*(is_checked for _, _, is_checked in described), False]
    weight = len(described) if weight > len(described) or shapes[weight].shape != (1,) else weight
    packing = Packing(Layout(shapes, checked, weight), LARGE_BYTES)
    rng = np.random.default_rng(seed)
    given_leaves = tuple(jnp.asarray(rng.integers(-100, 100, shape.shape), shape.dtype) for shape in shapes)
    arrays = packing.pack(given_leaves)
    assert [(array.shape, array.dtype) for array in arrays] == [(s.shape, s.dtype) for s in packing.packed.leaves]
    for found, leaf in zip(packing.unpack(arrays), given_leaves, strict=True):
        assert (found.shape, found.dtype) == (leaf.shape, leaf.dtype)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(leaf))
    small = {(str(s.dtype), c) for s, c in zip(shapes, packing_checked(shapes, checked), strict=True)}
    large = sum(leaf.nbytes >= LARGE_BYTES for leaf in given_leaves)
    assert len(arrays) <= len(small) + large + 1

    # What makes a sum useless does so wherever it is, and nothing else does.
    number = int(rng.integers(len(shapes)))
    if jnp.issubdtype(shapes[number].dtype, jnp.floating) and given_leaves[number].size:
        broken = [*given_leaves]
        broken[number] = broken[number].at[(0,) * broken[number].ndim].set(np.nan)
        assert bool(packing.packed.is_finite(packing.pack(tuple(broken)))) == (not checked[number])
    assert bool(packing.packed.is_finite(arrays))
    assert bool(packing.packed.has_weight(arrays)) == (float(given_leaves[weight].reshape(())) != 0)


def packing_checked(shapes, checked):
    return Layout(shapes, checked).checked
