"""The NNX module is the functions with their parameters held."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from effml.nn.cache import init_cache
from effml.nn.module import Transformer
from effml.nn.transformer import TransformerConfig, forward, init_params

CONFIG = TransformerConfig(vocab_size=31, width=16, num_layers=2, num_heads=4, mlp_width=24)
TOKENS = jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]])


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_module_has_the_functions_parameters_and_logits(scanned):
    model = Transformer(CONFIG, rngs=nnx.Rngs(7), scanned=scanned)
    params = model.params()
    fresh = init_params(jax.random.key(0), CONFIG, scanned=scanned)
    chex.assert_trees_all_equal_shapes_and_dtypes(params, fresh)
    logits = jax.jit(lambda model, tokens: model(tokens).logits)(model, TOKENS)
    np.testing.assert_allclose(logits, forward(params, TOKENS, CONFIG).logits, atol=1e-6)
    again = Transformer.from_params(params, CONFIG)
    assert all(a is b for a, b in zip(jax.tree.leaves(again.params()), jax.tree.leaves(params)))
    other = Transformer(CONFIG, rngs=nnx.Rngs(8), scanned=scanned)
    assert float(jnp.abs(jax.tree.leaves(other.params())[0] - jax.tree.leaves(params)[0]).max()) > 0


def test_keyword_arguments_reach_the_functions():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    out = model(TOKENS, cache=init_cache(CONFIG, 2, 8), logits_for="last")
    assert out.logits.shape == (2, 1, 31)
    assert out.keys[0].shape == (2, 4, 4, 4)


def test_split_and_merge_restore_the_module():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    paths = {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}
    assert "weights.layers.1.attention.query.kernel" in paths
    merged = nnx.merge(graph, jax.tree.map(lambda x: 2 * x, state))
    chex.assert_trees_all_close(merged.params(), jax.tree.map(lambda x: 2 * x, model.params()))


def test_nnx_optimizer_trains_the_module():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @jax.jit
    def differentiate(model):
        def loss(model):
            logits = model(TOKENS[:, :-1]).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

        return jax.value_and_grad(loss)(model)

    losses = []
    for _ in range(6):
        loss, gradient = differentiate(model)
        optimizer.update(model, nnx.state(gradient, nnx.Param))
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5
