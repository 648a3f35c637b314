"""Products with weights of one bit: a matrix of signs, and two of them with a rank between (NanoQuant's layer).

Signs are packed 32 per uint32 along the axis that is summed (`pack_signs`); no path makes the dense matrix.

| form | JAX | notes |
|---|---|---|
| `xla` | 0.10.2 to 0.12 | everywhere; its largest temporary is 1/32 of the dense matrix |
| `cpu` | 0.10.2 to 0.12 | native code, compiled on first use (`pallas_kernels._native`); sums looked up in tables |
| `pallas_gpu` | 0.10.2 to 0.12 (Triton; deprecated by JAX since 0.11) | one kernel for few rows, one on tensor cores |
| `pallas_tpu` | 0.10.2 to 0.12 | |

The Pallas forms were never run on a GPU or TPU so far: interpreted, lowered, and compiled to sm_90 and v5e code
(`tests/kernels`). Gradients, also second ones, go through XLA on every platform. bfloat16 x: `x * scale_in` and the
intermediate of rank length are rounded to bfloat16 before their products (not in the native form, nor in the GPU's for
few rows); sums are float32. float32 x: float32 throughout.

With no implementation named a CPU without AVX2 and AVX-512 takes XLA: its native code has no tables and is slower.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap

from pallas_kernels import _dispatch
from pallas_kernels._arguments import as_array
from pallas_kernels._varying import gradient_like
from pallas_kernels.binary_matmul import cpu, pallas_gpu, pallas_tpu, xla
from pallas_kernels.binary_matmul.blocks import MATVEC_ROWS, BlockSizes, default_blocks
from pallas_kernels.binary_matmul.body import bfloat16_parts, from_planes, to_planes
from pallas_kernels.binary_matmul.reference import BITS, pack_signs, unpack_signs

__all__ = [
    "FORMS",
    "BlockSizes",
    "availability",
    "binary_matmul",
    "default_blocks",
    "pack_signs",
    "sign_matmul",
    "unpack_signs",
]

FORMS = {"xla": None, "cpu": cpu.why_not, "pallas_gpu": None, "pallas_tpu": None}


def availability() -> list[str]:
    """What runs in this process, as lines for `effml doctor`."""
    return _dispatch.describe("binary_matmul")


def sign_matmul(
    x: jax.Array,
    words: jax.Array,
    scale_in: jax.Array | None = None,
    scale_out: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> jax.Array:
    """Product with a matrix of signs.

    y = ((x * scale_in) @ S) * scale_out + bias,    S in {-1, +1}^{in x out}

    Differentiable in everything but the words. Under `jax.vmap` over x alone the batch becomes rows of one product.
    Inside `jax.shard_map` it works on the local arrays.

    Args:
        x: [..., in], float32 or bfloat16; any number of rows, also none.
        words: uint32 [ceil(in / 32), out], `pack_signs(S, axis=0)`.
        scale_in: [in], floating; None is 1.
        scale_out: [out], floating; None is 1.
        bias: [out], floating; None is 0.
        implementation: None takes the best form of the platform; `"xla"`, `"cpu"`, `"pallas"` take that one or raise.
        block_sizes: of the Pallas forms; None takes `default_blocks`.

    Returns:
        [..., out] of x's dtype; sums are in float32.

    Raises:
        TypeError: for a dtype that is not allowed.
        ValueError: for shapes that do not fit.
        NotImplementedError: if the named implementation can't run, with every reason.

    Example:
        >>> signs = np.array([[1, -1], [1, 1], [-1, 1]])
        >>> sign_matmul(jnp.array([1.0, 2.0, 3.0]), pack_signs(signs))
        Array([0., 4.], dtype=float32)
    """
    return _call(implementation, block_sizes, x, {"words": words}, scale_in, scale_out, bias)


def binary_matmul(
    x: jax.Array,
    v_words: jax.Array,
    u_words: jax.Array,
    scale_in: jax.Array | None = None,
    scale_out: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    implementation: str | None = None,
    block_sizes: BlockSizes | None = None,
) -> jax.Array:
    """Product with a matrix that is factorised into two matrices of signs.

    y = (((x * scale_in) @ V) @ U) * scale_out + bias,    V in {-1, +1}^{in x rank}, U in {-1, +1}^{rank x out}

    This is the linear layer of NanoQuant (arXiv 2602.06694), with kernels as [in, out]. Signs take
    rank * (in + out) bits. Otherwise as `sign_matmul`.

    Args:
        x: [..., in], float32 or bfloat16; any number of rows, also none.
        v_words: uint32 [ceil(in / 32), rank], `pack_signs(V, axis=0)`.
        u_words: uint32 [ceil(rank / 32), out], `pack_signs(U, axis=0)`; any rank, not only multiples of 32.
        scale_in: [in], floating; None is 1.
        scale_out: [out], floating; None is 1.
        bias: [out], floating; None is 0.
        implementation: None takes the best form of the platform; `"xla"`, `"cpu"`, `"pallas"` take that one or raise.
        block_sizes: of the Pallas forms, for both products; None takes `default_blocks`.

    Returns:
        [..., out] of x's dtype; sums are in float32.

    Raises:
        TypeError: for a dtype that is not allowed.
        ValueError: for shapes that do not fit.
        NotImplementedError: if the named implementation can't run, with every reason.

    Example:
        >>> v, u = np.array([[1], [-1]]), np.array([[1, -1, 1]])
        >>> binary_matmul(jnp.array([3.0, 1.0]), pack_signs(v), pack_signs(u), scale_out=jnp.array([1.0, 1.0, 10.0]))
        Array([ 2., -2., 20.], dtype=float32)
    """
    words = {"v_words": v_words, "u_words": u_words}
    return _call(implementation, block_sizes, x, words, scale_in, scale_out, bias)


def _check(x: Any, words: dict[str, Any], scale_in: Any, scale_out: Any, bias: Any, block_sizes: Any) -> None:
    """Raises for shapes and dtypes that do not fit together."""
    if jnp.ndim(x) == 0:
        raise ValueError("x must have an axis to sum over, but it is a scalar")
    if jnp.result_type(x) not in (jnp.float32, jnp.bfloat16):
        raise TypeError(f"x must be float32 or bfloat16, not {jnp.result_type(x)}")
    size, before = np.shape(x)[-1], "the last axis of x"
    for name, array in words.items():
        if jnp.result_type(array) != jnp.uint32:
            raise TypeError(f"{name} must be uint32 (from pack_signs), not {jnp.result_type(array)}")
        if jnp.ndim(array) != 2:
            raise ValueError(f"{name} must have 2 axes, but its shape is {np.shape(array)}")
        if np.shape(array)[0] != -(-size // BITS):
            raise ValueError(
                f"{name} of shape {np.shape(array)} has {np.shape(array)[0]} rows of words, but {before} has {size} "
                f"entries, which take ceil({size} / {BITS}) = {-(-size // BITS)}"
            )
        size, before = np.shape(array)[1], f"{name}'s last axis"
    sizes = {"scale_in": np.shape(x)[-1], "scale_out": size, "bias": size}
    for (name, wanted), array in zip(sizes.items(), (scale_in, scale_out, bias)):
        if array is None:
            continue
        if not jnp.issubdtype(jnp.result_type(array), jnp.floating):
            raise TypeError(f"{name} must be floating, not {jnp.result_type(array)}")
        if np.shape(array) != (wanted,):
            raise ValueError(f"{name} must have shape ({wanted},), not {np.shape(array)}")
    if block_sizes is not None and not isinstance(block_sizes, BlockSizes):
        raise TypeError(f"block_sizes must be BlockSizes or None, not {type(block_sizes).__name__}")


def _call(implementation, block_sizes, x, words, scale_in, scale_out, bias):
    """Checks a call, with its words by name, and runs it."""
    x = as_array("x", x)
    words = {name: as_array(name, array) for name, array in words.items()}
    vectors = {"scale_in": scale_in, "scale_out": scale_out, "bias": bias}
    vectors = {name: None if v is None else as_array(name, v) for name, v in vectors.items()}
    _check(x, words, **vectors, block_sizes=block_sizes)
    arrays = jax.tree.map(jnp.asarray, (x, tuple(words.values()), *vectors.values()))
    reasons = _reasons(arrays[0], arrays[1], implementation, block_sizes)
    _dispatch.form_of(implementation, FORMS, reasons)  # raises here, before tracing
    # A program belongs to the platforms that its forms were chosen for.
    return _compiled(implementation, block_sizes, _dispatch.platforms(), *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _compiled(implementation, block_sizes, platforms, x, words, scale_in, scale_out, bias):
    del platforms
    y: Any = _differentiable(implementation, block_sizes, x, words, scale_in)
    y = y if scale_out is None else y * scale_out.astype(jnp.float32)
    y = y if bias is None else y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def _reasons(x: Any, words: Any, implementation: str | None, block_sizes: Any) -> dict[str, str]:
    """Why a form can't take this call."""
    if 0 in (*np.shape(x), *(n for array in words for n in np.shape(array))):
        return {form: "an axis of x or of the words is empty" for form in FORMS if form != "xla"}
    found = {}
    if block_sizes is not None:
        for form in ("pallas_gpu", "pallas_tpu"):
            found[form] = next(filter(None, (block_sizes.refused_by(form, len(w)) for w in words)), None)
    if "cpu" in _dispatch.platforms() and implementation in (None, "cpu"):
        found["cpu"] = cpu.why_not() or (cpu.slow() if implementation is None else None)
    return {form: why for form, why in found.items() if why}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _differentiable(implementation, block_sizes, x, words, scale_in):
    """The products alone, float32 [..., out]."""
    offered = {form: functools.partial(_run, form, block_sizes, False) for form in FORMS}
    run = _dispatch.choose(implementation, offered, _reasons(x, words, implementation, block_sizes))
    return _rows_of_batch(run)(x, scale_in, *words)


def _forward(implementation, block_sizes, x, words, scale_in):
    return _differentiable(implementation, block_sizes, x, words, scale_in), (x, words, scale_in)


def _backward(implementation, block_sizes, saved, g):
    del implementation, block_sizes
    x, words, scale_in = saved
    sizes = (x.shape[-1], *(array.shape[1] for array in words))
    g = g.reshape(math.prod(x.shape[:-1]), sizes[-1])
    for array, size in zip(reversed(words), reversed(sizes[:-1])):
        g = from_planes(xla.sign_product_transposed(g.astype(x.dtype), array), size)
    g = g.reshape(x.shape)
    d_scale_in = None
    if scale_in is not None:
        over_rows = tuple(range(g.ndim - 1))
        d_scale_in = gradient_like(jnp.sum(g * x.astype(jnp.float32), over_rows), scale_in)
        g = g * scale_in.astype(jnp.float32)
    return gradient_like(g, x), None, d_scale_in


_differentiable.defvjp(_forward, _backward)


def _rows_of_batch(product):
    """`product(x, scale_in, *words)`, whose vmap over x alone is one product of more rows: words are read once."""

    @custom_vmap
    def batched(x, scale_in, *words):
        return product(x, scale_in, *words)

    @batched.def_vmap
    def rule(axis_size, in_batched, x, scale_in, *words):
        del axis_size
        if not any(jax.tree.leaves(in_batched[1:])):
            return batched(x, scale_in, *words), True
        axes = jax.tree.map(lambda b: 0 if b else None, in_batched)
        return jax.vmap(product, axes)(x, scale_in, *words), True

    return batched


def _run(form, block_sizes, interpret, x, scale_in, *words):
    """The products of one form: [..., in] to float32 [..., out], without scale_out and bias."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
    if scale_in is not None:
        rows = rows * scale_in.astype(jnp.float32)
    if form == "cpu":
        return cpu.sign_products(rows, *words).reshape(*x.shape[:-1], words[-1].shape[1])
    for array in words:
        rows = _product(form, block_sizes, interpret, rows, array, x.dtype)
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


def _product(form, blocks, interpret, x, words, dtype):
    """`x @ S` of float32 [rows, in]: x is rounded to `dtype` where the form works in it."""
    rows, (depth, columns) = x.shape[0], words.shape
    if form == "xla":
        return xla.sign_product(to_planes(x.astype(dtype), depth), words)
    if form == "pallas_gpu" and (rows <= MATVEC_ROWS if blocks is None else blocks.rows < 16):
        blocks = blocks or default_blocks("gpu", rows, columns, depth)
        return pallas_gpu.sign_product(to_planes(x, depth), words, blocks, interpret=interpret)
    parts = bfloat16_parts(x.astype(dtype))
    planes = to_planes(jnp.concatenate(parts), depth)
    if form == "pallas_gpu":
        blocks = blocks or default_blocks("gpu", planes.shape[1], columns, depth)
        y = pallas_gpu.sign_product(planes, words, blocks, interpret=interpret)
    else:
        blocks = blocks or default_blocks("tpu", planes.shape[1], columns, depth)
        y = pallas_tpu.sign_product(planes, words, blocks, interpret=interpret)
    return jnp.sum(y.reshape(len(parts), rows, columns), axis=0)
