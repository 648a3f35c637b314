from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from effml.quantize import respinquant
from effml.quantize.respinquant import _residual


def rotation(n, size=0.3, seed=0):
    skew = np.random.default_rng(seed).normal(size=(n, n)) * size
    return scipy.linalg.expm(skew - skew.T)


def dense(found):
    return np.eye(len(found.q)) + found.q @ found.m @ found.q.T


def eckart_young(transition, rank):
    values = np.linalg.svd(transition - np.eye(len(transition)), compute_uv=False)
    return np.sqrt((values[rank:] ** 2).sum())


@pytest.mark.parametrize("n", [15, 16])
def test_every_rank_is_orthogonal_and_even_ones_are_the_best_of_their_rank(n):
    transition = rotation(n)
    errors = []
    for rank in range(n + 1):
        found = _residual._subspace(transition, rank)  # odd ranks too, which the public function refuses
        approximation = dense(found)
        np.testing.assert_allclose(approximation.T @ approximation, np.eye(n), atol=1e-12)
        np.testing.assert_allclose(np.linalg.norm(approximation - transition), found.error, atol=1e-10)
        if rank % 2 and rank < n:
            assert found.error > eckart_young(transition, rank) + 1e-3
        else:
            np.testing.assert_allclose(found.error, eckart_young(transition, rank), atol=1e-10)
            errors.append(found.error)
    assert (np.diff(errors)[: n // 2] < 0).all()
    np.testing.assert_allclose(approximation, transition, atol=1e-12)


def test_it_is_the_papers_subspace_by_svd():
    transition = rotation(12)
    q = np.linalg.svd(transition - np.eye(12))[0][:, :4]
    left, _, right = np.linalg.svd(q.T @ transition @ q)
    theirs = np.eye(12) + q @ (left @ right - np.eye(4)) @ q.T
    np.testing.assert_allclose(dense(respinquant.residual_subspace(transition, 4)), theirs, atol=1e-10)


@pytest.mark.parametrize("rank", [2, 4, 6])
def test_planes_that_turn_by_one_angle_are_not_mixed(rank):
    turned = scipy.linalg.block_diag(
        *[[[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]] for a in (0.7, 0.7, 0.1, 0.1)]
    )
    basis = scipy.linalg.qr(np.random.default_rng(0).normal(size=(8, 8)))[0]
    transition = basis @ turned @ basis.T
    found = respinquant.residual_subspace(transition, rank)
    np.testing.assert_allclose(found.error, eckart_young(transition, rank), atol=1e-10)


def test_half_turns_and_the_identity():
    half = np.diag([-1.0, -1.0, 1.0, 1.0, 1.0])
    np.testing.assert_allclose(dense(respinquant.residual_subspace(half, 2)), half, atol=1e-12)
    found = respinquant.residual_subspace(np.eye(6), 4)
    np.testing.assert_allclose(dense(found), np.eye(6), atol=1e-12)
    assert respinquant.residual_subspace(rotation(6), 0).q.shape == (6, 0)


def test_three_thin_products_are_the_matrix():
    found = respinquant.residual_subspace(rotation(16), 6)
    x = np.random.default_rng(0).normal(size=(2, 3, 16))
    with jax.enable_x64(True):
        actual = respinquant.residual_rotate(jnp.asarray(x), jnp.asarray(found.q), jnp.asarray(found.m))
    np.testing.assert_allclose(actual, x @ dense(found), atol=1e-12)
    narrow = respinquant.residual_rotate(
        jnp.asarray(x, jnp.bfloat16), jnp.asarray(found.q, jnp.float32), jnp.asarray(found.m, jnp.float32)
    )
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(narrow), x @ dense(found), atol=0.1)


def test_its_multiplications_are_counted_from_the_program():
    program = jax.make_jaxpr(respinquant.residual_rotate)(
        jnp.ones((1, 64)), jnp.ones((64, 8)), jnp.ones((8, 8))
    )
    products = [eqn for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    counted = sum(eqn.invars[0].aval.size * eqn.outvars[0].aval.size for eqn in products)
    assert counted == respinquant.residual_macs(64, 8) == 2 * 64 * 8 + 8 * 8


@pytest.mark.parametrize(
    ("matrix", "rank", "message"),
    [
        (np.eye(8), 3, r"rank=3 must be even: .* \(try 4\)"),
        (np.eye(8), 10, "rank=10 must be between 0 and the width 8"),
        (np.eye(8), -2, "rank=-2 must be between"),
        (2 * np.eye(8), 2, r"transition is not orthogonal: .* is 3"),
        (np.ones((8, 4)), 2, r"transition of shape \(8, 4\) must be a square matrix"),
    ],
)
def test_what_is_refused(matrix, rank, message):
    with pytest.raises(TypeError, match=r"rank=4\.0 must be an integer"):
        _residual.check_rank(4.0, 8)
    with pytest.raises(ValueError, match=message):
        respinquant.residual_subspace(matrix, rank)
