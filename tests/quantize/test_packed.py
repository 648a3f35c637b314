"""The packed layout, bit by bit, against Python's integers."""

from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml import quantize, trees
from effml.quantize import PackedTensor


def random_packed(bits, inputs, outputs, groups, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), size=(inputs, outputs))
    scale = rng.uniform(0.1, 2.0, size=(outputs, groups)).astype(np.float32)
    return codes, scale, PackedTensor.pack(codes, scale, bits)


@pytest.mark.parametrize("bits", range(2, 9))
def test_eight_codes_are_one_little_endian_integer(bits):
    codes, _, packed = random_packed(bits, 19, 3, 1)
    assert packed.codes.shape == (3, 3 * bits)
    assert packed.codes.dtype == jnp.uint8
    half = 2 ** (bits - 1)
    for output in range(3):
        row = np.asarray(packed.codes)[output].tobytes()
        for lane in range(3):
            number = int.from_bytes(row[lane * bits : (lane + 1) * bits], "little")
            for j in range(8):
                i = 8 * lane + j
                wanted = half + (codes[i, output] if i < 19 else 0)
                assert (number >> (j * bits)) & (2**bits - 1) == wanted


@pytest.mark.parametrize(("bits", "groups"), [(2, 1), (3, 3), (4, 2), (5, 1), (8, 6)])
def test_unpacking_gives_the_codes_and_the_kernel_back(bits, groups):
    codes, scale, packed = random_packed(bits, 18, 4, groups)
    np.testing.assert_array_equal(packed.unpack(), codes)
    assert packed.unpack().dtype == jnp.int8
    rows = np.repeat(scale.T, 18 // groups, axis=0)
    np.testing.assert_allclose(packed.dense(), codes * rows, rtol=1e-6)
    assert packed.dense(jnp.bfloat16).dtype == jnp.bfloat16
    assert packed.nbytes == quantize.packed_bytes(18, 4, bits, groups) == trees.byte_count(packed)
    assert packed.shape == (18, 4)


def test_a_last_group_may_be_shorter():
    codes, scale, packed = random_packed(4, 10, 2, 3)
    assert packed.group_size == 4
    rows = scale[:, np.arange(10) // 4].T
    np.testing.assert_allclose(packed.dense(), codes * rows, rtol=1e-6)


def test_it_is_a_pytree_whose_leaves_have_names():
    _, _, packed = random_packed(4, 16, 2, 1)
    assert trees.leaf_names({"query": {"packed": packed}}) == ["query.packed.codes", "query.packed.scale"]
    again = jax.tree.map(lambda leaf: leaf, packed)
    assert again.bits == 4
    assert again.inputs == 16

    @chex.assert_max_traces(n=1)
    def kernel(packed):
        return packed.dense()

    compiled = jax.jit(kernel)
    other = random_packed(4, 16, 2, 1, seed=1)[2]
    np.testing.assert_array_equal(compiled(packed), packed.dense())
    np.testing.assert_array_equal(compiled(other), other.dense())


def test_stacked_layers_are_kernels_behind_one_another():
    packed = [random_packed(3, 18, 4, 2, seed)[2] for seed in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *packed)
    assert stacked.shape == (3, 18, 4)
    assert stacked.group_size == 9
    assert stacked.nbytes == 3 * packed[0].nbytes
    np.testing.assert_array_equal(stacked.dense(), [one.dense() for one in packed])
    np.testing.assert_array_equal(stacked.unpack(), [one.unpack() for one in packed])


def test_packing_is_work_of_the_host():
    with pytest.raises(TypeError, match=r"PackedTensor.pack works on the host: call it outside jax\.jit"):
        jax.jit(lambda codes: PackedTensor.pack(codes, np.ones((2, 1)), 4))(np.zeros((3, 2), int))


def test_what_does_not_fit_is_refused():
    ones = np.ones((2, 1), np.float32)
    codes = np.zeros((3, 2), int)
    with pytest.raises(ValueError, match=r"don't fit 2 bits .-2 to 1"):
        PackedTensor.pack(codes + 2, ones, 2)
    with pytest.raises(ValueError, match=r"must be .2, groups., 1 to 3 groups"):
        PackedTensor.pack(codes, np.ones((3, 1)), 4)
    with pytest.raises(ValueError, match="finite and above 0"):
        PackedTensor.pack(codes, 0 * ones, 4)
    with pytest.raises(TypeError, match="must hold integers"):
        PackedTensor.pack(codes + 0.5, ones, 4)
    with pytest.raises(ValueError, match="neither of them 0"):
        PackedTensor.pack(codes[:0], ones, 4)
    with pytest.raises(ValueError, match="bits=16 is not packed"):
        PackedTensor.pack(codes, ones, 16)


def test_the_page_on_the_format_reads_it():
    page = (Path(__file__).parents[2] / "docs" / "packed_format.md").read_text()
    scope: dict = {}
    exec(page.split("```python")[1].split("```")[0], scope)
    for bits in range(2, 9):
        codes, _, packed = random_packed(bits, 19, 3, 1)
        for output in range(3):
            found = scope["codes_of_row"](np.asarray(packed.codes)[output], bits, 19)
            np.testing.assert_array_equal(found, codes[:, output])
