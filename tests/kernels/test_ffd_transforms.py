"""Decoding under grad, vmap, jit, remat, eval_shape, x64 and shard_map."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ffd_decode as op
from tests.kernels.ffd_cases import Oracle, case

NAMES = ["q", "v", "k_tail", "v_tail", "k_scale", "k_resid"]
WEIGHT = np.random.default_rng(0).normal(size=(1, 3, 24)).astype("f")


@functools.cache
def slopes():
    def loss(moving, still):
        out, stats = op.ffd_decode(**moving, **still, delta=0.5, return_stats=True)
        return jnp.sum(out * WEIGHT) + jnp.sum(stats.lse), stats

    return jax.jit(jax.grad(loss, has_aux=True, allow_int=True))


@pytest.mark.parametrize("residual", ["float32", "float8_e4m3fn"])
def test_gradients(residual):
    """Those of the float64 definition by finite differences; none goes to what was not kept, whatever it holds."""
    arrays = case(12, batch=1, kv_heads=1, residual=residual, counts=[4], tails=[5])
    still = {n: arrays[n] for n in ("k_code", "num_blocks", "tail_len")}
    grads, stats = slopes()({name: arrays[name] for name in NAMES}, still)
    assert 0 < stats.keep_ratio[0] < 1
    rng = np.random.default_rng(1)
    for name, grad in grads.items():
        assert grad.dtype == arrays[name].dtype
        if name == "k_resid" and residual != "float32":
            assert not np.asarray(grad, float).any()
            continue
        direction = rng.normal(size=grad.shape)
        both = []
        for sign in (1, -1):
            moved = {**arrays, name: np.asarray(arrays[name], float) + sign * 1e-5 * direction}
            out, lse = Oracle(moved).attend(np.asarray(stats.kept))
            both.append(np.sum(out * WEIGHT) + np.sum(lse))
        slope = (both[0] - both[1]) / 2e-5
        np.testing.assert_allclose(np.sum(np.asarray(grad, float) * direction), slope, rtol=2e-3, atol=2e-3)
    skipped = np.repeat(~np.asarray(stats.kept), 16, axis=2)[..., None] & np.ones((1, 1, 80, 24), bool)
    assert not np.asarray(grads["v"])[skipped].any()
    poisoned = {**arrays, "v": np.where(skipped, np.nan, arrays["v"])}
    again, _ = slopes()({name: poisoned[name] for name in NAMES}, still)
    chex.assert_trees_all_equal(again, grads)


def test_transforms():
    arrays = case(13, counts=[5, 2], tails=[3, 8])
    names, values = list(arrays), [jnp.asarray(x) for x in arrays.values()]
    plain = lambda *a: op.ffd_decode(**dict(zip(names, a)), delta=0.5, return_stats=True)
    jitted = jax.jit(chex.assert_max_traces(plain, n=1))
    out, stats = jitted(*values)
    jitted(*values[:-1], jnp.array([1, 4], jnp.int32))  # other lengths, same program
    shape = jax.eval_shape(plain, *values)[0]
    assert (shape.shape, shape.dtype) == (out.shape, jnp.float32)
    with jax.enable_x64(True):
        loss = jax.checkpoint(lambda q: (plain(q, *values[1:])[0].sum(), plain(q, *values[1:])))
        slope, (wide, more) = jax.jit(jax.grad(loss, has_aux=True))(values[0])
        assert slope.dtype == wide.dtype == more.lse.dtype == jnp.float32
        np.testing.assert_allclose(wide, out, atol=1e-6)
    # vmap adds to the batch: over everything, and over queries alone
    stacked = jax.jit(jax.vmap(plain))(*(jnp.stack([x, x[::-1]]) for x in values))
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], stacked), (out, stats), atol=1e-6)
    np.testing.assert_allclose(stacked[0][1], out[::-1], atol=1e-6)
    queries = jnp.stack([values[0], -values[0]])
    both = jax.vmap(jax.value_and_grad(lambda q: plain(q, *values[1:])[0].sum()))
    sums, slopes = jax.jit(both)(queries)
    np.testing.assert_allclose(sums[0], out.sum(), rtol=1e-4)
    np.testing.assert_allclose(sums[1], jitted(queries[1], *values[1:])[0].sum(), rtol=1e-4)
    np.testing.assert_allclose(slopes[0], slope, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "block", "tail", "batch"), [(0, 16, 1, 2), (1, 8, 0, 1), (0, 16, 0, 1), (2, 8, 3, 0)]
)
def test_any_length(blocks, block, tail, batch):
    arrays = case(
        0, blocks=blocks, block=block, tail=tail, batch=batch, counts=[blocks] * batch, tails=[tail] * batch
    )
    out, stats = op.ffd_decode(**arrays, delta=0.5, return_stats=True)
    assert (out.shape, stats.kept.shape) == ((batch, 6, 24), (batch, 2, blocks))
    if batch:
        np.testing.assert_allclose(out, Oracle(arrays).attend(np.asarray(stats.kept))[0], atol=2e-5)
    np.testing.assert_array_equal(stats.lse == -np.inf, np.full((batch, 6), not blocks and not tail))


def test_a_vmapped_call_reads_only_kept_blocks():
    arrays = case(14, counts=[5, 5], tail=0)
    mapped = {n: jnp.asarray(x)[:, None] for n, x in arrays.items()}
    of = lambda form: str(jax.make_jaxpr(jax.vmap(lambda a: op.ffd_decode(**a, implementation=form)))(mapped))
    assert "cond[" in of("xla")  # of the number of kept blocks; a mapped condition would be a select
    assert op.cpu.why_not() or of("cpu").count("effml_ffd_attend") == 1


SHARDED = """
import functools, json, os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from pallas_kernels import ffd_decode as op
k, v = jax.random.normal(jax.random.key(0), (2, 2, 4, 64, 8))
q = jax.random.normal(jax.random.key(1), (2, 8, 8))
arrays = q, *op.quantize_blocks(k, 16), v, k[:, :, :8], v[:, :, :8], jnp.array([4, 1], jnp.int32)
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "heads"))
local = lambda form, q, c, s, r, v, kt, vt, n: op.ffd_decode(
    q, c, s, r, v, kt, vt, num_blocks=n, delta=0.5, implementation=form)
specs = (P("data", "heads"),) * 7 + (P("data"),)
sharded = lambda form: jax.shard_map(functools.partial(local, form), mesh=mesh, in_specs=specs, out_specs=specs[0])
loss = lambda f: jax.jit(jax.value_and_grad(lambda q: (jnp.sum(jnp.sin(out := f(q, *arrays[1:]))), out), has_aux=True))
((_, out), grad), ((_, wanted), slope) = loss(sharded(None))(q), loss(functools.partial(local, None))(q)
through_xla = jax.jit(sharded("xla"))(*arrays)
errors = [float(jnp.abs(a - b).max()) for a, b in ((out, wanted), (grad, slope), (through_xla, wanted))]
print(json.dumps(errors))
"""


def in_a_process(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_shard_map():
    assert max(in_a_process("-c", SHARDED)) < 1e-5
