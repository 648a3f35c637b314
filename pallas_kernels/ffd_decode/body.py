"""What every form shares: how a call is described, scan bounds, and partial softmax sums.

A *partial* over some keys is (m, total, acc): m = max s, total = Σ e^(s - m), acc = Σ e^(s - m) v. Of no keys it is
(-inf, 0, 0).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._varying import varying_axes
from pallas_kernels.ffd_decode.codes import middle

__all__ = ["Spec", "finish", "merge_partials", "partial_of_scores", "tail_scores", "varying_like"]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static part of a call.

    Attributes:
        bits: of a key code.
        block: keys a block.
        scale: of the scores.
        certified: whether a block's error bound is added to its scan scores before they meet the threshold.
        bound: (per scale, constant): the error of a scan score is at most scale Σ_d |q_d| (bound[0] s_d + bound[1]).
        num_splits: of the Pallas forms; None takes `default_splits`.
        exact_products: float32 products of full precision; otherwise bfloat16 operands on the matrix units.
        interpret: runs the Pallas forms in an interpreter.
    """

    bits: int
    block: int
    scale: float
    certified: bool = False
    bound: tuple[float, float] = (0.5, 0.0)
    num_splits: int | None = None
    exact_products: bool = True
    interpret: Any = dataclasses.field(default=False, compare=True)

    @property
    def z(self) -> float:
        """The code of zero."""
        return middle(self.bits)

    @property
    def per_byte(self) -> int:
        """Codes a byte."""
        return 8 // self.bits


def bound_of(bits: int, residual_dtype: Any, exact_products: bool) -> tuple[float, float]:
    """`Spec.bound` that holds for the keys that were quantised and for code plus stored residual alike.

    The residual of a key is at most s/2, and rounding it adds half a unit in its last place. A product of bfloat16
    operands adds 2^-8 of each term, which is at most z s |q|.
    """
    kind = jnp.finfo(residual_dtype)
    per_scale = 0.5 * (1 + float(kind.eps) / 2) + (1e-5 if exact_products else 2**-8) * middle(bits)
    return per_scale, float(kind.smallest_subnormal) / 2


def default_splits(batch: int, kv_heads: int, blocks: int) -> int:
    """Programs along the cache: about four for every processor of an H200 (132), at most 128 and one a block.

    Example:
        >>> default_splits(1, 8, 2048), default_splits(64, 8, 2048), default_splits(1, 8, 5)
        (66, 2, 5)
    """
    return max(1, min(128, blocks, -(-4 * 132 // max(batch * kv_heads, 1))))


def merge_partials(m: jax.Array, total: jax.Array, acc: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One partial from those along the first axis; empty ones, also all of them, are harmless.

    M = max_j m_j,    L = Σ_j l_j e^(m_j - M),    A = Σ_j acc_j e^(m_j - M)

    Args:
        m: [parts, ...], float32, largest score of each part (-inf: none).
        total: [parts, ...], float32, Σ e^(s - m).
        acc: [parts, ..., Dv], float32, Σ e^(s - m) v.

    Returns:
        (M, L, A) without the first axis; the attention is A / L and log Σ e^s is M + log L.

    Example:
        >>> m, total, acc = merge_partials(jnp.array([0.0, -jnp.inf]), jnp.array([2.0, 0.0]), jnp.array([[4.0], [0.0]]))
        >>> float(m), float(total), float(acc[0])
        (0.0, 2.0, 4.0)
    """
    top = jnp.max(m, axis=0)
    # -inf minus -inf is never formed.
    weight = jnp.where(m == -jnp.inf, 0.0, jnp.exp(m - jnp.where(top == -jnp.inf, 0.0, top)))
    return top, jnp.sum(weight * total, axis=0), jnp.sum(weight[..., None] * acc, axis=0)


def partial_of_scores(s: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The partial of scores [..., R, T] (-inf: not a key) over values [..., T, Dv], whose masked rows are finite."""
    # Results do not depend on m, so neither do gradients; the maximum of no key would make second ones NaN.
    m = jnp.max(jax.lax.stop_gradient(s), axis=-1, initial=-jnp.inf)
    p = jnp.exp(s - jnp.where(m == -jnp.inf, 0.0, m)[..., None])
    acc = jnp.einsum("...rt,...td->...rd", p, v.astype(jnp.float32), precision="highest")
    return m, jnp.sum(p, axis=-1), acc


def tail_scores(q: jax.Array, k_tail: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    """Scores [B, H, R, tail] of the dense tail, -inf where `mask` [B, R, tail] is False."""
    s = jnp.einsum("bhrd,bhtd->bhrt", q.astype(jnp.float32), k_tail.astype(jnp.float32), precision="highest")
    return jnp.where(mask[:, None], s * np.float32(scale), -jnp.inf)


def finish(m: jax.Array, total: jax.Array, acc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(attention, log Σ e^s) of a partial; no key at all gives 0 and -inf."""
    out = acc / jnp.where(total == 0, 1.0, total)[..., None]
    return out, jnp.where(total == 0, -jnp.inf, m + jnp.log(jnp.where(total == 0, 1.0, total)))


def varying_like(x: jax.Array, *arrays: jax.Array) -> jax.Array:
    """`x`, typed as varying over those axes of a `shard_map` over which `arrays` vary: a loop's carry must say so."""
    axes = varying_axes(*arrays) - varying_axes(x)
    if not axes:
        return x
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying")
