"""The four levels of proof of the block-sparse kernels that need no accelerator (see `levels`)."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import block_sparse_attention as op
from tests.kernels import levels, sharded
from tests.kernels.block_sparse_cases import Shape, assert_near, case, only, oracle, run


def training(block_size, segmented=True, blocks=None):
    """A function of arrays that holds the forward pass and all gradients."""

    def of(q, k, v, indices, segment_ids):
        def total(q, k, v):
            given = {"segment_ids": segment_ids} if segmented else {}
            out = op.block_sparse_attention(q, k, v, indices, block_size=block_size, blocks=blocks, **given)
            return jnp.sum(out.astype(jnp.float32))

        return jax.value_and_grad(total, (0, 1, 2))(q, k, v)

    return of


def types(tokens, heads, group, dim, slots, dtype):
    struct = jax.ShapeDtypeStruct
    keys = struct((1, tokens, heads, dim), dtype)
    query = struct((1, tokens, heads * group, dim), dtype)
    numbers = jnp.int32
    return query, keys, keys, struct((1, tokens, heads, slots), numbers), struct((1, tokens), numbers)


def test_l1_no_races_in_the_tpu_form():
    arrays, options = case(Shape(5, slots=3, segmented=True, group=2))
    with levels.race_checked() as interpret, only("pallas_tpu", interpret):
        got = jax.block_until_ready(jax.jit(lambda a: run(a, options))(arrays))
    assert_near(got, oracle(**arrays, **options), 2e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_l2_every_gradient_lowers_also_under_vmap_and_x64(platform):
    arguments = types(100, 2, 3, 64, 3, jnp.float32)
    lowered = levels.lower(platform, training(11), *arguments).as_text()
    kernels = {"cuda": 4, "tpu": 1}[
        platform
    ]  # forward, dq, dk with dv, their sum; on TPU the backward is XLA's
    assert lowered.count(levels.TARGETS[platform]) == kernels
    twice = jax.tree.map(lambda a: jax.ShapeDtypeStruct((2, *a.shape), a.dtype), arguments)
    levels.lower(platform, jax.vmap(training(11)), *twice)
    with jax.enable_x64(True):
        levels.lower(platform, training(11), *arguments)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_l2_every_gradient_lowers_inside_shard_map(platform):
    def slopes(*arrays):
        return training(16)(*arrays)[1]

    heads = P(None, None, "heads")
    specs = (heads, heads, heads, heads, P()), (heads, heads, heads)
    text = sharded.lower(platform, slopes, *specs, *types(64, 2, 3, 64, 3, jnp.float32))
    assert text.count(levels.TARGETS[platform]) == {"cuda": 4, "tpu": 1}[platform]


def test_l3_sm_90_code_with_tensor_cores():
    kernels = levels.compile_gpu(training(16), *types(256, 2, 16, 64, 4, jnp.bfloat16), expect=("mma",))
    assert [k.name for k in kernels] == [
        "block_sparse_attention_gpu",
        "block_sparse_attention_dq_gpu",
        "block_sparse_attention_dkv_gpu",
        "block_sparse_attention_sum_gpu",
    ]
    assert all(k.has("mma") for k in kernels[:3])


@pytest.mark.parametrize(("group", "dim", "block"), [(1, 128, 64), (71, 64, 24)])
def test_l3_other_shapes_fit(group, dim, block):
    levels.compile_gpu(training(block), *types(256, 1, group, dim, 4, jnp.bfloat16))


@pytest.mark.parametrize(
    ("group", "dim", "block", "dtype"), [(16, 64, 16, "bfloat16"), (3, 80, 11, "float32")]
)
def test_l4_tpu_program(group, dim, block, dtype):
    def forward(q, k, v, indices, segments):
        return op.block_sparse_attention(q, k, v, indices, block_size=block, segment_ids=segments)

    whole = training(block) if dtype == "bfloat16" else forward
    with jax.enable_x64(dtype == "float32"):
        found = levels.compile_tpu(whole, *types(256, 2, group, dim, 4, jnp.dtype(dtype)))
    assert "block_sparse_attention_tpu" in found.as_text()
