from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effml.optimize import CayleyState, scale_by_cayley


def orthogonal(*shape, seed=0):
    """Random, of determinant 1."""
    q = np.linalg.qr(np.random.default_rng(seed).normal(size=shape))[0]
    q[..., 0] *= np.linalg.det(q)[..., None]
    return q


def minimize(target, start, steps, **options):
    """tr(C^T X) over rotations, one compiled step; the parameters after each step."""
    chex.clear_trace_counter()
    optimizer = scale_by_cayley(**options)
    params = {"r": jnp.asarray(start, jnp.float32)}

    @jax.jit
    @chex.assert_max_traces(1)
    def step(params, state):
        gradient = jax.grad(lambda p: jnp.sum(p["r"] * target))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state, seen = optimizer.init(params), []
    for _ in range(steps):
        params, state = step(params, state)
        seen.append(params["r"])
    return seen, state


@pytest.mark.parametrize("exact", [True, False])
def test_descent_reaches_the_procrustes_solution_and_stays_orthogonal(exact):
    c = np.random.default_rng(1).normal(size=(3, 6, 6))
    u, s, vt = np.linalg.svd(c)
    polar = -u @ vt
    # In the start's component the solution is the polar factor, with its weakest direction turned if need be.
    turned = np.linalg.det(polar) < 0
    flip = np.ones((3, 6))
    flip[turned, -1] = -1
    solution = -(u * flip[:, None]) @ vt
    values = -(s * flip).sum(-1)
    seen, state = minimize(c, orthogonal(3, 6, 6), 400, max_step=0.2, exact=exact)
    losses = np.array([np.einsum("bij,bij->b", c, x) for x in seen])
    np.testing.assert_allclose(losses[-1], values, rtol=1e-4)
    np.testing.assert_allclose(seen[-1], solution, atol=0.03)
    assert (np.diff(losses, axis=0) < 1e-5).all()
    off = np.abs(seen[-1].mT @ seen[-1] - np.eye(6)).max()
    assert off < (1e-5 if exact else 1e-4)
    assert (np.linalg.det(seen[-1]) > 0).all()
    assert state.step.keys() == {"r"}
    assert state.step["r"].shape == (3,)


def test_the_step_is_the_smaller_of_the_ceiling_and_what_the_gradient_allows():
    c = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)
    x = jnp.asarray(orthogonal(4, 4), jnp.float32)
    for scale, capped in ((1e-3, False), (1e3, True)):
        optimizer = scale_by_cayley(0.5)
        state = optimizer.update({"r": scale * c}, optimizer.init({"r": x}), {"r": x})[1]
        skew = np.float64(x.T @ (scale * c))
        largest = np.abs((skew - skew.T) / 2).sum(0).max()
        expected = 1 / largest if capped else 0.5
        np.testing.assert_allclose(state.step["r"], expected, rtol=1e-4)


def test_a_zero_gradient_leaves_rotations_where_they_are():
    x = {"r": jnp.asarray(orthogonal(2, 5, 5), jnp.float32)}
    optimizer = scale_by_cayley()
    updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, x), optimizer.init(x), x)
    assert np.abs(updates["r"]).max() < 1e-6


def test_updates_are_the_difference_and_the_schedule_counts_steps():
    seen = []
    optimizer = scale_by_cayley(lambda count: jnp.where(count < 1, 1e-3, 1e-5))
    x, g = jnp.asarray(orthogonal(4, 4), jnp.float32), jnp.asarray(orthogonal(4, 4, seed=2), jnp.float32)
    state = optimizer.init(x)
    for _ in range(2):
        updates, state = optimizer.update(g, state, x)
        seen.append(float(jnp.abs(updates).max()))
    assert isinstance(state, CayleyState)
    assert int(state.count) == 2
    assert 50 < seen[0] / seen[1] < 200


def test_renormalising_by_count_takes_rounding_away():
    x = jnp.asarray(orthogonal(8, 8), jnp.float32)
    bent = x.at[0, 0].add(3e-3)
    zero = jnp.zeros_like(x)
    for every, limit in ((1, 2e-6), (1000, 1.0)):
        optimizer = scale_by_cayley(renorm_every=every)
        updates, _ = optimizer.update(zero, optimizer.init(x), bent)
        new = np.float64(bent + updates)
        off = np.abs(new.T @ new - np.eye(8)).max()
        assert off < limit
        assert (every == 1) or off > 1e-4


def test_it_takes_part_in_a_partition_with_frozen_weights():
    params = {"weights": jnp.ones((3, 4)), "rotation": jnp.eye(3)}
    optimizer = optax.partition(
        {"turn": scale_by_cayley(), "hold": optax.set_to_zero()},
        {"weights": "hold", "rotation": "turn"},
    )
    gradient = jax.grad(lambda p: jnp.sum(p["rotation"] @ p["weights"] * jnp.arange(12.0).reshape(3, 4)))(
        params
    )
    updates, state = optimizer.update(gradient, optimizer.init(params), params)
    assert float(jnp.abs(updates["weights"]).max()) == 0
    assert float(jnp.abs(updates["rotation"]).max()) > 0
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    assert shapes == [(), ()]  # a count and one step size: no state for the weights


def test_hyperparameters_can_be_injected():
    x, g = jnp.asarray(orthogonal(4, 4), jnp.float32), jnp.asarray(orthogonal(4, 4, seed=2), jnp.float32)
    plain = scale_by_cayley(0.01)
    injected = optax.inject_hyperparams(scale_by_cayley, static_args=("iters", "renorm_every", "exact"))(0.01)
    expected = plain.update(g, plain.init(x), x)[0]
    np.testing.assert_array_equal(injected.update(g, injected.init(x), x)[0], expected)


def test_what_is_no_rotation_is_refused():
    optimizer = scale_by_cayley()
    with pytest.raises(ValueError, match=r"kernel of shape \(2, 3\) is no square matrix"):
        optimizer.init({"kernel": jnp.ones((2, 3))})
    with pytest.raises(ValueError, match=r"r is not orthogonal: .* is 3"):
        optimizer.init({"r": 2 * jnp.eye(2)})
    with pytest.raises(TypeError, match="r is bfloat16; rotations drift"):
        optimizer.init({"r": jnp.eye(2, dtype=jnp.bfloat16)})
    with pytest.raises(ValueError, match="needs params"):
        optimizer.update({"r": jnp.eye(2)}, optimizer.init({"r": jnp.eye(2)}))
    for options in ({"max_step": 0.0}, {"max_step": float("inf")}, {"iters": 0}, {"renorm_every": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            scale_by_cayley(**options)


def test_one_step_by_products_alone_stays_orthogonal_where_gradients_lie_along_the_axes():
    target = np.roll(np.eye(16), 8, axis=0)
    target[:8] *= -1
    (moved,), state = minimize(target, np.eye(16), 1, exact=False)
    assert float(state.step["r"]) > 0.4
    assert np.abs(moved.mT @ moved - np.eye(16)).max() < 2e-6
