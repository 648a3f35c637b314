from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

from effml.nn.transformer import TransformerConfig, init_params, next_token_loss
from effml.train.plan import flops


def gradient_flops(config, batch, length, **options):
    params = jax.eval_shape(functools.partial(init_params, config=config, scanned=True), jax.random.key(0))
    tokens = {"tokens": jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)}
    loss = functools.partial(next_token_loss, config=config, **options)
    return flops.count(jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(params, tokens))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_a_transformers_gradient_has_the_closed_form(kv_heads, tied):
    batch, length, width, layers, mlp, vocab = 2, 16, 64, 3, 128, 100
    config = TransformerConfig(
        vocab, width, layers, 4, mlp, num_kv_heads=kv_heads, tied_head=tied, compute_dtype="bfloat16"
    )
    rows, keys = batch * length, width * kv_heads // 4
    kernels = width * (2 * width + 2 * keys + 3 * mlp)
    attention = (
        2 * 2 * rows * length * width
    )  # scores and their product with the values, masked entries included
    layer = 2 * rows * kernels + attention
    head = 2 * rows * width * vocab
    assert gradient_flops(config, batch, length) == 3 * (layers * layer + head)
    # Recomputed: every layer but its last product, whose result nothing in the backward pass reads.
    again = layers * (layer - 2 * rows * mlp * width)
    assert gradient_flops(config, batch, length, rematerialize=True) == 3 * (layers * layer + head) + again


def test_loops_branches_and_convolutions():
    a = jnp.ones((4, 4))
    product = 2 * 4**3

    def nested(x):
        inner = lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ a, x)
        return jax.lax.scan(lambda x, _: (inner(x) @ a, None), x, None, length=5)[0]

    assert flops.count(jax.make_jaxpr(nested)(a)) == 5 * 4 * product
    branches = lambda i, x: jax.lax.switch(i, [lambda x: x, lambda x: x @ a @ a, lambda x: x @ a], x)
    assert flops.count(jax.make_jaxpr(branches)(0, a)) == 2 * product
    batched = jax.vmap(lambda x: x @ a)
    assert flops.count(jax.make_jaxpr(batched)(jnp.ones((7, 4, 4)))) == 7 * product
    data = lambda x: jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ a, x)
    assert flops.count(jax.make_jaxpr(data)(a)) == product
    convolve = lambda x, k: jax.lax.conv_general_dilated(
        x, k, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
    )
    image, kernel = jnp.ones((2, 8, 8, 6)), jnp.ones((3, 3, 3, 10))
    assert flops.count(jax.make_jaxpr(convolve)(image, kernel)) == 2 * (2 * 4 * 4 * 10) * (3 * 3 * 3)


def test_the_body_of_a_shard_map_runs_on_every_device():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    abstract = jax.sharding.AbstractMesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    for where, devices in ((mesh, 1), (abstract, 8)):
        run = jax.shard_map(lambda x: x @ x.T, mesh=where, in_specs=spec, out_specs=spec)
        assert flops.count(jax.make_jaxpr(run)(jnp.ones((8, 4)))) == devices * 2 * (8 // devices) ** 2 * 4


def test_muons_update_is_fifteen_products_per_matrix():
    # Five steps of A = X X', B = b A + c A A, X = a X + B X.
    params = {"w": jnp.ones((8, 24))}
    optimizer = optax.contrib.muon(1e-3)
    jaxpr = jax.make_jaxpr(lambda g, s: optimizer.update(g, s, params)[0])(params, optimizer.init(params))
    assert flops.count(jaxpr) == 5 * (2 * 8 * 8 * 24 + 2 * 8**3 + 2 * 8 * 8 * 24)
