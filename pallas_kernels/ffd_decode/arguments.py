"""What a call may look like, checked before anything is traced."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from pallas_kernels._arguments import finite_number, whole_number
from pallas_kernels.ffd_decode.body import Spec, bound_of
from pallas_kernels.ffd_decode.codes import check_bits, code_bytes
from pallas_kernels.ffd_decode.probe import MODES

__all__ = ["checked"]


def checked(
    q, k_code, k_scale, k_resid, v, k_tail, v_tail, num_blocks, tail_len, tail_mask,
    delta, scale, threshold, bits, num_splits,
) -> tuple[Spec, str | None]:  # fmt: skip
    """The static part of a call and the threshold's mode; raises for what does not fit together."""
    bits = check_bits(bits)
    wide = (jnp.float32, jnp.bfloat16)
    arrays = {"q": q, "k_code": k_code, "k_scale": k_scale, "k_resid": k_resid, "v": v}
    for name, array in arrays.items():
        ndim = (3, 4) if name == "q" else (4,)
        if jnp.ndim(array) not in ndim:
            allowed = " or ".join(map(str, ndim))
            raise ValueError(f"{name} must have {allowed} axes, but its shape is {np.shape(array)}")
    for name, array, allowed in (
        ("q", q, wide), ("k_code", k_code, (jnp.uint8,)), ("k_scale", k_scale, (jnp.float32,)), ("v", v, wide)
    ):  # fmt: skip
        if jnp.result_type(array) not in allowed:
            names = " or ".join(jnp.dtype(kind).name for kind in allowed)
            raise TypeError(f"{name} must be {names}, not {jnp.result_type(array)}")
    if not jnp.issubdtype(k_resid.dtype, jnp.floating):
        raise TypeError(f"k_resid must be floating, not {k_resid.dtype}")
    if not isinstance(threshold, str) and not jnp.issubdtype(jnp.result_type(threshold), jnp.floating):
        raise TypeError(f"threshold must be floating, not {jnp.result_type(threshold)}")
    b, hq, d = q.shape[0], q.shape[-2], q.shape[-1]
    hkv, tokens, blocks = k_code.shape[1], k_code.shape[2], k_scale.shape[2]
    if hkv == 0 or hq % hkv:
        raise ValueError(f"q has {hq} heads, which is no multiple of the {hkv} heads of k_code")
    if d == 0:
        raise ValueError(f"q must have channels, but its shape is {q.shape}")
    block = tokens // blocks if blocks else 8
    if (tokens % blocks if blocks else tokens) or block % 8 or block == 0:
        raise ValueError(
            f"k_code has {tokens} keys and k_scale {blocks} blocks: a block must have a multiple of 8 keys"
        )
    wanted = {
        "k_code": (k_code, (b, hkv, tokens, code_bytes(d, bits))),
        "k_scale": (k_scale, (b, hkv, blocks, d)),
        "k_resid": (k_resid, (b, hkv, tokens, d)),
        "v": (v, (b, hkv, tokens, v.shape[-1])),
        "num_blocks": (num_blocks, (b,)),
        "tail_len": (tail_len, (b,)),
    }
    if (k_tail is None) != (v_tail is None):
        raise ValueError("k_tail and v_tail must be given together")
    tail = 0
    if k_tail is not None:
        tail = np.shape(k_tail)[2] if np.ndim(k_tail) == 4 else -1
        wanted["k_tail"] = k_tail, (b, hkv, tail, d)
        wanted["v_tail"] = v_tail, (b, hkv, tail, v.shape[-1])
        for name, array in (("k_tail", k_tail), ("v_tail", v_tail)):
            if jnp.result_type(array) not in wide:
                raise TypeError(f"{name} must be float32 or bfloat16, not {jnp.result_type(array)}")
    elif tail_len is not None or tail_mask is not None:
        raise ValueError("tail_len and tail_mask need a k_tail")
    if tail_mask is not None:
        wanted["tail_mask"] = tail_mask, (b, *q.shape[1:-2], tail)
        if jnp.result_type(tail_mask) != jnp.bool_:
            raise TypeError(f"tail_mask must be bool, not {jnp.result_type(tail_mask)}")
    if not isinstance(threshold, str):
        wanted["threshold"] = threshold, q.shape[:-1]
    elif threshold not in MODES:
        raise ValueError(f"threshold={threshold!r} must be one of {', '.join(MODES)}, or an array")
    for name, (array, shape) in wanted.items():
        if array is not None and np.shape(array) != shape:
            raise ValueError(f"{name} must have shape {shape}, not {np.shape(array)}")
    for name, array in (("num_blocks", num_blocks), ("tail_len", tail_len)):
        if array is not None and not jnp.issubdtype(jnp.result_type(array), jnp.integer):
            raise TypeError(f"{name} must hold integers, not {jnp.result_type(array)}")
    limits = (("num_blocks", num_blocks, blocks), ("tail_len", tail_len, tail))
    for name, array, most in limits:
        if array is not None and not isinstance(array, Tracer):
            values = np.asarray(array)
            if values.size and (values.min() < 0 or values.max() > most):
                raise ValueError(f"{name} must be in 0..{most}, but holds {values.min()} and {values.max()}")
    if np.ndim(delta):
        raise ValueError(f"delta must be a number, but its shape is {np.shape(delta)}")
    if not isinstance(delta, Tracer) and not float(delta) >= 0:
        raise ValueError(f"delta={float(delta)} must be at least 0 (nats)")
    if num_splits is not None:
        num_splits = whole_number("num_splits", num_splits, 1)
    scale = d**-0.5 if scale is None else finite_number("scale", scale)
    if scale <= 0:
        raise ValueError(f"scale={scale} must be above 0")
    mode = threshold if isinstance(threshold, str) else None
    exact = jnp.result_type(q) == jnp.float32
    bound = bound_of(bits, k_resid.dtype, exact)
    return Spec(bits, block, scale, mode == "certified", bound, num_splits, exact), mode
