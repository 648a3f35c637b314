"""Attention of new tokens to a cache of low-bit keys, which reads only the blocks that matter (FFD).

Every full block of keys is stored as 2-bit (or 4-bit) codes plus a residual. One kernel walks a part of the cache: it
scores a block by its codes, and only if the best score reaches a threshold that was fixed before, for any query of
that KV head, it loads the residual and the values, adds q·residual to the scores it has, and folds the block into an
online softmax. Arrays are head-major: `[B, Hkv, T, ...]`.

| form | JAX | notes |
|---|---|---|
| `xla` | 0.10.2 to 0.12 | everywhere; a scan over the codes, then a loop over the kept blocks |
| `cpu` | 0.10.2 to 0.12 | native code, compiled on first use: unpacks codes in registers, reads kept blocks alone |
| `pallas_gpu` | 0.10.2 to 0.12 (Triton; deprecated by JAX since 0.11) | split-K, predicated loads |
| `pallas_tpu` | 0.10.2 to 0.12 | kept blocks are copied from HBM on demand |
| `triton` | through jax-triton, on a GPU only | the same kernel in Triton's language |

On a CPU the native form is the one that saves time; XLA unpacks codes into memory before it multiplies, which costs as
much as reading float32 keys, so its path saves bytes alone. `bench.py` measures both against dense attention.

Never run on a GPU or TPU so far: interpreted, lowered, and compiled to sm_90 and v5e code (`tests/kernels`).
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from pallas_kernels import _dispatch
from pallas_kernels._arguments import as_array
from pallas_kernels._varying import gradient_like
from pallas_kernels.ffd_decode import cpu, pallas_gpu, pallas_tpu, probe, reference, triton, xla
from pallas_kernels.ffd_decode.arguments import checked
from pallas_kernels.ffd_decode.body import (
    Spec,
    default_splits,
    finish,
    merge_partials,
)
from pallas_kernels.ffd_decode.codes import (
    code_bytes,
    dequantize,
    pack_codes,
    quantize_block,
    quantize_blocks,
    unpack_codes,
)

__all__ = [
    "FORMS",
    "FFDStats",
    "availability",
    "code_bytes",
    "default_splits",
    "delta_from_ratio",
    "dequantize",
    "ffd_decode",
    "kept_mass",
    "merge_partials",
    "pack_codes",
    "quantize_block",
    "quantize_blocks",
    "unpack_codes",
]

FORMS = {"xla": None, "cpu": cpu.why_not, "pallas_gpu": None, "pallas_tpu": None, "triton": triton.absent}


def availability() -> list[str]:
    """What runs in this process, as lines for `effml doctor`."""
    return _dispatch.describe("ffd_decode")


class FFDStats(NamedTuple):
    """What a call kept; arrays on the device, nothing waits for them.

    Attributes:
        kept: bool [B, Hkv, NB], the blocks whose residuals and values were read.
        keep_ratio: float32 [B], share of the row's blocks that were kept, over all heads; 1 for a row without blocks.
        threshold: float32 [B, Hq] (or [B, Q, Hq]), nats; scan scores below it were skipped.
        lse: float32 as `threshold`, log Σ e^s over the keys that were read.
    """

    kept: jax.Array
    keep_ratio: jax.Array
    threshold: jax.Array
    lse: jax.Array


def delta_from_ratio(ratio: float) -> float:
    """δ in nats that keeps the keys of at least `ratio` times the largest probability: -ln(ratio).

    The released code adds δ to scores in units of log 2: its "δ = 5" is 5 ln 2 = 3.47 nats here.

    Example:
        >>> round(delta_from_ratio(1 / 148), 2)
        5.0
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio} must be above 0 and at most 1")
    return -math.log(ratio)


def ffd_decode(
    q: jax.Array,
    k_code: jax.Array,
    k_scale: jax.Array,
    k_resid: jax.Array,
    v: jax.Array,
    k_tail: jax.Array | None = None,
    v_tail: jax.Array | None = None,
    *,
    num_blocks: jax.Array | None = None,
    tail_len: jax.Array | None = None,
    tail_mask: jax.Array | None = None,
    delta: float | int | jax.Array = 5.0,
    scale: float | None = None,
    threshold: str | jax.Array = "pseudo_fp",
    bits: int = 2,
    num_splits: int | None = None,
    implementation: str | None = None,
    return_stats: bool = False,
) -> Any:
    """Attention of one new token (or a few) to a cache of low-bit keys, and to a dense tail.

    a[h, t] = scale · q[h] · (c[t] - z) s[n]          scan, every block n
    keep n iff max over t in n of a[h, t] ≥ θ[h] for any h of the group
    out[h] = softmax over kept and tail keys of (a + scale · q[h] · r[t])  @  v

    θ = m - δ is fixed before the scan. m is, by `threshold`:

    - `"pseudo_fp"`: the largest score, residual included, in the first and the last block, and of the tail.
    - `"pseudo"`: the largest scan score in the first and the last block (the paper's rule). 2-bit scores run high, so
      this θ does too and skips more.
    - `"exact"`: the largest score of all keys, residual included. Reads the whole cache: for comparison.
    - `"certified"`: as `"pseudo"`, less the scan's error bound (the tail counts in full), and a block's own bound is
      added before it is compared: no key within δ of the largest score of all is dropped. Keeps many blocks at 2 bits.
    - an array: θ itself, float [B, Hq] (or [B, Q, Hq]); `delta` is not used.

    If the exact m were known, each key dropped would have at most e^-δ of the largest probability; their sum still
    grows with the number of keys. `kept_mass` measures it.

    The gradient goes to q, the tail, v, k_scale and a k_resid that is not float8, with kept blocks held fixed; it is
    computed over the whole cache by XLA. `jax.vmap` adds to the batch (an unbatched cache is repeated). Inside
    `jax.shard_map`, shard B or Hkv. NaN in q or the cache keeps blocks and reaches the output.

    Args:
        q: [B, Hq, D] or [B, Q, Hq, D], float32 or bfloat16; Hq = G · Hkv for any G, query head h reads KV head h // G.
        k_code: uint8 [B, Hkv, T, ceil(D · bits / 8)] of `quantize_blocks`; T = NB · block, block a multiple of 8.
        k_scale: float32 [B, Hkv, NB, D].
        k_resid: [B, Hkv, T, D], any floating dtype.
        v: [B, Hkv, T, Dv], float32 or bfloat16.
        k_tail: [B, Hkv, tail, D], keys that are not quantised and always read, in any order (the newest, and sinks).
        v_tail: [B, Hkv, tail, Dv].
        num_blocks: int32 [B], how many of the NB blocks are filled; None: all. What lies behind is never used.
        tail_len: int32 [B], how many tail keys are filled; None: all.
        tail_mask: bool [B, tail] or [B, Q, tail], which tail keys each query may see besides (a tree of drafts).
        delta: δ in nats, at least 0; infinity keeps every block.
        scale: of the scores; None is 1 / sqrt(D).
        threshold: one of the names above, or an array.
        bits: 2 or 4.
        num_splits: programs along the cache in the Pallas and Triton forms; None takes `default_splits`.
        implementation: None takes the best form of the platform (on a CPU the native one, or XLA's where there is no
            C++ compiler); `"xla"`, `"cpu"`, `"pallas"`, `"triton"` take it or raise.
        return_stats: whether to return `FFDStats` too.

    Returns:
        Like q with Dv at its end, of q's dtype; a row without any key is 0. With `return_stats` (out, FFDStats).

    Raises:
        TypeError: for a dtype that is not allowed.
        ValueError: for shapes or values that do not fit.
        NotImplementedError: if the named implementation can't run, with every reason.

    Source: "Faster Than Flash: Exploiting Attention Sparsity for Efficient Long-Context Decoding" (arXiv 2609.00097)
    and its released code; `pseudo_fp` and `certified` are ours.

    Example:
        >>> k, v = jax.random.normal(jax.random.key(0), (2, 1, 1, 64, 8))
        >>> cache = quantize_blocks(k.at[:, :, 16:48].add(-4.0), 16)
        >>> out, stats = ffd_decode(jnp.full((1, 2, 8), 3.0), *cache, v, return_stats=True)
        >>> out.shape, stats.kept[0, 0].tolist()
        ((1, 2, 8), [True, False, False, True])
    """
    given = {
        "q": q, "k_code": k_code, "k_scale": k_scale, "k_resid": k_resid, "v": v, "k_tail": k_tail, "v_tail": v_tail,
        "num_blocks": num_blocks, "tail_len": tail_len, "tail_mask": tail_mask, "delta": delta, "threshold": threshold,
    }  # fmt: skip
    optional = ("k_tail", "v_tail", "num_blocks", "tail_len", "tail_mask")
    for name, array in given.items():
        if not (array is None and name in optional) and not (name == "threshold" and isinstance(array, str)):
            given[name] = as_array(name, array)
    spec, mode = checked(**given, scale=scale, bits=bits, num_splits=num_splits)
    if mode:
        given["threshold"] = None
    arrays = jax.tree.map(jnp.asarray, tuple(given.values()))
    # A program belongs to the platforms that its forms were chosen for.
    out, stats = _decode(implementation, spec, mode, _dispatch.platforms(), *arrays)
    return (out, stats) if return_stats else out


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _decode(
    implementation, spec, mode, platforms,
    q, k_code, k_scale, k_resid, v, k_tail, v_tail, num_blocks, tail_len, tail_mask, delta, theta,
):  # fmt: skip
    del platforms
    queries = 1 if q.ndim == 3 else q.shape[1]
    b, hkv, hq, d = q.shape[0], k_code.shape[1], q.shape[-2], q.shape[-1]
    group, blocks = hq // hkv, k_scale.shape[2]

    def to_rows(x):
        """[B, (Q,) Hq, ...] -> [B, Hkv, Q G, ...]."""
        x = x.reshape(b, queries, hkv, group, *x.shape[q.ndim - 1 :])
        return jnp.moveaxis(x, 2, 1).reshape(b, hkv, queries * group, *x.shape[4:])

    def from_rows(x):
        x = jnp.moveaxis(x.reshape(b, hkv, queries, group, *x.shape[3:]), 1, 2)
        return x.reshape(*q.shape[:-1], *x.shape[4:])

    num_blocks = jnp.full(b, blocks, jnp.int32) if num_blocks is None else num_blocks.astype(jnp.int32)
    num_blocks = jnp.clip(num_blocks, 0, blocks)
    if k_tail is None:
        k_tail, v_tail = (jnp.zeros((b, hkv, 0, size), v.dtype) for size in (d, v.shape[-1]))
    tail = k_tail.shape[2]
    seen = jnp.ones((b, queries, tail), bool)
    if tail_len is not None:
        seen &= jnp.arange(tail) < tail_len[:, None, None]
    if tail_mask is not None:
        seen &= tail_mask.reshape(b, queries, tail)
    seen = jnp.repeat(seen, group, axis=1)
    rows = to_rows(q)
    if mode is None:
        theta = to_rows(theta.astype(jnp.float32))
    elif blocks == 0:
        theta = jnp.full(rows.shape[:3], -jnp.inf, jnp.float32)
    else:
        of_tail = reference.tail_partial_scores(spec, rows, k_tail, seen)
        probed = [lax.stop_gradient(x) for x in (rows, k_code, k_scale, k_resid, num_blocks)]
        top: Any = _joined(functools.partial(_probe, implementation, spec, mode))(*probed)
        theta = probe.threshold(mode, delta.astype(jnp.float32), top, of_tail)
    theta = lax.stop_gradient(theta)
    arrays = rows, k_code, k_scale, k_resid, v, k_tail, v_tail, num_blocks, seen, theta
    results: Any = _differentiable(implementation, spec, *arrays)
    out, lse, kept = results
    filled = num_blocks * hkv
    ratio = jnp.sum(kept, axis=(1, 2)) / jnp.maximum(filled, 1)
    ratio = jnp.where(filled > 0, ratio, 1.0).astype(jnp.float32)
    return from_rows(out).astype(q.dtype), FFDStats(kept, ratio, from_rows(theta), from_rows(lse))


def kept_mass(*arrays: Any, **options: Any) -> jax.Array:
    """Share of the softmax over the whole cache that a call reads: float32 as its heads; 1 - it bounds the error.

    ‖out - out of all blocks‖ ≤ (1 - mass) (max ‖v‖ of the dropped + max ‖v‖ of the read keys)

    Takes the arguments of `ffd_decode` and reads every block: for audits. "All" are the keys as they are stored.

    Example:
        >>> k, v = jax.random.normal(jax.random.key(0), (2, 1, 1, 64, 8))
        >>> float(kept_mass(jnp.ones((1, 1, 8)), *quantize_blocks(k, 16), v, delta=float("inf"))[0, 0])
        1.0
    """
    read = ffd_decode(*arrays, **{**options, "return_stats": True})[1]
    everything = {**options, "threshold": "pseudo", "delta": math.inf, "return_stats": True}
    return jnp.exp(read.lse - ffd_decode(*arrays, **everything)[1].lse)


def _reasons(implementation: str | None, spec: Spec, q, k_code, k_scale, k_resid, v) -> dict[str, str]:
    """Why a form can't take a call of these shapes."""
    if 0 in q.shape or k_scale.shape[2] == 0 or v.shape[-1] == 0:
        return dict.fromkeys(
            ("cpu", "pallas_gpu", "pallas_tpu", "triton"), "there are no queries or no blocks"
        )
    shapes = q.shape, k_code.shape, k_resid.shape, v.shape, k_resid.dtype
    found = {"pallas_gpu": pallas_gpu.refuses(spec, *shapes), "pallas_tpu": pallas_tpu.refuses(spec, *shapes)}
    found["triton"] = triton.absent() or found["pallas_gpu"]
    if implementation in (None, "cpu") and "cpu" in _dispatch.platforms():
        found["cpu"] = cpu.refuses(q.shape, k_resid.dtype) or cpu.why_not()
    return {form: why for form, why in found.items() if why}


def _offered(spec: Spec):
    forms = {
        "xla": xla.attend_blocks,
        "cpu": cpu.attend_blocks,
        "pallas_gpu": pallas_gpu.attend_blocks,
        "pallas_tpu": pallas_tpu.attend_blocks,
        "triton": triton.attend_blocks,
    }
    return {name: functools.partial(form, spec) for name, form in forms.items()}


def _probe(implementation: str | None, spec: Spec, mode: str, q, k_code, k_scale, k_resid, num_blocks):
    """The largest score of the probed blocks: natively where the call runs natively, else by XLA."""
    forms = {"xla": probe.largest_score, "cpu": cpu.largest_score}
    forms = {name: functools.partial(form, spec, mode) for name, form in forms.items()}
    named = implementation if implementation in (None, "cpu") else "xla"
    reasons = _reasons(named, spec, q, k_code, k_scale, k_resid, q)
    return _dispatch.choose(named, forms, reasons)(q, k_code, k_scale, k_resid, num_blocks)


def _attend(implementation: str | None, spec: Spec, *arrays):
    q, k_code, k_scale, k_resid, v, k_tail, v_tail, num_blocks, mask, theta = arrays
    reasons = _reasons(implementation, spec, q, k_code, k_scale, k_resid, v)
    run = _dispatch.choose(implementation, _offered(spec), reasons)
    m, total, acc, kept = run(q, k_code, k_scale, k_resid, v, num_blocks, theta)
    if mask.shape[-1]:
        tail = reference.tail_partial(spec, q, k_tail, v_tail, mask)
        m, total, acc = merge_partials(*(jnp.stack(pair) for pair in zip((m, total, acc), tail)))
    return *finish(m, total, acc), kept


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(implementation, spec, *arrays) -> Any:
    return _joined(functools.partial(_attend, implementation, spec))(*arrays)


def _forward(implementation, spec, *arrays):
    # The op again, so that there are second derivatives.
    results: Any = _differentiable(implementation, spec, *arrays)
    return results, (arrays[:7], arrays[8], results[2])


def _backward(implementation, spec, saved, cotangents):
    del implementation
    (q, k_code, k_scale, k_resid, v, k_tail, v_tail), mask, kept = saved
    narrow = jnp.finfo(k_resid.dtype).bits < 16  # a gradient in float8 would be of no use

    def of(q, k_scale, k_resid, v, k_tail, v_tail):
        return reference.attend_kept(spec, q, k_code, k_scale, k_resid, v, k_tail, v_tail, mask, kept)

    primals = (
        q,
        k_scale,
        lax.stop_gradient(k_resid).astype(jnp.float32) if narrow else k_resid,
        v,
        k_tail,
        v_tail,
    )
    grads = list(jax.vjp(of, *primals)[1](tuple(cotangents[:2])))
    if narrow:
        grads[2] = jnp.zeros_like(k_resid)
    grads = [gradient_like(g, x) for g, x in zip(grads, (q, k_scale, k_resid, v, k_tail, v_tail))]
    return grads[0], None, *grads[1:], None, None, None


_differentiable.defvjp(_forward, _backward)


def _joined(function):
    """A function of arrays whose vmap joins the mapped axis to the batch: a mapped `cond` would read every block."""
    op = custom_vmap(function)

    @op.def_vmap
    def rule(axis_size, in_batched, *arrays):
        def join(array, batched):
            array = array if batched else jnp.broadcast_to(array, (axis_size, *array.shape))
            return array.reshape(axis_size * array.shape[1], *array.shape[2:])

        batch = arrays[0].shape[1 if in_batched[0] else 0]
        results = op(*(join(array, batched) for array, batched in zip(arrays, in_batched)))
        results = jax.tree.map(lambda x: x.reshape(axis_size, batch, *x.shape[1:]), results)
        return results, jax.tree.map(lambda x: True, results)

    return op
