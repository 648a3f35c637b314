r"""The two streams of SSA, how far they are apart, and what a selection leaves out.

With A the share of a query's full softmax that falls on the keys it keeps, $\varepsilon = 1 - A$, and $o_K$, $o_D$ the
attention to the kept and to the dropped keys alone, each with weights that sum to 1,

$$o_\mathrm{full} = A\,o_K + \varepsilon\,o_D, \quad o_\mathrm{sparse} = o_K
  \quad\Rightarrow\quad o_\mathrm{full} - o_\mathrm{sparse} = \varepsilon\,(o_D - o_K),$$

so that $\lVert o_\mathrm{full} - o_\mathrm{sparse} \rVert \le 2\,\varepsilon\,\max_j \lVert v_j \rVert$: the streams
are as far apart as the dropped mass allows (`dropped_mass`), and pulling them together concentrates the softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from effml._validate import one_of
from effml.attend.ssa._config import MODES, SSAConfig
from effml.attend.ssa._select import (
    Layout,
    check_heads,
    in_parts,
    lay_out,
    layout_of,
    select_blocks,
    wide_type,
)
from effml.nn.attention import causal_attention
from pallas_kernels.block_sparse_attention import block_sparse_attention

__all__ = [
    "INDICES",
    "SSAInfo",
    "Streams",
    "attention_entropy",
    "dropped_mass",
    "full_attention",
    "is_sparse",
    "keep_indices",
    "smooth_l1",
    "sparse_attention",
    "ssa_attention",
]

INDICES = "ssa_indices"  # checkpoint_name of what was chosen
_WEIGHT_BYTES = 2**25  # full softmax weights that exist at once in what looks at them
keep_indices = jax.checkpoint_policies.save_only_these_names(INDICES)
"""Policy of `jax.checkpoint` (`rematerialize=` of `effml.nn.transformer.forward`) under which a block chosen forward is
the block used backward: computed again in bfloat16, a choice may differ."""


class Streams(NamedTuple):
    """What `ssa_attention` computed on its way, each with the gate applied; None where it was not needed.

    Attributes:
        full: [batch, length, heads, head].
        sparse: likewise.
        indices: int32[batch, length, kv_heads, blocks], as of `select_blocks`.
    """

    full: Array | None
    sparse: Array | None
    indices: Array | None


class SSAInfo(NamedTuple):
    """What a layer reports.

    Attributes:
        align: float32 scalar, its alignment loss; 0 outside training.
        dropped_mass: float32 scalar, mean over tokens and heads; None unless it was asked for.
        keep_ratio: float32[batch], blocks that were read over those that hold rows, for one new row behind an
            `SSACache`; else None.
    """

    align: Array
    dropped_mass: Array | None = None
    keep_ratio: Array | None = None


def full_attention(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads value"],
    *,
    scale: float | None = None,
    segment_ids: Int[Array | np.ndarray, "*shape"] | None = None,
) -> Float[Array, "batch length heads value"]:
    r"""Causal softmax attention to every earlier token of the segment.

    $$o_t = \sum_{s \le t} \mathrm{softmax}_s(c\,q_t \cdot k_s)\, v_s$$

    Args:
        query: head j reads key head `j // (heads // kv_heads)`.
        key: keys.
        value: values.
        scale: c; `head ** -0.5` if None.
        segment_ids: int[batch, length]; tokens see their own run of equal ids only.

    Returns:
        Output in the dtype of `query`; sums are float32 (float64 for float64).

    Raises:
        ValueError: for heads that don't divide, or ids of another shape.

    Example:
        >>> rows = jnp.ones((1, 3, 2, 4))
        >>> full_attention(rows, rows, rows).shape
        (1, 3, 2, 4)
    """
    check_heads(query, key)
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)
    if segment_ids is None and query.dtype == jnp.float32 and key.shape == value.shape:
        return causal_attention(query, key, value, scale=factor)
    batch, length, heads, _ = query.shape
    group = heads // key.shape[2]
    layout = layout_of(batch, length, 1, segment_ids)
    weights = _weights(query, key, layout.segment, layout.segment, _places(query), factor)
    weights = weights.reshape(batch, length, key.shape[2], group, length).astype(value.dtype)
    output = jnp.einsum(
        "btkgs,bskd->btkgd", weights, value, precision="highest", preferred_element_type=wide_type(query)
    )
    return output.reshape(batch, length, heads, -1).astype(query.dtype)


def _weights(
    query: Array, key: Array, segment: Array, key_segment: Array, position: Array, scale: float
) -> Array:
    """Softmax weights [batch, new, heads, keys] of queries at `position` [batch, new] among all keys."""
    batch, new, heads, head = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, new, kv_heads, heads // kv_heads, head)
    scores = jnp.einsum(
        "btkgd,bskd->btkgs", grouped, key, precision="highest", preferred_element_type=wide_type(query)
    )
    seen = (jnp.arange(key.shape[1]) <= position[..., None]) & (segment[..., None] == key_segment[:, None])
    scores = jnp.where(seen[:, :, None, None], scores * scale, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1).reshape(batch, new, heads, -1)


def sparse_attention(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads value"],
    indices: Int[Array, "batch length kv_heads num_blocks"],
    *,
    block_size: int,
    scale: float | None = None,
    segment_ids: Int[Array | np.ndarray, "*shape"] | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "batch length heads value"]:
    """Causal softmax attention to the tokens of the chosen blocks: `pallas_kernels.block_sparse_attention`.

    Args:
        query: head j reads key head `j // (heads // kv_heads)`.
        key: keys.
        value: values.
        indices: of `select_blocks` with the same segments; -1 for none.
        block_size: keys of a block, from 8.
        scale: factor on the scores; `head ** -0.5` if None.
        segment_ids: int[batch, length]; blocks are counted from the first token of each run.
        max_segments: as for `select_blocks`.
        implementation: None, "xla" or "pallas".

    Returns:
        Output in the dtype of `query`.

    Raises:
        ValueError: for shapes that do not fit or a block size below 8.
        NotImplementedError: if the named implementation can't run here.

    Example:
        >>> rows = jnp.ones((1, 32, 2, 4))
        >>> own = jnp.broadcast_to((jnp.arange(32) // 8)[None, :, None, None], (1, 32, 2, 1))
        >>> sparse_attention(rows, rows, rows, own, block_size=8).shape
        (1, 32, 2, 4)
    """
    layout = layout_of(query.shape[0], query.shape[1], block_size, segment_ids, max_segments)
    return _sparse(query, key, value, indices, layout, block_size, scale, implementation)


def _sparse(
    query: Array,
    key: Array,
    value: Array,
    indices: Array,
    layout: Layout,
    block_size: int,
    scale: float | None,
    implementation: str | None = None,
) -> Array:
    arguments: dict[str, Any] = {
        "block_size": block_size,
        "scale": scale,
        "implementation": implementation,
    }
    kernel: Any = block_sparse_attention  # with or without statistics its result is of another type
    if not layout.segmented:
        return kernel(query, key, value, indices, **arguments)
    output = kernel(
        query,
        lay_out(key, layout, block_size),
        lay_out(value, layout, block_size),
        jnp.where(indices < 0, -1, indices + layout.first[:, :, None, None]),
        positions=layout.slot,
        segment_ids=layout.segment,
        key_segment_ids=lay_out(layout.segment, layout, block_size, fill=-1),
        **arguments,
    )
    # More segments than there is room for: no number rather than a wrong one.
    fits = layout.slot < layout.blocks * block_size
    return jnp.where(fits[:, :, None, None], output, jnp.nan)


def smooth_l1(
    first: Float[Array, "*shape"], second: Float[Array, "*shape"], delta: float | int = 1.0
) -> Float[Array, ""]:
    r"""Mean of $x^2 / 2\delta$ where $|x| < \delta$ and $|x| - \delta / 2$ elsewhere, with x the difference.

    Example:
        >>> float(smooth_l1(jnp.array([0.0, 3.0]), jnp.array([1.0, 0.0])))
        1.5
    """
    wide = wide_type(first)
    distance = jnp.abs(first.astype(wide) - second.astype(wide))
    return jnp.where(distance < delta, distance**2 / (2 * delta), distance - delta / 2).mean()


def _alignment(full: Array, sparse: Array, config: SSAConfig) -> Array:
    still = jax.lax.stop_gradient
    terms = {
        "two_sided": [(full, still(sparse)), (still(full), sparse)],
        "full_only": [(full, still(sparse))],
        "sparse_only": [(still(full), sparse)],
        "joint": [(full, sparse), (full, sparse)],
    }[config.alignment]
    loss = sum((smooth_l1(*pair, config.huber_delta) for pair in terms), jnp.zeros((), wide_type(full)))
    if config.normalize_align:
        loss = loss / jnp.maximum(still(jnp.square(full.astype(loss.dtype)).mean()), 1e-12)
    return loss


def is_sparse(mode: Any) -> bool | Array:
    """A mode as a static bool, or as the array that it is."""
    if isinstance(mode, str):
        return one_of("mode", mode, MODES) == "sparse"
    if isinstance(mode, (bool, np.bool_)):
        return bool(mode)
    if getattr(mode, "dtype", None) == jnp.bool_ and mode.shape == ():
        return mode
    raise TypeError(f"mode={mode!r} must be 'full', 'sparse' or a bool scalar (True is sparse)")


def ssa_attention(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads value"],
    gate: Float[Array, "*shape"] | None,
    config: SSAConfig,
    *,
    mode: str | bool | np.bool_ | Bool[Array, ""],
    train: bool = False,
    scale: float | None = None,
    segment_ids: Int[Array | np.ndarray, "*ids"] | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch length heads value"], Float[Array, ""], Streams]:
    r"""The gated output of one stream, and how far the two are apart.

    $$o_\mathrm{full} = g \cdot \mathrm{attention}(\text{all}), \quad o_\mathrm{sparse} = g \cdot
      \mathrm{attention}(\text{chosen blocks}), \quad
      \mathrm{align} = H(o_\mathrm{full}, \bar o_\mathrm{sparse}) + H(\bar o_\mathrm{full}, o_\mathrm{sparse})$$

    with H the mean `smooth_l1` and a bar for what gets no gradient. The gradient of the sum is that of a single H
    without bars: +H' for the one stream, -H' for the other.

    In training both streams are computed; `mode` says which one goes on. Otherwise only that one is, and `align` is 0.

    Args:
        query: rotated queries; head j reads key head `j // (heads // kv_heads)`.
        key: rotated keys.
        value: values.
        gate: [batch, length, heads], factor on every head's output; None is 1.
        config: blocks, budget and alignment.
        mode: "full", "sparse", or a bool (True is sparse), which may be traced.
        train: whether both streams are computed.
        scale: on the scores; `head ** -0.5` if None.
        segment_ids: int[batch, length]; tokens see their own run of equal ids only.
        max_segments: as for `select_blocks`.
        implementation: of the sparse stream: None, "xla" or "pallas".

    Returns:
        The output, the alignment loss (float32, float64 for float64), and the `Streams`.

    Raises:
        ValueError: for heads that don't divide, an unknown mode, or ids of another shape.
        TypeError: for a mode that is none.

    Source: Shen et al., SSA, arXiv 2511.20102, section 3.

    Example:
        >>> rows = jax.random.normal(jax.random.key(0), (1, 32, 2, 4))
        >>> config = SSAConfig(block_size=8, num_blocks=2)
        >>> output, align, streams = ssa_attention(rows, rows, rows, None, config, mode="sparse", train=True)
        >>> output.shape, bool(align > 0), streams.indices.shape
        ((1, 32, 2, 4), True, (1, 32, 2, 2))
    """
    check_heads(query, key)
    if value.ndim != 4 or value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value of shape {value.shape} must have the rows and heads of key, {key.shape[:3]}")
    sparse_mode = is_sparse(mode)
    if gate is not None and gate.shape != query.shape[:3]:
        raise ValueError(f"gate of shape {gate.shape} must have the shape {query.shape[:3]} of query's heads")
    block_size = config.block_size
    layout = layout_of(query.shape[0], query.shape[1], block_size, segment_ids, max_segments)

    def gated(output: Array) -> Array:
        return output if gate is None else output * gate[..., None].astype(output.dtype)

    def full() -> Array:
        return gated(full_attention(query, key, value, scale=scale, segment_ids=segment_ids))

    def sparse() -> tuple[Array, Array]:
        indices = select_blocks(
            query,
            key,
            block_size=block_size,
            num_blocks=min(config.num_blocks, layout.blocks),
            scale=scale,
            segment_ids=segment_ids,
            max_segments=max_segments,
        ).indices
        indices = checkpoint_name(indices, INDICES)
        return gated(_sparse(query, key, value, indices, layout, block_size, scale, implementation)), indices

    nothing = jnp.zeros((), wide_type(query))
    if train:
        everywhere, (chosen, indices) = full(), sparse()
        align = _alignment(everywhere, chosen, config)
        output = jnp.where(sparse_mode, chosen, everywhere)
        return output, align, Streams(everywhere, chosen, indices)
    if isinstance(sparse_mode, bool):
        if not sparse_mode:
            return (output := full()), nothing, Streams(output, None, None)
        output, indices = sparse()
        return output, nothing, Streams(None, output, indices)
    return jax.lax.cond(sparse_mode, lambda: sparse()[0], full), nothing, Streams(None, None, None)


def dropped_mass(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    indices: Int[Array, "batch length kv_heads num_blocks"],
    *,
    block_size: int,
    scale: float | None = None,
    segment_ids: Int[Array | np.ndarray, "*shape"] | None = None,
) -> Float[Array, "batch length heads"]:
    r"""The share of each full softmax that falls on keys outside of the chosen blocks.

    $$\varepsilon_t = \sum_{s \le t,\ s\ \mathrm{div}\ b\ \notin\ \text{chosen}} \mathrm{softmax}_s(c\,q_t \cdot k_s)$$

    Reads every key: for measuring, not for serving.

    Args:
        query: rotated queries.
        key: rotated keys.
        indices: of `select_blocks` with the same segments.
        block_size: keys of a block.
        scale: c; `head ** -0.5` if None.
        segment_ids: int[batch, length].

    Returns:
        float32 (float64 for float64), from 0 to 1.

    Example:
        >>> rows = jnp.zeros((1, 4, 1, 2))
        >>> own = jnp.array([0, 0, 1, 1]).reshape(1, 4, 1, 1)
        >>> dropped_mass(rows, rows, own, block_size=2)[0, :, 0].tolist()
        [0.0, 0.0, 0.6666666865348816, 0.5]
    """
    check_heads(query, key)
    layout = layout_of(query.shape[0], query.shape[1], block_size, segment_ids)
    block = layout.first + layout.offset // block_size  # of each key
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)

    def part(query: Array, indices: Array, first: Array, segment: Array, position: Array) -> Array:
        weights = _weights(query, key, segment, layout.segment, position, factor)
        chosen = jnp.where(indices < 0, -1, indices + first[:, :, None, None])
        chosen = (chosen[..., None] == jnp.arange(layout.blocks)).any(3)  # [batch, new, kv_heads, blocks]
        kept = jax.vmap(lambda chosen, block: chosen[..., block])(chosen, block)
        return jnp.where(jnp.repeat(kept, query.shape[2] // key.shape[2], axis=2), 0, weights).sum(-1)

    rows = 4 * query.shape[0] * query.shape[2] * key.shape[1]
    return in_parts(
        part,
        max(1, _WEIGHT_BYTES // rows),
        query,
        indices,
        layout.first,
        layout.segment,
        _places(query),
    )


def attention_entropy(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    *,
    scale: float | None = None,
    segment_ids: Int[Array | np.ndarray, "*shape"] | None = None,
) -> Float[Array, "batch length heads"]:
    r"""Entropy of each full softmax in nats, $-\sum_s p_{ts} \log p_{ts}$: the lower, the sparser.

    Args:
        query: rotated queries.
        key: rotated keys.
        scale: factor on the scores; `head ** -0.5` if None.
        segment_ids: int[batch, length].

    Returns:
        float32 (float64 for float64), from 0 to log(t + 1).

    Example:
        >>> rows = jnp.zeros((1, 2, 1, 2))
        >>> attention_entropy(rows, rows)[0, :, 0].round(4).tolist()
        [0.0, 0.6930999755859375]
    """
    check_heads(query, key)
    layout = layout_of(query.shape[0], query.shape[1], 1, segment_ids)
    factor = query.shape[-1] ** -0.5 if scale is None else float(scale)

    def part(query: Array, segment: Array, position: Array) -> Array:
        weights = _weights(query, key, segment, layout.segment, position, factor)
        return jax.scipy.special.entr(weights).sum(-1)

    rows = 4 * query.shape[0] * query.shape[2] * key.shape[1]
    return in_parts(part, max(1, _WEIGHT_BYTES // rows), query, layout.segment, _places(query))


def _places(query: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(query.shape[1], dtype=jnp.int32), query.shape[:2])
