from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from effml import linalg


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# Hadamard


@pytest.mark.parametrize(
    "n", [1, 2, 8, 64, 12, 24, 192, 20, 160, 28, 56, 36, 576, 52, 60, 76, 84, 100, 108, 124, 148]
)
def test_hadamard_matrices_are_what_they_are_called(n):
    with jax.enable_x64(True):
        h = np.asarray(linalg.hadamard(n, dtype=jnp.float64))
        x = np.random.default_rng(0).normal(size=(3, n))
        transformed = linalg.fht(jnp.asarray(x))
        again = linalg.fht(transformed)
    np.testing.assert_allclose(np.abs(h), 1 / np.sqrt(n), rtol=1e-12)
    np.testing.assert_allclose(h @ h.T, np.eye(n), atol=1e-12)
    np.testing.assert_array_equal(h, h.T)
    np.testing.assert_allclose(transformed, x @ h, atol=1e-12)
    np.testing.assert_allclose(again, x, atol=1e-12)
    assert linalg.hadamard_order(n) == n


def test_powers_of_two_are_scipys():
    for n in (1, 2, 16, 128):
        expected = scipy.linalg.hadamard(n) / np.sqrt(n)
        np.testing.assert_allclose(linalg.hadamard(n), expected, atol=1e-7)


def test_signs_make_it_random_and_keep_it_orthogonal():
    signs = jax.random.rademacher(jax.random.key(0), (12,), jnp.float32)
    h = linalg.hadamard(12, signs=signs)
    np.testing.assert_allclose(h.T @ h, np.eye(12), atol=1e-6)
    np.testing.assert_array_equal(h, signs[:, None] * linalg.hadamard(12))
    x = normal(4, 12)
    np.testing.assert_allclose(x @ h, linalg.fht(x * signs), atol=1e-5)


def test_blocks_any_axis_any_dtype_and_gradients():
    x = normal(5, 48, 3)
    blocks = scipy.linalg.block_diag(*[scipy.linalg.hadamard(16) / 4] * 3)
    np.testing.assert_allclose(linalg.hadamard(48, order=16), blocks, atol=1e-7)
    expected = np.einsum("aib,ij->ajb", x, blocks)
    np.testing.assert_allclose(linalg.fht(x, 1, order=16), expected, atol=1e-5)
    assert linalg.hadamard_order(3 * 256) == 768
    assert linalg.hadamard_order(43 * 256) == 256
    assert linalg.fht(x.astype(jnp.bfloat16), 1).dtype == jnp.bfloat16
    # Symmetric and orthogonal: the gradient of a product with the result is the transform of the other factor.
    other = normal(5, 48, 3, seed=1)
    gradient = jax.grad(lambda x: jnp.sum(linalg.fht(x, 1) * other))(x)
    np.testing.assert_allclose(gradient, linalg.fht(other, 1), atol=1e-5)


def test_the_transform_costs_what_its_factors_do():
    program = jax.make_jaxpr(linalg.fht)(jnp.zeros((1, 14336)))
    sizes = [eqn.invars[1].aval.shape[0] for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    assert np.prod(sizes) == 14336
    assert sum(sizes) < 100


@pytest.mark.parametrize("n", [3, 6, 22, 44, 11008, 0])
def test_sizes_without_a_hadamard_matrix_are_refused_with_those_that_have_one(n):
    with pytest.raises(ValueError, match=r"2\^k, 12\*2\^k, 20\*2\^k, 28\*2\^k"):
        linalg.hadamard(n)
    with pytest.raises(ValueError, match="no Hadamard matrix of size"):
        linalg.fht(jnp.zeros((2, n)))
    with pytest.raises(ValueError, match=r"order=5 must divide 40"):
        linalg.fht(jnp.zeros(40), order=5)
    with pytest.raises(TypeError, match="fht: x must be real"):
        linalg.fht(jnp.zeros(4, jnp.int32))


# Cayley


def skew(*shape, size=1.0, seed=0):
    a = np.random.default_rng(seed).normal(size=shape) * size
    return a - np.swapaxes(a, -1, -2)


def test_cayley_is_the_formula_and_orthogonal():
    w = skew(3, 7, 7)
    with jax.enable_x64(True):
        actual = np.asarray(linalg.cayley(jnp.asarray(w)))
    identity = np.eye(7)
    np.testing.assert_allclose(actual, np.linalg.inv(identity - w / 2) @ (identity + w / 2), atol=1e-12)
    np.testing.assert_allclose(
        actual.swapaxes(-1, -2) @ actual, np.broadcast_to(identity, w.shape), atol=1e-12
    )
    np.testing.assert_allclose(np.linalg.det(actual), 1, rtol=1e-12)


def test_the_fixed_point_comes_to_the_exact_one_by_half_the_norm_each_time():
    w = skew(6, 6)
    w = w / np.linalg.norm(w, 2) * 0.5
    with jax.enable_x64(True):
        exact = linalg.cayley(jnp.asarray(w))
        errors = [
            np.linalg.norm(exact - linalg.cayley(jnp.asarray(w), exact=False, iters=k), 2) for k in (1, 5, 9)
        ]
    assert errors[1] < 0.3**4 * errors[0]
    assert errors[2] < 0.3**4 * errors[1]


@pytest.mark.parametrize(("exact", "limit"), [(True, 1e-12), (False, 1e-4)])
def test_a_step_stays_on_the_rotations_and_goes_downhill(exact, limit):
    c = np.random.default_rng(0).normal(size=(4, 9, 9)) * 100
    x = np.linalg.qr(np.random.default_rng(1).normal(size=(4, 9, 9)))[0]
    with jax.enable_x64(exact):
        dtype = jnp.float64 if exact else jnp.float32
        moved = linalg.cayley_step(jnp.asarray(x, dtype), jnp.asarray(c, dtype), 1.5, exact=exact)
        off = float(linalg.orthogonality_error(moved.matrix).max())
    assert off < limit
    assert (np.einsum("bij,bij->b", c, np.float64(moved.matrix) - x) < 0).all()
    np.testing.assert_allclose(np.linalg.det(np.asarray(moved.matrix)), np.linalg.det(x), rtol=1e-3)
    # The formula, with the inverse written out.
    b = -c.swapaxes(-1, -2)
    half = b @ x - 0.5 * x.swapaxes(-1, -2) @ (x @ b @ x)
    w = half - half.swapaxes(-1, -2)
    step = np.minimum(1.5, 1 / np.abs(w).sum(-2).max(-1))
    np.testing.assert_allclose(moved.step, step, rtol=1e-4)
    aw, identity = step[:, None, None] * w, np.eye(9)
    expected = (np.linalg.inv(identity - aw / 2) @ (identity + aw / 2) @ x.swapaxes(-1, -2)).swapaxes(-1, -2)
    np.testing.assert_allclose(moved.matrix, expected, atol=1e-10 if exact else 1e-3)


@pytest.mark.parametrize("size", [8, 40])
def test_products_alone_reach_the_rotation_where_a_step_is_largest(size):
    """A start and a gradient along the axes: ||a W|| is 1, and five products leave 1e-2."""
    gradient = np.roll(np.eye(size, dtype=np.float32), size // 2, axis=0)
    gradient[: size // 2] *= -1
    step = functools.partial(linalg.cayley_step, jnp.eye(size), jnp.asarray(gradient), exact=False)
    found = step().matrix
    assert float(linalg.orthogonality_error(step(iters=5).matrix)) > 5e-3
    assert float(linalg.orthogonality_error(found)) < 2e-6
    np.testing.assert_allclose(found, linalg.cayley_step(jnp.eye(size), gradient).matrix, atol=2e-6)
    with jax.enable_x64(True):
        wide = linalg.cayley_step(jnp.eye(size), jnp.asarray(gradient, jnp.float64), exact=False).matrix
        assert float(linalg.orthogonality_error(wide)) < 1e-14


def test_products_that_do_not_converge_end():
    w = skew(2, 2)
    assert np.isfinite(linalg.cayley(jnp.asarray(1.99 * w / np.linalg.norm(w, 2)), exact=False)).all()


def test_a_zero_gradient_moves_nothing_and_nothing_is_nan():
    x = jnp.asarray(np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0], jnp.float32)
    for exact in (True, False):
        moved = linalg.cayley_step(x, jnp.zeros_like(x), exact=exact)
        np.testing.assert_allclose(moved.matrix, x, atol=1e-6)


def test_cayley_refuses_what_is_not_square():
    with pytest.raises(ValueError, match=r"cayley: matrices must be square, the shape is \(2, 3\)"):
        linalg.cayley(jnp.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"gradient of shape \(3, 3\) does not fit"):
        linalg.cayley_step(jnp.eye(2), jnp.eye(3))
    with pytest.raises(ValueError, match="iters=0"):
        linalg.cayley(jnp.eye(2), exact=False, iters=0)
