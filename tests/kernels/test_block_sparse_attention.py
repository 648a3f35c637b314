"""Block-sparse attention against a float64 walk token by token, in every form that runs without an accelerator."""

import contextlib
import functools
import json
import subprocess
import sys
from typing import NamedTuple

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels import block_sparse_attention as op
from pallas_kernels.block_sparse_attention import geometry, reference, xla
from tests.kernels import levels

FORMS = ["xla", "pallas_gpu", "pallas_tpu"]
# Pieces so small that small shapes have several of them.
SMALL = op.BlockSizes(gathered_bytes=4096, pairs=3, keys=16, slots=2, prefetched=12)


class Shape(NamedTuple):
    tokens: int
    group: int = 1
    block: int = 8
    slots: int = 2
    keys: int | None = None  # as many as tokens if None; else positions are given
    causal: bool = True
    segmented: bool = False
    batch: int = 1
    heads: int = 2
    dim: int = 16
    value_dim: int = 8


SHAPES = [
    Shape(1),
    Shape(7, batch=2),
    Shape(8, group=16, heads=1),
    Shape(9, group=3, slots=3, segmented=True),
    Shape(17, group=2, block=16, segmented=True),
    Shape(23, block=11, slots=4, causal=False),
    Shape(12, block=40, slots=1, group=18, heads=1),
    Shape(3, group=2, keys=25, slots=3, segmented=True, batch=2),
]


def case(shape: Shape, seed=0, dtype="float32"):
    """Arrays, options, and nothing that the op would have to refuse; some queries see nothing."""
    rng = np.random.default_rng(seed)
    keys = shape.tokens if shape.keys is None else shape.keys
    b, t, h = shape.batch, shape.tokens, shape.heads
    q = rng.normal(size=(b, t, h * shape.group, shape.dim))
    k = rng.normal(size=(b, keys, h, shape.dim))
    v = rng.normal(size=(b, keys, h, shape.value_dim))
    arrays = {n: jnp.asarray(a, dtype) for n, a in (("q", q), ("k", k), ("v", v))}
    arrays["indices"] = jnp.asarray(rng.integers(-1, -(-keys // shape.block), (b, t, h, shape.slots)))
    if shape.keys is not None:
        arrays["positions"] = jnp.asarray(rng.integers(0, keys, (b, t)))
        if shape.segmented:
            arrays["key_segment_ids"] = jnp.asarray(rng.integers(0, 2, (b, keys)))
    if shape.segmented:
        arrays["segment_ids"] = jnp.asarray(np.sort(rng.integers(0, 2, (b, t)), axis=1))
    return arrays, {"block_size": shape.block, "causal": shape.causal}


def oracle(
    q, k, v, indices, *, block_size, causal=True, positions=None, segment_ids=None, key_segment_ids=None
):
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    batch, tokens, heads, dim = q.shape
    out = np.zeros((batch, tokens, heads, v.shape[-1]))
    largest, total = np.full((batch, tokens, heads), -np.inf), np.zeros((batch, tokens, heads))
    if key_segment_ids is None:
        key_segment_ids = segment_ids
    for b, t, h in np.ndindex(batch, tokens, heads):
        head = h // (heads // k.shape[2])
        position = t if positions is None else positions[b, t]
        seen = [
            j
            for j in range(k.shape[1])
            if j // block_size in np.asarray(indices[b, t, head])
            and (not causal or j <= position)
            and (segment_ids is None or segment_ids[b, t] == key_segment_ids[b, j])
        ]
        if seen:
            logits = k[b, seen, head] @ q[b, t, h] / np.sqrt(dim)
            largest[b, t, h] = logits.max()
            weights = np.exp(logits - logits.max())
            total[b, t, h] = weights.sum()
            out[b, t, h] = weights @ v[b, seen, head] / weights.sum()
    return out, largest, total


@contextlib.contextmanager
def only(form, interpret: object = True):
    """Makes one form serve every call, in interpret mode."""
    with pytest.MonkeyPatch.context() as patch:

        def choose(implementation, forms, reasons):
            assert form not in reasons
            run = forms[form]
            return run if run.func.__module__ == xla.__name__ else functools.partial(run, interpret=interpret)

        patch.setattr(op._dispatch, "choose", choose)
        yield


def run(arrays, options, **more):
    out, statistics = op.block_sparse_attention(
        **arrays, **options, return_statistics=True, blocks=SMALL, **more
    )
    return out, *statistics


@functools.lru_cache
def compiled(form, shape, dtype="float32"):
    options = case(shape)[1]

    def traced(arrays):
        with only(form):
            return run(arrays, options)

    return jax.jit(traced)


def assert_near(got, wanted, tolerance):
    for name, g, w in zip(("out", "max", "sum"), got, wanted):
        w = np.asarray(w, np.float64)
        np.testing.assert_allclose(np.asarray(g, np.float64), w, rtol=tolerance, atol=tolerance, err_msg=name)


@hypothesis.settings(max_examples=6)
@hypothesis.given(st.sampled_from(FORMS), st.sampled_from(SHAPES), st.integers(0, 99))
def test_every_form_equals_the_walk_token_by_token(form, shape, seed):
    arrays, options = case(shape, seed)
    assert_near(compiled(form, shape)(arrays), oracle(**arrays, **options), 2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_bfloat16_is_summed_in_float32(form):
    arrays, options = case(SHAPES[4], dtype="bfloat16")
    got = compiled(form, SHAPES[4], "bfloat16")(arrays)
    assert [a.dtype.name for a in got] == ["bfloat16", "float32", "float32"]
    assert_near(got, oracle(**arrays, **options), 2e-2)


@functools.lru_cache
def referenced(shape):
    options = case(shape)[1]
    return jax.jit(lambda arrays: reference.block_sparse_attention(**arrays, **options))


def test_the_reference_equals_the_walk_token_by_token():
    for shape in SHAPES[3], SHAPES[7]:
        arrays, options = case(shape)
        assert_near(referenced(shape)(arrays), oracle(**arrays, **options), 1e-5)


def loss(out, largest, total):
    """Depends on everything that is returned, on the statistics as merging does."""
    seen = total > 0
    logarithm = jnp.where(seen, largest, 0) + jnp.log(jnp.where(seen, total, 1))
    return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(logarithm))


def gradients(function, arrays):
    def of(q, k, v):
        return loss(*function({**arrays, "q": q, "k": k, "v": v}))

    return jax.grad(of, (0, 1, 2))(arrays["q"], arrays["k"], arrays["v"])


@functools.lru_cache
def slopes(form, shape):
    """The gradients as a compiled function; the reference's if `form` is None."""
    function = compiled(form, shape) if form else referenced(shape)
    return jax.jit(lambda arrays: backward_in(form, function, arrays))


def backward_in(form, function, arrays):
    with only(form) if form else contextlib.nullcontext():
        return gradients(function, arrays)


# Others are compared under x64 below; the backward pass on TPU is XLA's.
@pytest.mark.parametrize(("form", "number"), [("xla", 3), ("xla", 7), ("pallas_gpu", 6)])
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
    shape = Shape(20, slots=2, group=2)
    arrays, _ = case(shape)
    indices = arrays["indices"]
    again = jnp.concatenate([indices[..., ::-1], indices, jnp.full_like(indices, -1)], axis=-1)
    got = compiled("xla", shape)({**arrays, "indices": again})
    assert_near(got, compiled("xla", shape)(arrays), 1e-6)


def test_a_traced_index_out_of_range_counts_as_none():
    shape = Shape(20, slots=2, group=2)
    arrays, _ = case(shape)
    f, indices = compiled("xla", shape), arrays["indices"].at[..., 1].set(-1)
    for wrong in (3, 2**31 - 1, -(2**31)):
        outside = {**arrays, "indices": indices.at[..., 1].set(wrong)}
        chex.assert_trees_all_equal(f(outside), f({**arrays, "indices": indices}))


def test_keys_that_nobody_chose_change_nothing_and_get_no_gradient():
    shape = Shape(20, slots=2, group=2)
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
    shape = Shape(10, slots=2, group=2)
    arrays, _ = case(shape)
    arrays["indices"] = jnp.broadcast_to(jnp.arange(2), arrays["indices"].shape)
    poisoned = {n: arrays[n].at[:, -1].set(jnp.inf) for n in "kv"}
    clean, got = compiled(form, shape)(arrays), compiled(form, shape)({**arrays, **poisoned})
    chex.assert_trees_all_equal([a[:, :-1] for a in got], [a[:, :-1] for a in clean])


def test_queries_that_see_nothing_get_zeros_and_zero_gradients():
    shape = Shape(20, slots=2, group=2)
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
    shape = Shape(20, slots=2, group=2)
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
    shape = Shape(9, group=2, segmented=True, batch=2)
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
    arrays, options = case(Shape(5, group=2, batch=2))
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
        tiles = geometry.group_by_block(jnp.asarray(ids, jnp.int32), 7, size)
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


WRONG = {
    "q has 3 axes": ({"q": jnp.ones((1, 16, 4))}, ValueError, r"q of shape \(1, 16, 4\)"),
    "integers": ({"q": jnp.ones((1, 16, 4, 8), int)}, TypeError, "q holds int"),
    "types differ": ({"k": jnp.ones((1, 16, 2, 8), "bfloat16")}, TypeError, "k holds bfloat16"),
    "heads": ({"q": jnp.ones((1, 16, 3, 8))}, ValueError, "3 heads of q must be a multiple of the 2"),
    "dim": ({"q": jnp.ones((1, 16, 4, 7))}, ValueError, "first and last axes"),
    "values": ({"v": jnp.ones((1, 15, 2, 8))}, ValueError, "must agree but for the last axis"),
    "indices' shape": ({"indices": jnp.zeros((1, 16, 4, 1), int)}, ValueError, "must begin with"),
    "indices' type": ({"indices": jnp.zeros((1, 16, 2, 1))}, TypeError, "indices holds float32"),
    "index above": ({"indices": jnp.full((1, 16, 2, 1), 2)}, ValueError, "from 2 to 2 must be from -1 to 1"),
    "index below": ({"indices": jnp.full((1, 16, 2, 1), -2)}, ValueError, "from -2 to -2"),
    "block size": ({"block_size": 7}, ValueError, "block_size=7"),
    "block size's type": ({"block_size": 8.0}, ValueError, r"block_size=8\.0"),
    "positions": ({"positions": jnp.zeros((1, 15), int)}, ValueError, r"positions of shape \(1, 15\)"),
    "no positions": (
        {"k": jnp.ones((1, 9, 2, 8)), "v": jnp.ones((1, 9, 2, 8))},
        ValueError,
        "positions must be given",
    ),
    "segments": ({"segment_ids": jnp.zeros((2, 16), int)}, ValueError, "segment_ids of shape"),
    "lonely segments": ({"key_segment_ids": jnp.zeros((1, 16), int)}, ValueError, "without segment_ids"),
    "implementation": ({"implementation": "fast"}, ValueError, "implementation='fast'"),
    "kernel": (
        {"implementation": "pallas"},
        NotImplementedError,
        "pallas_gpu: no NVIDIA GPU.*pallas_tpu: no TPU",
    ),
    "triton": ({"implementation": "triton"}, NotImplementedError, "no 'triton' form"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_raises_before_tracing(name):
    changed, error, message = WRONG[name]
    good = {
        "q": jnp.ones((1, 16, 4, 8)),
        "k": jnp.ones((1, 16, 2, 8)),
        "v": jnp.ones((1, 16, 2, 8)),
        "indices": jnp.zeros((1, 16, 2, 1), int),
        "block_size": 8,
    }
    with pytest.raises(error, match=message):
        op.block_sparse_attention(**{**good, **changed})


def test_bad_sizes():
    with pytest.raises(ValueError, match=r"blocks\.pairs=0"):
        op.BlockSizes(pairs=0)
    with pytest.raises(ValueError, match=r"blocks\.keys=24 must be a power of two"):
        op.BlockSizes(keys=24)


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


def test_byte_model_and_command_of_the_benchmark(capsys):
    from pallas_kernels.block_sparse_attention import bench

    # 64 tokens and 2 KV heads, each row with 16 chosen keys and values of 8 numbers, 4 query heads in all, float32.
    small = bench.Case(64, heads=4, kv_heads=2, dim=8, block_size=8, slots=2)
    query, chosen, index, keys = 64 * 4 * 8 * 4, 64 * 2 * 16 * 2 * 8 * 4, 64 * 2 * 2 * 4, 64 * 2 * 2 * 8 * 4
    moved = bench.bytes_moved(small)
    assert moved["forward"] == 2 * query + chosen + index
    assert moved["gradients"] == moved["forward"] + 4 * query + chosen + 2 * index + 2 * 2 * query + keys
    assert small.density == 16 / 64
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--preset", "gpu"])
    assert stopped.value.code == 2
    assert "needs a GPU" in capsys.readouterr().err
