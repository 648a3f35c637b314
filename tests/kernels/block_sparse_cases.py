"""Inputs of block-sparse attention, a float64 walk token by token, and how a test calls one of the forms."""

import contextlib
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_sparse_attention as op
from pallas_kernels.block_sparse_attention import reference, xla

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
BASE = Shape(20, slots=2, group=2)


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


@functools.lru_cache
def referenced(shape):
    options = case(shape)[1]
    return jax.jit(lambda arrays: reference.block_sparse_attention(**arrays, **options))


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
