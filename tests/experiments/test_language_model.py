from __future__ import annotations

import jax
import numpy as np
import optax
import pytest

from experiments import _language_model as shared

TINY = shared.LanguageModelConfig(**{**shared.SMOKE, "steps": 4, "seeds": 1, "rates": 2})


@pytest.fixture(scope="module")
def tokens():
    return shared.load_tokens(TINY, TINY.vocabulary)


def two_point(rate, vector_rate):
    """-rate times the difference of the two gradients plus a small step along the first."""

    def update(updates, state, params=None, *, prev_params_grad, **extra):
        move = lambda new, old: -rate(state) * (0.1 * new + (new - old))
        return jax.tree.map(move, updates, prev_params_grad), state + 1

    return optax.GradientTransformationExtraArgs(lambda params: 0, update)


def test_a_two_point_recipe_gets_the_gradient_of_the_same_batch_at_the_parameters_before(tokens):
    recipes = {"ours": shared.Recipe(two_point, grid=(0.1, 0.3), two_point=True)}
    trainer = shared.Trainer(TINY, tokens, recipes)
    seen = []
    runs = trainer.grid("ours", seen.append)
    assert runs["loss"].shape == (2, 1)
    assert runs["curve"].shape == (2, 1, TINY.evaluations)

    rate, _ = shared.schedules(0.3, TINY.steps)
    gradient = jax.jit(jax.grad(trainer.loss))
    params = previous = trainer.initial(TINY.seed)
    for step, starts in enumerate(shared.batch_starts(TINY, tokens, TINY.seed, TINY.steps)):
        batch = shared.windows(trainer.train, starts, TINY)
        new, old = gradient(params, batch), gradient(previous, batch)
        previous = params
        params = jax.tree.map(lambda p, a, b, s=step: p - rate(s) * (0.1 * a + (a - b)), params, new, old)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), seen[-1], params)
