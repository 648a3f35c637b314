"""Why probing works, measured: do masks come to stand where the true next states stand?"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from effml._validate import count as check_count
from effml._validate import positive
from effml.decode import _loop
from effml.decode.esp._config import ESPConfig
from effml.decode.esp._masks import init_masks, update_masks, vocabulary_statistics
from effml.nn.transformer import embed

__all__ = ["AlignmentProbe", "alignment_probe", "hit_rates", "probe_logits", "probe_masks"]


class AlignmentProbe(NamedTuple):
    """Masks and true tokens, layer by layer. The last layer's entry is the state behind the final norm.

    Attributes:
        cosine: float32[prefixes, masks, layers + 1], between the state of mask i and that of the token in its place.
        hit: bool[prefixes, masks], whether the token behind it is among the mask's `top` best.
        tokens: int32[prefixes, masks + 1], what the model itself writes behind each prefix, greedily.
    """

    cosine: np.ndarray
    hit: np.ndarray
    tokens: np.ndarray

    def means(self, mask: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Mean cosine of each layer where mask `mask` hits, and where it misses; NaN where there is none.

        Example:
            >>> probe = AlignmentProbe(np.array([[[0.5]], [[0.1]]]), np.array([[True], [False]]), np.zeros((2, 2)))
            >>> [float(side[0]) for side in probe.means()]
            [0.5, 0.1]
        """
        sides = []
        for wanted in (True, False):
            chosen = self.cosine[self.hit[:, mask] == wanted, mask]
            sides.append(chosen.mean(0) if len(chosen) else np.full(self.cosine.shape[-1], np.nan))
        return sides[0], sides[1]


def probe_masks(
    params: Any,
    prefixes: Int[Array, "batch length"],
    model_config: Any,
    config: ESPConfig,
    *,
    prompt: int,
    key: PRNGKeyArray | None = None,
) -> Float[Array, "batch masks width"]:
    """The masks that stand behind prefixes whose first `prompt` tokens were the prompt and the others were written.

    Args:
        params: of the model.
        prefixes: ids.
        model_config: of the transformer.
        config: how masks begin and move.
        prompt: tokens of the prompt.
        key: for `mask_init="sample"`.

    Returns:
        float32 masks.

    Example:
        >>> from effml.nn.transformer import TransformerConfig, init_params
        >>> model = TransformerConfig(8, 4, 1, 2, 4)
        >>> params = init_params(jax.random.key(0), model)
        >>> probe_masks(params, jnp.array([[1, 2, 3]]), model, ESPConfig(), prompt=2).shape
        (1, 1, 4)
    """
    embeddings = embed(params, prefixes, model_config)
    batch = len(prefixes)
    keys = None if key is None else jax.random.split(key, batch)
    masks = init_masks(
        embeddings[:, :prompt],
        jnp.full(batch, prompt, jnp.int32),
        config,
        statistics=vocabulary_statistics(params, model_config.embedding_scale, config.num_tokens),
        keys=keys,
    )
    return update_masks(masks, embeddings[:, prompt:], config.rate)


def probe_logits(
    model: _loop.Model,
    params: Any,
    prefixes: Int[Array, "batch length"],
    masks: Float[Array, "batch kinds width"],
) -> tuple[Float[Array, "batch vocab"], Float[Array, "batch kinds vocab"]]:
    """What several single masks propose behind the same prefixes, in one pass: each sees the prefix and itself alone.

    Args:
        model: static part of the model.
        params: of the model.
        prefixes: ids.
        masks: one row for each kind of mask.

    Returns:
        The logits of the last token, and those of the masks.
    """
    length, kinds = prefixes.shape[1], masks.shape[1]
    x = embed(params, prefixes, model.config)
    x = jnp.concatenate([x, masks.astype(x.dtype)], axis=1)
    mask = np.tri(length + kinds, dtype=bool)
    mask[length:, length:] = np.eye(kinds, dtype=bool)
    positions = np.minimum(np.arange(length + kinds), length)
    rows = jnp.broadcast_to(jnp.arange(length - 1, length + kinds), (len(prefixes), kinds + 1))
    logits = model.forward(
        params,
        None,
        embeddings=x,
        positions=jnp.broadcast_to(positions, x.shape[:2]),
        mask=jnp.asarray(mask)[None],
        logits_for=rows,
    ).logits
    return logits[:, 0], logits[:, 1:]


def hit_rates(
    logits: Float[Array, "batch vocab"], targets: Int[Array, " batch"], at: tuple[int, ...]
) -> list[float]:
    """Share of targets among the k best, for each k of `at`.

    Example:
        >>> hit_rates(jnp.array([[0.0, 2.0, 1.0]]), jnp.array([2]), (1, 2))
        [0.0, 1.0]
    """
    own = jnp.take_along_axis(logits, targets[:, None], axis=1)
    rank = (logits > own).sum(1)
    return [float((rank < k).mean()) for k in at]


def alignment_probe(
    model: Any,
    prefixes: Int[np.ndarray, "prefixes length"],
    config: ESPConfig | None = None,
    *,
    prompt: int | None = None,
    top: int = 14,
    key: PRNGKeyArray | None = None,
) -> AlignmentProbe:
    r"""Compares the states of masks with those of the tokens that the model writes in their places.

    $$\cos(h^\ell_{\mathrm{mask}\,i}, h^\ell_{y_i})$$

    where y is the greedy continuation and $h^\ell$ the residual stream that enters layer l. Where the cosine is large
    enough, y_{i+1} is among the mask's best tokens; this plots how large it gets.

    Args:
        model: as for `generate`.
        prefixes: ids of equal lengths.
        config: masks.
        prompt: tokens of each prefix that are its prompt, the others moving the masks; None is half.
        top: candidates that count as a hit.
        key: for `mask_init="sample"`.

    Returns:
        An `AlignmentProbe`.

    Raises:
        ValueError: for prefixes of fewer than 2 tokens, ids outside the vocabulary, a prompt that is not a beginning
            of them, or no masks.
        TypeError: for ids, `prompt` or `top` that are no integers.

    Source: arXiv:2603.17942, section on alignment and its lemma.

    Example:
        >>> import types
        >>> from effml.nn.transformer import TransformerConfig, forward, init_params
        >>> model_config = TransformerConfig(vocab_size=16, width=8, num_layers=1, num_heads=2, mlp_width=8)
        >>> model = types.SimpleNamespace(
        ...     config=model_config,
        ...     params=init_params(jax.random.key(0), model_config),
        ...     forward=functools.partial(forward, config=model_config),
        ... )
        >>> alignment_probe(model, np.array([[1, 2, 3, 4]])).cosine.shape
        (1, 1, 2)
    """
    config = ESPConfig() if config is None else config
    prefixes = np.asarray(prefixes)
    if prefixes.ndim != 2 or prefixes.shape[0] < 1 or prefixes.shape[1] < 2:
        raise ValueError(f"prefixes of shape {prefixes.shape} must be [prefixes >= 1, length >= 2]")
    if prefixes.dtype.kind not in "iu":
        raise TypeError(f"prefixes of {prefixes.dtype} must be integer ids")
    vocab = model.config.vocab_size
    if prefixes.min() < 0 or prefixes.max() >= vocab:
        raise ValueError(
            f"prefixes hold ids from {prefixes.min()} to {prefixes.max()}, outside the vocabulary 0..{vocab - 1}"
        )
    prefixes = prefixes.astype(np.int32)
    positive("num_masks", config.num_masks)
    frozen = _loop.freeze(model.forward, model.config, None, None, None)
    prompt = prefixes.shape[1] // 2 if prompt is None else check_count("prompt", prompt)
    if prompt > prefixes.shape[1]:
        raise ValueError(f"prompt={prompt} is more than the {prefixes.shape[1]} tokens of a prefix")
    check_count("top", top)
    parts = _align(
        model.params, jnp.asarray(prefixes), key, model=frozen, config=config, prompt=prompt, top=top
    )
    return AlignmentProbe(*map(np.asarray, parts))


@functools.partial(jax.jit, static_argnames=("model", "config", "prompt", "top"))
def _align(
    params: Any, prefixes: Array, key: Any, *, model: _loop.Model, config: ESPConfig, prompt: int, top: int
) -> tuple[Array, Array, Array]:
    length, count = prefixes.shape[1], config.num_masks
    tokens = prefixes
    for _ in range(count + 1):  # a few tokens: the whole text again is quicker to compile than a cache
        logits = model.forward(params, tokens, logits_for="last").logits[:, 0]
        tokens = jnp.concatenate([tokens, logits.argmax(-1).astype(jnp.int32)[:, None]], axis=1)

    def tap(name: str, layer: Any, value: Array) -> Array | None:
        del layer
        return value[:, length : length + count] if name == "residual" else None

    def states(out: Any) -> Array:
        taps = out.taps
        layers = (
            [taps["residual"][i] for i in range(len(taps["residual"]))]
            if isinstance(taps, dict)
            else [layer["residual"] for layer in taps]
        )
        return jnp.stack([*layers, out.hidden[:, length : length + count]], axis=2).astype(jnp.float32)

    truth = states(model.forward(params, tokens[:, : length + count], tap=tap))
    masks = probe_masks(params, prefixes, model.config, config, prompt=prompt, key=key)
    x = embed(params, prefixes, model.config)
    x = jnp.concatenate([x, masks.astype(x.dtype)], axis=1)
    probed = model.forward(params, None, embeddings=x, tap=tap)
    guess = states(probed)
    norms = jnp.linalg.norm(truth, axis=-1) * jnp.linalg.norm(guess, axis=-1)
    cosine = (truth * guess).sum(-1) / jnp.maximum(norms, 1e-30)
    proposed = probed.logits[:, length:]
    wanted = tokens[:, length + 1 :]
    own = jnp.take_along_axis(proposed, wanted[:, :, None], axis=2)
    return cosine, (proposed > own).sum(-1) < top, tokens[:, length:]
