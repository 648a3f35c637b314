"""The native form on a CPU: calls the handlers in `cpu.cc`, which read residuals and values of kept blocks alone.

The codes are unpacked in registers on their way to the multiplier, so a scan reads what the codes weigh; XLA unpacks
them into memory first, which costs as much as reading float32 keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import _native
from pallas_kernels._varying import call_as_varying
from pallas_kernels.ffd_decode.body import Spec

__all__ = ["attend_blocks", "largest_score", "refuses", "why_not"]

_TARGETS = ("effml_ffd_attend", "effml_ffd_probe")
_RESIDUALS = ("float8_e4m3fn", "bfloat16", "float32")
_MOST_HEADS = 1 << 15


def why_not() -> str | None:
    """Why native code can't run here; None if it can. The first call may compile it, which takes seconds.

    Example:
        >>> why_not() is None or isinstance(why_not(), str)
        True
    """
    return _native.why_not(*_TARGETS)


def refuses(q: Any, residual_dtype: Any) -> str | None:
    """Why the native code can't take queries of this shape [B, H, R, D] or these residuals; None if it can."""
    if q[0] * q[1] > _MOST_HEADS:
        return f"{q[0] * q[1]} KV heads of the batch are more than {_MOST_HEADS}"
    if jnp.dtype(residual_dtype).name not in _RESIDUALS:
        return f"k_resid of {jnp.dtype(residual_dtype).name} (takes {', '.join(_RESIDUALS)})"
    return None


def _options(spec: Spec, certified: bool) -> dict[str, Any]:
    per_scale, constant = map(np.float32, spec.bound)
    return {
        "bits": np.int32(spec.bits),
        "certified": certified,
        "per_scale": per_scale,
        "constant": constant,
    }


def attend_blocks(
    spec: Spec,
    q: jax.Array,
    k_code: jax.Array,
    k_scale: jax.Array,
    k_resid: jax.Array,
    v: jax.Array,
    num_blocks: jax.Array,
    threshold: jax.Array,
) -> Any:
    """The partial (m, total, acc) of [B, H, R] queries over the kept blocks, and which those were, bool [B, H, NB]."""
    q = q.astype(jnp.float32) * np.float32(spec.scale)
    shapes = [q.shape[:3], q.shape[:3], (*q.shape[:3], v.shape[-1])]
    out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    out.append(jax.ShapeDtypeStruct((*q.shape[:2], k_scale.shape[2]), jnp.bool_))
    call: Any = functools.partial(jax.ffi.ffi_call("effml_ffd_attend", out), **_options(spec, spec.certified))
    return tuple(call_as_varying(call, q, k_code, k_scale, k_resid, v, num_blocks, threshold))


def largest_score(
    spec: Spec,
    mode: str,
    q: jax.Array,
    k_code: jax.Array,
    k_scale: jax.Array,
    k_resid: jax.Array,
    num_blocks: jax.Array,
) -> Any:
    """As `probe.largest_score`."""
    q = q.astype(jnp.float32) * np.float32(spec.scale)
    call = functools.partial(
        jax.ffi.ffi_call("effml_ffd_probe", jax.ShapeDtypeStruct(q.shape[:3], jnp.float32)),
        with_residual=mode in ("pseudo_fp", "exact"),
        all_blocks=mode == "exact",
        **_options(spec, mode == "certified"),
    )
    return call_as_varying(call, q, k_code, k_scale, k_resid, num_blocks)
