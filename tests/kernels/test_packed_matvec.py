"""Products with packed weights against float64, for every number of bits, both implementations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matvec import FEW_ROWS, cpu, packed_matvec, reference

needs_native = pytest.mark.skipif(cpu.why_not() is not None, reason=f"no native code: {cpu.why_not()}")
IMPLEMENTATIONS = ["xla", pytest.param("cpu", marks=needs_native)]
# (rows, inputs, outputs, groups): one number; tails of eight and of a span; whole spans; groups that are spans, parts
# of one, of eight and of nothing; more outputs than a tile; a last group that is short.
CASES = [
    (1, 1, 1, 1),
    (2, 7, 3, 1),
    (1, 8, 5, 2),
    (5, 128, 9, 1),
    (1, 200, 3, 1),
    (1, 576, 300, 1),
    (3, 576, 17, 9),
    (1, 256, 6, 2),
    (2, 192, 4, 6),
    (1, 300, 4, 7),
    (6, 100, 4, 3),
    (1, 100, 4, 100),
]


def pack(codes, bits):
    """Every code's bits one after the other, by Python's own integers."""
    rows = []
    for row in codes:
        row = list(row) + [1 << bits - 1] * (-len(row) % 8)
        whole = sum(int(code) << bits * j for j, code in enumerate(row))
        rows.append(list(whole.to_bytes(len(row) // 8 * bits, "little")))
    return np.array(rows, np.uint8)


def case(bits, rows, inputs, outputs, groups, seed=0):
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (outputs, inputs))
    scale = random.uniform(0.5, 2, (outputs, groups)).astype(np.float32)
    x = random.normal(size=(rows, inputs)).astype(np.float32)
    size = -(-inputs // groups)
    kernel = (codes - 2.0 ** (bits - 1)) * scale.astype(np.float64)[:, np.arange(inputs) // size]
    return x, pack(codes, bits), scale, kernel.T


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_it_is_the_product_with_the_unpacked_matrix(bits, implementation):
    for rows, inputs, outputs, groups in CASES if implementation == "cpu" else CASES[5:7]:
        x, codes, scale, kernel = case(bits, rows, inputs, outputs, groups)
        y = packed_matvec(x, codes, scale, bits=bits, implementation=implementation)
        bound = (inputs + 8) * 2.0**-24 * (abs(x).astype(np.float64) @ abs(kernel)) + 1e-30
        assert y.dtype == jnp.float32
        assert (abs(np.asarray(y) - x @ kernel) <= bound).all(), (rows, inputs, outputs, groups)


@pytest.mark.parametrize("bits", range(2, 9))
def test_unpacking_is_exact(bits):
    _, codes, scale, kernel = case(bits, 1, 45, 6, 4)
    unpacked = reference.unpack(jnp.asarray(codes), jnp.asarray(scale), bits=bits, inputs=45)
    np.testing.assert_array_equal(unpacked, kernel.T.astype(np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_fills_the_last_eight_codes_does_not_matter(implementation):
    x, codes, scale, _ = case(4, 2, 13, 3, 1)
    filled = codes.copy()
    filled[:, -2:] = 0xFF
    filled[:, -2] = codes[:, -2]
    filled[:, 6] = (codes[:, 6] & 0x0F) | 0xF0  # code 12 is the last of 13
    product = functools.partial(packed_matvec, x, scale=scale, bits=4, implementation=implementation)
    np.testing.assert_array_equal(product(codes=codes), product(codes=filled))


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_transformations_and_gradients(implementation):
    x, codes, scale, kernel = case(3, 6, 40, 300, 5)
    x = x.reshape(3, 2, 40)
    f = functools.partial(packed_matvec, bits=3, implementation=implementation)
    expected = x @ kernel
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    close(f(x, codes, scale), expected)
    close(f(x[0, 0], codes, scale), expected[0, 0])
    close(jax.jit(f)(x, codes, scale), expected)
    close(jax.vmap(f, (0, None, None))(x, codes, scale), expected)
    two = np.stack([codes, codes[::-1]])
    close(jax.vmap(f, (None, 0, None))(x[0], two, scale)[0], expected[0])
    assert jax.eval_shape(f, x, codes, scale).shape == (3, 2, 300)

    weights = np.random.default_rng(1).normal(size=expected.shape)
    loss = lambda x, scale: (f(x, codes, scale) * weights).sum()
    dx, dscale = jax.jit(jax.grad(loss, (0, 1)))(x, scale)
    close(dx, weights @ kernel.T)
    whole = np.einsum("bro,bri->oi", weights, x.astype(np.float64)) * kernel.T
    close(dscale, whole.reshape(300, 5, 8).sum(-1) / scale)


def test_the_dense_matrix_never_exists():
    x, codes, scale, _ = case(4, 1, 512, 2048, 1)
    product = lambda x: reference.packed_matvec(x, codes, scale, bits=4)
    for run in (product, jax.grad(lambda x: product(x).sum())):
        memory = jax.jit(run).lower(jnp.asarray(x)).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4 * 512 * 2048 / 1.5


@needs_native
def test_none_is_native_for_few_rows_alone():
    _, codes, scale, _ = case(4, 1, 16, 8, 1)

    def calls_native(rows):
        f = jax.jit(functools.partial(packed_matvec, bits=4))
        return "effml_packed_matvec" in f.lower(jnp.ones((rows, 16)), codes, scale).as_text()

    assert calls_native(FEW_ROWS)
    assert not calls_native(FEW_ROWS + 1)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"bits": 9}, ValueError, "bits=9 must be one of 2 to 8"),
        ({"bits": 3}, ValueError, r"codes of shape \(5, 8\) must be"),
        ({"x": np.ones((1, 17), np.float32)}, ValueError, "codes of shape"),
        ({"x": np.ones((1, 16), int)}, TypeError, "x holds int"),
        ({"codes": np.ones((5, 8), np.int8)}, TypeError, "codes holds int8"),
        ({"scale": np.ones((4, 1), np.float32)}, ValueError, "scale of shape"),
        ({"scale": np.ones((5, 17), np.float32)}, ValueError, "scale of shape"),
        ({"implementation": "fast"}, ValueError, "'fast' is not known"),
        ({"implementation": "pallas"}, NotImplementedError, "no 'pallas' form"),
    ],
)
def test_bad_input_is_refused_in_words(change, error, text):
    x, codes, scale, _ = case(4, 1, 16, 5, 1)
    given = {"x": x, "codes": codes, "scale": scale, "bits": 4, **change}
    with pytest.raises(error, match=text):
        packed_matvec(given.pop("x"), given.pop("codes"), given.pop("scale"), **given)


def test_empty_products():
    assert packed_matvec(jnp.ones((0, 8)), np.zeros((5, 4), np.uint8), np.ones((5, 1)), bits=4).shape == (
        0,
        5,
    )
