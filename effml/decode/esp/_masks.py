"""Soft masks: vectors that are no token, which a frozen model is asked to fill in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from effml.decode.esp._config import ESPConfig

__all__ = ["init_masks", "update_masks", "vocabulary_statistics"]


def vocabulary_statistics(
    params: Mapping[str, Any], scale: float = 1.0, num_tokens: int | None = None
) -> tuple[Float[Array, " width"], Float[Array, " width"]]:
    """Mean and standard deviation of the token embeddings, feature by feature, as the first layer reads them.

    Args:
        params: of the model, with `["embedding"]["table"]`: [vocab, width].
        scale: the model's factor on its embeddings.
        num_tokens: rows that belong to tokens; None is all.

    Returns:
        float32 mean and deviation.

    Example:
        >>> mean, deviation = vocabulary_statistics({"embedding": {"table": jnp.array([[1.0], [3.0]])}}, 2.0)
        >>> float(mean[0]), float(deviation[0])
        (4.0, 2.0)
    """
    table = params["embedding"]["table"][:num_tokens].astype(jnp.float32)
    return table.mean(0) * scale, table.std(0) * abs(scale)


def init_masks(
    embeddings: Float[Array, "batch length width"],
    lengths: Int[Array, " batch"],
    config: ESPConfig,
    *,
    statistics: tuple[Float[Array, " width"], Float[Array, " width"]] | None = None,
    keys: Key[Array, " batch"] | None = None,
) -> Float[Array, "batch masks width"]:
    r"""The masks that a prompt begins with; for `mask_init="mean"`, all of them $m_i = \frac1t \sum_{j \le t} e_{x_j}$.

    Args:
        embeddings: of the prompts, as the first layer reads them (after any scaling), padded on the right.
        lengths: tokens of each prompt.
        config: `mask_init` and `num_masks`. `"last_k"` gives mask i the embedding of prompt token t - k + i; of a
            prompt that is shorter, the first token serves for what is missing.
        statistics: from `vocabulary_statistics`, for those inits that speak of the vocabulary.
        keys: one for each prompt, for `mask_init="sample"`.

    Returns:
        float32 masks.

    Raises:
        ValueError: if `statistics` or `keys` are needed and absent.

    Source: arXiv:2603.17942, section 3.1 and its ablation of initialisations.

    Example:
        >>> embeddings = jnp.array([[[1.0], [3.0], [99.0]]])
        >>> init_masks(embeddings, jnp.array([2]), ESPConfig(2, (4, 2), mask_init="mean")).tolist()
        [[[2.0], [2.0]]]
    """
    batch, length, width = embeddings.shape
    rows, kind = config.num_masks, config.mask_init
    embeddings = embeddings.astype(jnp.float32)
    if kind == "mean":
        real = jnp.arange(length) < lengths[:, None]
        total = jnp.where(real[:, :, None], embeddings, 0.0).sum(1)
        return jnp.repeat((total / lengths[:, None])[:, None], rows, axis=1)
    if kind == "last_k":
        places = jnp.maximum(lengths[:, None] - rows + jnp.arange(rows), 0)
        return jnp.take_along_axis(embeddings, places[:, :, None], axis=1)
    if kind == "zero":
        return jnp.zeros((batch, rows, width), jnp.float32)
    if statistics is None:
        raise ValueError(f"mask_init={kind!r} speaks of the vocabulary: give its statistics")
    mean, deviation = statistics
    if kind == "sample":
        if keys is None:
            raise ValueError("mask_init='sample' draws at random: give a key")
        noise = jax.vmap(lambda key: jax.random.normal(key, (rows, width)))(keys)
        return mean + deviation * noise
    shift = config.sigmas * deviation if kind == "mu_sigma" else 0.0
    return jnp.broadcast_to(mean + shift, (batch, rows, width))


def update_masks(
    masks: Float[Array, "batch masks width"],
    embeddings: Float[Array, "batch new width"],
    rate: float | int,
    valid: Bool[Array, "batch new"] | None = None,
) -> Float[Array, "batch masks width"]:
    r"""Moves every mask towards the tokens just written, one after the other: $m_i \leftarrow m_i + \lambda (e - m_i)$.

    Args:
        masks: before.
        embeddings: of the new tokens, in their order.
        rate: $\lambda$.
        valid: which of them count; None is all.

    Returns:
        The masks after.

    Source: arXiv:2603.17942, section 3.1.

    Example:
        >>> update_masks(jnp.zeros((1, 1, 1)), jnp.array([[[1.0], [1.0]]]), 0.5).tolist()
        [[[0.75]]]
    """
    for step in range(embeddings.shape[1]):
        moved = masks + rate * (embeddings[:, step, None].astype(masks.dtype) - masks)
        masks = moved if valid is None else jnp.where(valid[:, step, None, None], moved, masks)
    return masks
