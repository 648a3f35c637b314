"""Block-sparse attention against a float64 walk token by token, in every form that runs without an accelerator."""

import functools
import json
import subprocess
import sys

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import block_sparse_attention as op
from pallas_kernels.block_sparse_attention import geometry, reference
from tests.kernels.block_sparse_cases import (
    BASE,
    FORMS,
    SHAPES,
    Shape,
    assert_near,
    case,
    compiled,
    gradients,
    loss,
    only,
    oracle,
    referenced,
    run,
    slopes,
)

# The others are compared in other types below.
OF_FORM = {
    "xla": (BASE, SHAPES[1], SHAPES[5]),
    "pallas_gpu": (BASE, SHAPES[2], SHAPES[5]),
    "pallas_tpu": (BASE, SHAPES[0]),
}


@pytest.mark.parametrize(
    ("form", "number"), [(form, i) for form, shapes in OF_FORM.items() for i in range(len(shapes))]
)
@hypothesis.settings(max_examples=3)
@hypothesis.given(seed=st.integers(0, 99))
def test_every_form_equals_the_walk_token_by_token(form, number, seed):
    shape = OF_FORM[form][number]
    arrays, options = case(shape, seed)
    assert_near(compiled(form, shape)(arrays), oracle(**arrays, **options), 2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_summed_in_float32(form):
    arrays, options = case(SHAPES[4], dtype="bfloat16")
    got = compiled(form, SHAPES[4], "bfloat16")(arrays)
    assert [a.dtype.name for a in got] == ["bfloat16", "float32", "float32"]
    assert_near(got, oracle(**arrays, **options), 2e-2)


def test_the_reference_equals_the_walk_token_by_token():
    for shape in SHAPES[6], SHAPES[7]:
        arrays, options = case(shape)
        assert_near(referenced(shape)(arrays), oracle(**arrays, **options), 1e-5)


# Others are compared under x64 below; the backward pass on TPU is XLA's.
@pytest.mark.parametrize(("form", "number"), [("xla", 7), ("pallas_gpu", 6)])
def test_gradients_equal_those_of_the_reference(form, number):
    arrays, _ = case(SHAPES[number], 1)
    assert_near(slopes(form, SHAPES[number])(arrays), slopes(None, SHAPES[number])(arrays), 2e-5)


def test_gradients_equal_finite_differences():
    with jax.enable_x64(True):
        arrays, options = case(Shape(9, group=2, segmented=True), dtype="float64")
        fixed = {n: a for n, a in arrays.items() if n not in "qkv"}
        f = jax.jit(lambda q, k, v: loss(*run({**fixed, "q": q, "k": k, "v": v}, options)))
        at = [arrays[n] for n in "qkv"]
        found = jax.jit(jax.grad(f, (0, 1, 2)))(*at)
        rng = np.random.default_rng(0)
        for number in range(3):
            direction = jnp.asarray(rng.normal(size=at[number].shape))
            moved = [
                [a + s * 1e-3 * direction if i == number else a for i, a in enumerate(at)] for s in (1, -1)
            ]
            # The loss itself is summed in float32 but for the statistics.
            difference = float(f(*moved[0]) - f(*moved[1])) / 2e-3
            assert difference == pytest.approx(float(jnp.sum(found[number] * direction)), rel=2e-3, abs=2e-3)


def test_order_and_repetition_of_indices_do_not_matter():
    shape = BASE
    arrays, _ = case(shape)
    indices = arrays["indices"]
    again = jnp.concatenate([indices[..., ::-1], indices, jnp.full_like(indices, -1)], axis=-1)
    got = compiled("xla", shape)({**arrays, "indices": again})
    assert_near(got, compiled("xla", shape)(arrays), 1e-6)


def test_a_traced_index_out_of_range_counts_as_none():
    shape = BASE
    arrays, _ = case(shape)
    f, indices = compiled("xla", shape), arrays["indices"].at[..., 1].set(-1)
    for wrong in (3, 2**31 - 1, -(2**31)):
        outside = {**arrays, "indices": indices.at[..., 1].set(wrong)}
        chex.assert_trees_all_equal(f(outside), f({**arrays, "indices": indices}))


def test_keys_that_nobody_chose_change_nothing_and_get_no_gradient():
    shape = BASE
    arrays, _ = case(shape)
    arrays["indices"] = jnp.zeros_like(arrays["indices"])
    poisoned = {**arrays, **{n: arrays[n].at[:, 8:].set(jnp.nan) for n in "kv"}}
    f = compiled("xla", shape)
    chex.assert_trees_all_equal(f(poisoned), f(arrays))
    for gradient in slopes("xla", shape)(poisoned)[1:]:
        assert bool(jnp.all(gradient[:, 8:] == 0))
        assert bool(jnp.any(gradient[:, :8] != 0))


@pytest.mark.parametrize("form", FORMS)
def test_keys_of_the_future_may_hold_anything(form):
    shape = BASE
    arrays, _ = case(shape)
    arrays["indices"] = jnp.broadcast_to(jnp.arange(1, 3), arrays["indices"].shape)
    poisoned = {n: arrays[n].at[:, -1].set(jnp.inf) for n in "kv"}
    clean, got = compiled(form, shape)(arrays), compiled(form, shape)({**arrays, **poisoned})
    chex.assert_trees_all_equal([a[:, :-1] for a in got], [a[:, :-1] for a in clean])


def test_queries_that_see_nothing_get_zeros_and_zero_gradients():
    shape = BASE
    arrays, _ = case(shape)
    arrays["indices"] = jnp.full_like(arrays["indices"], -1)
    out, largest, total = compiled("xla", shape)(arrays)
    assert not out.any()
    assert not total.any()
    assert bool(jnp.all(largest == -jnp.inf))
    assert not any(g.any() for g in slopes("xla", shape)(arrays))


@pytest.mark.parametrize("empty", ["tokens", "slots", "batch"])
def test_empty_arrays(empty):
    shape = Shape(5)._replace(**{empty: 0})
    arrays, options = case(shape)
    out, largest, total = run(arrays, options)
    assert out.shape == (shape.batch, shape.tokens, 2, 8)
    assert not out.any()
    assert largest.shape == total.shape == out.shape[:3]
    assert gradients(lambda a: run(a, options), arrays)[0].shape == arrays["q"].shape


def test_all_blocks_are_dense_attention():
    shape = Shape(20, group=2, slots=3, value_dim=16)
    arrays, _ = case(shape)
    arrays["indices"] = jnp.broadcast_to(jnp.arange(3), arrays["indices"].shape)
    wanted = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=True))(
        *(arrays[n] for n in "qkv")
    )
    np.testing.assert_allclose(compiled("xla", shape)(arrays)[0], wanted, rtol=2e-5, atol=2e-5)


def test_statistics_merge_two_choices_into_their_union_with_gradients():
    shape = BASE
    arrays, options = case(shape, 3)
    arrays["indices"] = jnp.broadcast_to(jnp.asarray([0, 2]), arrays["indices"].shape)

    def merged(arrays):
        halves = [run({**arrays, "indices": jnp.full_like(arrays["indices"], i)}, options) for i in (0, 2)]
        largest = jnp.maximum(halves[0][1], halves[1][1])
        shares = [total * jnp.exp(top - largest) for _, top, total in halves]
        total = shares[0] + shares[1]
        out = sum(out * (share / total)[..., None] for (out, _, _), share in zip(halves, shares))
        return out, largest, total

    got, gradient = jax.jit(lambda a: (merged(a), gradients(merged, a)))(arrays)
    assert_near(got, compiled("xla", shape)(arrays), 2e-6)
    assert_near(gradient, slopes("xla", shape)(arrays), 2e-5)


def test_vmap_eval_shape_remat_and_no_second_compilation():
    shape = SHAPES[7]
    arrays, options = case(shape)
    plain = compiled("xla", shape)(arrays)
    one_by_one = jax.jit(jax.vmap(lambda a: run(jax.tree.map(lambda x: x[None], a), options)))(arrays)
    assert_near([a[:, 0] for a in one_by_one], plain, 1e-6)
    shapes = jax.eval_shape(lambda a: run(a, options), arrays)
    assert [s.shape for s in shapes] == [a.shape for a in plain]

    @jax.jit
    @chex.assert_max_traces(1)
    def again(arrays):
        return gradients(jax.checkpoint(lambda a: run(a, options)), arrays)

    for seed in (0, 1):
        arrays, _ = case(shape, seed)
        assert_near(again(arrays), slopes("xla", shape)(arrays), 1e-5)


@pytest.mark.parametrize("form", FORMS[1:])
def test_vmap_of_kernels(form):
    arrays, options = case(Shape(2, group=2, batch=2))
    with only(form):
        got = jax.jit(jax.vmap(lambda a: run(jax.tree.map(lambda x: x[None], a), options)))(arrays)
    assert_near([a[:, 0] for a in got], oracle(**arrays, **options), 2e-5)


@pytest.mark.parametrize("form", FORMS[1:])
def test_x64_mode(form):
    with jax.enable_x64(True):
        arrays, options = case(SHAPES[3])
        assert arrays["indices"].dtype == jnp.int64

        def all_of(arrays):
            f = lambda a: run(a, options)
            with only(form):
                return f(arrays), () if form == "pallas_tpu" else gradients(f, arrays)

        got, gradient = jax.jit(all_of)(arrays)
        assert {a.dtype.name for a in (*got, *gradient)} == {"float32"}
        assert_near(got, oracle(**arrays, **options), 2e-5)
        if gradient:
            wanted = jax.jit(
                lambda a: gradients(lambda a: reference.block_sparse_attention(**a, **options), a)
            )
            assert_near(gradient, wanted(arrays), 2e-5)


def test_float64_is_exact_and_no_kernel_takes_it():
    with jax.enable_x64(True):
        arrays, options = case(SHAPES[3], dtype="float64")
        assert_near(jax.jit(lambda a: run(a, options))(arrays), oracle(**arrays, **options), 1e-12)
        with pytest.raises(NotImplementedError, match="float64 is not float32"):
            run(arrays, options, implementation="pallas")


def test_tiles_hold_every_pair_once_and_one_block_each():
    rng = np.random.default_rng(0)
    ids = np.where(rng.random((40, 3)) < 0.3, -1, rng.integers(0, 7, (40, 3)) ** 2 % 7)
    for size in (1, 3, 64):
        tiles = jax.jit(geometry.group_by_block, static_argnums=(1, 2))(jnp.asarray(ids, jnp.int32), 7, size)
        found = []
        for block, start, stop in zip(*map(np.asarray, tiles[1:4])):
            assert stop - start <= size
            found += [(int(row), int(block)) for row in np.asarray(tiles.rows)[start:stop]]
        assert sorted(found) == sorted((row, b) for row, r in enumerate(ids) for b in r if b >= 0)
        owners = np.asarray(tiles.block)
        for block in range(7):
            assert list(np.flatnonzero(owners == block)) == list(
                range(*map(int, tiles.first[block : block + 2]))
            )


def test_memory_of_the_xla_path_follows_the_given_bytes():
    shape = Shape(2048, group=4, block=16, slots=16, heads=1, dim=64, value_dim=64)
    arrays, options = case(shape)
    sizes = op.BlockSizes(gathered_bytes=2**20)

    def all_gradients(arrays):
        def of(q, k, v):
            given = {**arrays, "q": q, "k": k, "v": v}
            return op.block_sparse_attention(**given, **options, blocks=sizes, implementation="xla").sum()

        return jax.grad(of, (0, 1, 2))(arrays["q"], arrays["k"], arrays["v"])

    held = jax.jit(all_gradients).lower(arrays).compile().memory_analysis().temp_size_in_bytes
    gathered = shape.tokens * shape.slots * shape.block * 2 * shape.dim * 4  # all at once: 268 MB
    assert held < gathered / 8
    assert held < 2 * shape.tokens**2 * 4


SHARDED = """
import json, jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from pallas_kernels import block_sparse_attention as op
mesh = jax.make_mesh((2, 2, 2), ("batch", "tokens", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
rng = np.random.default_rng(0)
q = jnp.asarray(rng.normal(size=(4, 20, 4, 8)).astype("f"))
k, v = (jnp.asarray(rng.normal(size=(4, 20, 2, 8)).astype("f")) for _ in "kv")
indices = jnp.asarray(rng.integers(-1, 3, (4, 20, 2, 2)))
positions = jnp.broadcast_to(jnp.arange(20), (4, 20))
def run(q, k, v, indices, positions):
    return op.block_sparse_attention(q, k, v, indices, positions=positions, block_size=8)
# Every device has some queries and all keys, so gradients of keys add up over "tokens".
query, keys = P("batch", "tokens", "heads"), P("batch", None, "heads")
specs = (query, keys, keys, query, P("batch", "tokens"))
sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=query)
total = lambda f: lambda *a: jnp.sum(jnp.sin(f(*a, indices, positions)))
grad = lambda f: jax.jit(jax.value_and_grad(total(f), (0, 1, 2)))(q, k, v)
got, wanted = grad(sharded), grad(run)
print(json.dumps(max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, (got[1], wanted[1]))))))
"""


def test_shard_map_over_eight_devices():
    import os

    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) < 1e-5
