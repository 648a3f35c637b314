from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml import linalg

NAMES = tuple(linalg.NEWTON_SCHULZ_COEFFICIENTS)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def with_spectrum(m, n, singular_values, seed=0):
    """A matrix with these singular values and random singular vectors, in float64 NumPy."""
    generator = np.random.default_rng(seed)
    u = np.linalg.qr(generator.normal(size=(m, len(singular_values))))[0]
    v = np.linalg.qr(generator.normal(size=(n, len(singular_values))))[0]
    return (u * np.asarray(singular_values)) @ v.T


def polar_by_numpy(matrix):
    u, _, vt = np.linalg.svd(np.float64(matrix), full_matrices=False)
    return u @ vt


# Newton-Schulz


@pytest.mark.parametrize("name", NAMES)
def test_each_singular_value_goes_through_the_polynomial_and_vectors_stay(name):
    singular_values = np.array([2.0, 1.0, 0.5, 0.1, 0.02])
    matrix = with_spectrum(7, 5, singular_values)
    expected = singular_values / np.linalg.norm(matrix)
    if name == "polar_express":
        expected = expected / 1.02
    for a, b, c in linalg.NEWTON_SCHULZ_COEFFICIENTS[name]:
        expected = a * expected + b * expected**3 + c * expected**5
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    actual = linalg.newton_schulz(jnp.asarray(matrix, jnp.float32), name)
    np.testing.assert_allclose(actual, (u * expected) @ vt, atol=2e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "low", "high"), [("muon5", 0.65, 1.2), ("dion", 0.9, 1.1), ("polar_express", 0.8, 1.2)]
)
def test_a_well_conditioned_matrix_comes_out_nearly_orthogonal(name, low, high, dtype):
    matrix = normal(64, 24)
    result = linalg.newton_schulz(matrix, name, dtype=dtype)
    assert result.dtype == jnp.float32
    values = np.linalg.svd(np.asarray(result), compute_uv=False)
    assert low <= values.min() <= values.max() <= high
    exact = polar_by_numpy(matrix)
    cosine = np.sum(exact * np.asarray(result)) / np.linalg.norm(exact) / np.linalg.norm(result)
    assert cosine > 0.98


def test_the_transpose_goes_through_and_batches_are_separate_matrices():
    stack = normal(2, 3, 12, 5)
    result = linalg.newton_schulz(stack)
    np.testing.assert_allclose(linalg.newton_schulz(stack.mT), result.mT, atol=1e-6)
    for index in np.ndindex(2, 3):
        np.testing.assert_allclose(linalg.newton_schulz(stack[index]), result[index], atol=1e-5)
    np.testing.assert_allclose(jax.vmap(linalg.newton_schulz)(stack), result, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_zero_stays_zero_and_huge_or_tiny_matrices_are_only_rescaled(name):
    matrix = normal(6, 9)
    np.testing.assert_array_equal(linalg.newton_schulz(jnp.zeros((3, 4)), name), np.zeros((3, 4)))
    usual = linalg.newton_schulz(matrix, name, epsilon=0)
    for factor in (1e-30, 1e30, 1e37):
        np.testing.assert_allclose(linalg.newton_schulz(factor * matrix, name, epsilon=0), usual, atol=1e-5)


def test_coefficients_may_be_given_as_numbers():
    matrix = normal(8, 6)
    triple = linalg.NEWTON_SCHULZ_COEFFICIENTS["muon5"][0]
    np.testing.assert_array_equal(
        linalg.newton_schulz(matrix, jnp.array(triple)), linalg.newton_schulz(matrix)
    )
    assert linalg.newton_schulz_coefficients(np.ones((7, 3))).shape == (7, 3)
    # The classical iteration of Newton and Schulz, long enough, is exact.
    converged = linalg.newton_schulz(matrix, [(1.5, -0.5, 0.0)] * 40)
    np.testing.assert_allclose(converged, polar_by_numpy(matrix), atol=1e-5)


def test_the_dtype_of_the_matrix_is_kept_and_float64_is_computed_in_float64():
    assert linalg.newton_schulz(normal(4, 6, dtype=jnp.bfloat16)).dtype == jnp.bfloat16
    with jax.enable_x64(True):
        matrix = normal(5, 4, dtype=jnp.float64)
        exact = linalg.newton_schulz(matrix, [(1.5, -0.5, 0.0)] * 60)
        assert exact.dtype == jnp.float64
        np.testing.assert_allclose(exact, polar_by_numpy(matrix), atol=1e-12)


@pytest.mark.parametrize("bad", ["muon", np.ones(4), np.ones((0, 3)), np.ones((2, 2, 3))])
def test_bad_coefficients_are_refused(bad):
    with pytest.raises(ValueError, match="coefficients"):
        linalg.newton_schulz(jnp.ones((2, 2)), bad)


@pytest.mark.parametrize(
    "call",
    [linalg.newton_schulz, linalg.polar, linalg.cholesky_qr2, lambda x: linalg.rsvd(jax.random.key(0), x, 1)],
)
def test_a_vector_is_refused(call):
    with pytest.raises((ValueError, TypeError)):
        call(jnp.ones(3))


# The exact polar factor


def test_polar_equals_numpy_and_drops_what_is_zero():
    stack = normal(2, 4, 7)
    for one, expected in zip(linalg.polar(stack), stack):
        np.testing.assert_allclose(one, polar_by_numpy(expected), atol=1e-5)
    deficient = with_spectrum(6, 5, [3.0, 0.2])
    factor = np.asarray(linalg.polar(jnp.asarray(deficient, jnp.float32)))
    np.testing.assert_allclose(np.linalg.svd(factor, compute_uv=False), [1, 1, 0, 0, 0], atol=1e-5)
    np.testing.assert_array_equal(linalg.polar(jnp.zeros((3, 2))), np.zeros((3, 2)))
    assert linalg.polar(normal(3, 3, dtype=jnp.bfloat16)).dtype == jnp.bfloat16


# Cholesky-QR2


def hard_cases():
    easy = np.random.default_rng(0).normal(size=(30, 6))
    yield "well conditioned", easy, 6
    yield "condition 1e6", with_spectrum(30, 6, 10.0 ** -np.linspace(0, 6, 6)), 6
    yield "two equal columns", np.hstack([easy[:, :5], easy[:, 4:5]]), 6
    yield "a zero column", easy * np.array([1, 1, 0, 1, 1, 1]), 5
    yield "rank two", with_spectrum(30, 6, [1.0, 0.5]), None
    yield "zero", 0 * easy, 0
    yield "huge", 1e30 * easy, 6
    yield "square", easy[:6], 6


@pytest.mark.parametrize(
    ("name", "matrix", "rank"), list(hard_cases()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_q_is_orthonormal_r_triangular_and_their_product_the_matrix(name, matrix, rank):
    matrix = jnp.asarray(matrix, jnp.float32)
    q, r = linalg.cholesky_qr2(matrix)
    scale = max(float(jnp.abs(matrix).max()), 1e-30)
    np.testing.assert_allclose(q @ r / scale, matrix / scale, atol=2e-6)
    np.testing.assert_array_equal(np.tril(r, -1), np.zeros_like(r))
    values = np.linalg.svd(np.asarray(q), compute_uv=False)
    assert np.isfinite(values).all()
    if rank is None:  # completed by directions of its own choice
        rank = 6
    np.testing.assert_allclose(values[:rank], 1.0, atol=2e-5)
    np.testing.assert_allclose(values[rank:], 0.0, atol=2e-5)


def test_a_hard_matrix_in_a_batch_does_not_disturb_the_others():
    stack = jnp.stack([normal(20, 4), jnp.zeros((20, 4)), normal(20, 4, seed=1)])
    q, r = linalg.cholesky_qr2(stack)
    for index in (0, 2):
        np.testing.assert_allclose(q[index].T @ q[index], np.eye(4), atol=1e-5)
    np.testing.assert_allclose(q @ r, stack, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(linalg.cholesky_qr2)(stack)[0], q, atol=1e-5)


def test_more_columns_than_rows_are_refused():
    with pytest.raises(ValueError, match="more columns than rows"):
        linalg.cholesky_qr2(jnp.ones((2, 3)))


# Randomised singular value decomposition


def product(factors):
    u, s, v = factors
    return (u * s[..., None, :]) @ v.mT


@pytest.mark.parametrize("qr", ["householder", "cholesky2"])
@pytest.mark.parametrize("shape", [(40, 25), (25, 40), (3, 20, 30)], ids=str)
def test_a_matrix_of_low_rank_is_found_exactly(shape, qr):
    *batch, m, n = shape
    matrix = normal(*batch, m, 4) @ normal(*batch, 4, n, seed=1)
    for rank in (4, 7):
        u, s, v = linalg.rsvd(jax.random.key(3), matrix, rank, qr=qr)
        assert u.shape == (*batch, m, rank)
        assert s.shape == (*batch, rank)
        assert v.shape == (*batch, n, rank)
        scale = float(jnp.abs(matrix).max())
        np.testing.assert_allclose(product((u, s, v)) / scale, matrix / scale, atol=1e-5)
        leading = np.linalg.svd(np.asarray(matrix), compute_uv=False)[..., :4]
        np.testing.assert_allclose(s[..., :4], leading, rtol=1e-4)


@pytest.mark.parametrize("qr", ["householder", "cholesky2"])
def test_the_mean_error_keeps_its_bound_over_200_keys(qr):
    rank, oversampling = 4, 5
    singular_values = 0.8 ** np.arange(24)
    exact = with_spectrum(30, 24, singular_values)
    matrix = jnp.asarray(exact, jnp.float32)
    tail = np.sqrt(np.sum(singular_values[rank:] ** 2))

    @jax.jit
    @jax.vmap
    def errors(key):
        # All columns of the sketch kept: the sketch stage alone.
        sketch = product(linalg.rsvd(key, matrix, rank + oversampling, 0, qr=qr))
        truncated = product(linalg.rsvd(key, matrix, rank, oversampling, qr=qr))
        passes = product(linalg.rsvd(key, matrix, rank, oversampling, 2, qr=qr))
        return jnp.stack([jnp.linalg.norm(matrix - one) for one in (sketch, truncated, passes)])

    sketch, truncated, passes = np.asarray(errors(jax.random.split(jax.random.key(0), 200))).T
    assert sketch.mean() <= np.sqrt(1 + rank / (oversampling - 1)) * tail
    assert (truncated <= tail + sketch + 1e-5).all()
    assert (truncated >= tail - 1e-5).all()
    assert passes.mean() < min(1.01 * tail, truncated.mean())


@pytest.mark.parametrize("qr", ["householder", "cholesky2"])
@pytest.mark.parametrize(("m", "n"), [(9, 20), (20, 9)])
def test_with_a_full_sketch_it_is_the_truncated_decomposition_of_numpy(m, n, qr):
    matrix = normal(m, n)
    u, s, vt = np.linalg.svd(np.float64(matrix), full_matrices=False)
    expected = (u[:, :4] * s[:4]) @ vt[:4]
    factors = linalg.rsvd(jax.random.key(1), matrix, 4, oversampling=5, qr=qr)
    np.testing.assert_allclose(product(factors), expected, atol=2e-5)
    u, _, v = factors
    np.testing.assert_allclose(u.T @ u, np.eye(4), atol=1e-5)
    np.testing.assert_allclose(v.T @ v, np.eye(4), atol=1e-5)


@pytest.mark.parametrize("qr", ["householder", "cholesky2"])
def test_the_rank_is_clamped_and_a_zero_or_bfloat16_matrix_is_finite(qr):
    u, s, v = linalg.rsvd(jax.random.key(0), normal(1, 6), 8, qr=qr)
    assert (u.shape, s.shape, v.shape) == ((1, 1), (1,), (6, 1))
    np.testing.assert_allclose(product((u, s, v)), normal(1, 6), atol=1e-5)
    zero = linalg.rsvd(jax.random.key(0), jnp.zeros((5, 4)), 2, qr=qr)
    np.testing.assert_array_equal(product(zero), np.zeros((5, 4)))
    assert all(
        leaf.dtype == jnp.float32
        for leaf in linalg.rsvd(jax.random.key(0), normal(5, 4, dtype=jnp.bfloat16), 2, qr=qr)
    )


def test_its_sketch_is_the_documented_one():
    matrix = normal(12, 10)
    key = jax.random.key(5)
    omega = np.asarray(jax.random.normal(key, (10, 6)))
    q = np.linalg.qr(np.asarray(matrix) @ omega)[0]
    u, s, vt = np.linalg.svd(q.T @ np.asarray(matrix), full_matrices=False)
    np.testing.assert_allclose(
        product(linalg.rsvd(key, matrix, 3, oversampling=3)), (q @ u[:, :3] * s[:3]) @ vt[:3], atol=2e-5
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 0}, "rank"),
        ({"rank": 2, "oversampling": -1}, "oversampling"),
        ({"rank": 2, "power_iters": -1}, "power_iters"),
        ({"rank": 2, "qr": "qr"}, "qr"),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        linalg.rsvd(jax.random.key(0), jnp.ones((3, 3)), **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_input_is_widened_before_anything_is_computed(dtype):
    matrix = jnp.asarray(np.random.default_rng(0).normal(0, 20, (40, 64)), dtype)
    expected = linalg.newton_schulz(matrix.astype(jnp.float32), dtype=jnp.float32).astype(dtype)
    got = linalg.newton_schulz(matrix, dtype=jnp.float32)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.float32(got), np.float32(expected))


FUNCTIONS = {
    "newton_schulz": linalg.newton_schulz,
    "polar": linalg.polar,
    "cholesky_qr2": linalg.cholesky_qr2,
    "rsvd": lambda matrix: linalg.rsvd(jax.random.key(0), matrix, 1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_matrices_are_real_floating_point_arrays_or_nested_lists(name):
    function = FUNCTIONS[name]
    rows = [[3.0, 1.0], [0.5, 2.0]]
    jax.tree.map(np.testing.assert_array_equal, function(rows), function(jnp.array(rows)))
    for dtype in ("int32", "bool", "complex64"):
        with pytest.raises(TypeError, match=rf"{name}: .*{dtype}"):
            function(jnp.ones((2, 2), dtype))


def test_newton_schulz_has_no_slope_at_a_zero_matrix_and_keeps_nan():
    stack = jnp.stack([jnp.zeros((2, 3)), normal(2, 3)])
    slope = jax.grad(lambda x: jnp.sum(linalg.newton_schulz(x) ** 3))(stack)
    np.testing.assert_array_equal(slope[0], np.zeros((2, 3)))
    assert np.isfinite(slope[1]).all()
    assert np.abs(slope[1]).max() > 0
    assert np.isnan(linalg.newton_schulz(stack.at[1, 0, 0].set(jnp.nan))[1]).all()


def test_newton_schulz_refuses_dtypes_that_cannot_hold_its_products():
    with pytest.raises(ValueError, match="dtype='int32' must be a floating-point dtype"):
        linalg.newton_schulz(jnp.ones((2, 2)), dtype=jnp.int32)
