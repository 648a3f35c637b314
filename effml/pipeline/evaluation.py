"""Measure a model on held-out text: what `effml evaluate` and the pipeline's second stage do."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from effml._validate import one_of, positive

if TYPE_CHECKING:
    from effml.data import Corpus
    from effml.models import LoadedModel

__all__ = ["Evaluation", "attention_options", "evaluate_model", "window_length"]

_WINDOW = 512


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on a text, and what it costs to keep and to run.

    Attributes:
        name: the model.
        nats_per_token: mean negative log-likelihood.
        perplexity: exp(nats_per_token).
        nats_per_byte: the same loss per byte of text: comparable between tokenizers.
        tokens: how many were scored.
        bytes_on_disk: size of the model's weight files.
        bytes_in_memory: size of its parameters.
        tokens_per_second: scored tokens per second, compilation left out.
    """

    name: str
    nats_per_token: float
    perplexity: float
    nats_per_byte: float
    tokens: int
    bytes_on_disk: int
    bytes_in_memory: int
    tokens_per_second: float


def window_length(loaded: Any) -> int:
    """The tokens in one window when nobody chose: what the model was trained with, else 512.

    Raises:
        ValueError: if what its folder says about that is no length.

    Example:
        >>> from types import SimpleNamespace
        >>> window_length(SimpleNamespace(extra={"trained_length": 128}))
        128
    """
    length = loaded.extra.get("trained_length", _WINDOW)
    if type(length) is not int or length < 2:
        raise ValueError(f"{loaded.source}: trained_length={length!r} must be an integer, 2 or more")
    return length


def attention_options(
    loaded: LoadedModel, mode: str | None, num_blocks: int | None = None, block_size: int | None = None
) -> dict[str, Any]:
    """The arguments of a model's forward pass that make its attention full or block-sparse.

    Sparse needs no training for it: a dense model is read through the blocks that `effml.attend.ssa` chooses as well,
    and loses what it was not trained to do without.

    Args:
        loaded: from `effml.models.load`.
        mode: "full", "sparse", or None, which leaves the model's own and takes no further argument.
        num_blocks: blocks that each token reads; None is the model's own, or 16 where it has none.
        block_size: keys of a block; None is the model's own, or 16 where it has none.

    Returns:
        `options` for `evaluate_model`.

    Raises:
        ValueError: for an unknown mode, a model of another kind than dense or ssa, sizes out of range, or sizes without
            the sparse mode.
    """
    if mode != "sparse" and (num_blocks is not None or block_size is not None):
        raise ValueError("--num-blocks and --block-size need --attention-mode sparse")
    if mode is None:
        return {}
    from effml.attend import ssa

    one_of("attention-mode", mode, ssa.MODES)
    if loaded.kind not in ("dense", "ssa"):
        raise ValueError(
            f"model={loaded.name!r} is of kind {loaded.kind!r}; only dense and ssa models have attention modes"
        )
    own = loaded.config.attention if loaded.kind == "ssa" else ssa.SSAConfig(gated=False)
    config = ssa.with_budget(own, num_blocks=num_blocks, block_size=block_size)
    return {"attention": _attention(config, mode)}


@functools.lru_cache(maxsize=32)
def _attention(config: Any, mode: str) -> Callable[..., Any]:
    # One object for equal arguments: programs are found again by its identity.
    from effml.attend import ssa

    return functools.partial(ssa.attention, config=config, mode=mode)


def _window_loss(
    params: Any, batch: Mapping[str, Any], *, forward: Callable[..., Any], bound: Any, prefix: tuple[int, ...]
) -> tuple[Any, dict[str, Any]]:
    """Weighted mean nats per token of windows that are read behind `prefix`."""
    import jax
    import jax.numpy as jnp

    begin = jnp.broadcast_to(jnp.array(prefix, jnp.int32), (batch["tokens"].shape[0], len(prefix)))
    read = jnp.concatenate([begin, batch["tokens"][:, :-1]], axis=1)
    logits = forward(params, read, **dict(bound)).logits[:, len(prefix) :]
    targets = jnp.take_along_axis(logits, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - targets
    weights = batch["weights"]
    return (losses * weights).sum() / jnp.maximum(weights.sum(), 1.0), {"tokens": weights.sum()}


def evaluate_model(
    loaded: LoadedModel,
    corpus: Corpus,
    *,
    split: str = "held_out",
    length: int | None = None,
    batch_size: int = 8,
    max_tokens: int | None = 65_536,
    options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Scores a loaded model of any kind on one side of a corpus.

    The text is cut into windows of `length` tokens that are read independently, each behind the tokenizer's
    `prefix_ids`, where it has any; every token of the text but the first is predicted exactly once.

    Args:
        loaded: from `effml.models.load`; its own forward pass is used.
        corpus: the text.
        split: "held_out" or "train".
        length: tokens in a window; with the prefix at most the model's own maximum. None is the length that the
            model was trained with where `effml train` noted it, else 512.
        batch_size: windows at a time.
        max_tokens: how many tokens to score; None for all.
        options: further arguments of its forward pass, hashable, such as those of `attention_options`.

    Returns:
        The measurements.

    Raises:
        ValueError: if the model has no tokenizer, a size is not positive, the text is too short
            or the loss is not finite.
    """
    import jax

    from effml import data, train, trees

    length = window_length(loaded) if length is None else length
    for name, value in (("length", length), ("batch_size", batch_size)):
        positive(name, value)
    if max_tokens is not None:
        positive("max_tokens", max_tokens)
    if loaded.tokenizer is None:
        raise ValueError(f"model {loaded.name!r} has no tokenizer, so text can't be scored with it")
    prefix = np.asarray(loaded.tokenizer.prefix_ids, np.int32)
    length = min(length, loaded.config.max_length - len(prefix))
    tokens = data.encode_corpus(corpus, split, loaded.tokenizer)
    if max_tokens is not None:
        tokens = tokens[: max_tokens + 1]
    windows = -(-(len(tokens) - 1) // length)  # a short text needs no rows of padding
    batch_size = min(batch_size, max(1, windows))
    batches = data.evaluation_batches(tokens, batch_size=batch_size, length=length)

    forward, bound = loaded.forward, ()
    if isinstance(forward, functools.partial) and not forward.args:
        # Opened, so that models of one configuration share a compiled program.
        forward, bound = forward.func, tuple(sorted(forward.keywords.items()))
    bound = tuple(sorted({**dict(bound), **(options or {})}.items()))
    prefix_ids = tuple(map(int, prefix))
    score = train.make_eval_step(
        functools.partial(_window_loss, forward=forward, bound=bound, prefix=prefix_ids)
    )

    jax.block_until_ready(score(loaded.params, batches[0]))
    started = time.perf_counter()
    scores = train.evaluate(score, loaded.params, batches)
    seconds = time.perf_counter() - started
    if not np.isfinite(scores["nats_per_token"]):
        raise ValueError(
            f"model {loaded.name!r} gives no finite loss: its weights hold NaN or infinity, or overflow"
        )
    text_bytes = len(loaded.tokenizer.decode(tokens[1:]).encode("utf-8"))
    return Evaluation(
        name=loaded.name,
        nats_per_token=scores["nats_per_token"],
        perplexity=scores["perplexity"],
        nats_per_byte=scores["nats_per_token"] * scores["tokens"] / max(text_bytes, 1),
        tokens=int(scores["tokens"]),
        bytes_on_disk=loaded.bytes_on_disk,
        bytes_in_memory=trees.byte_count(loaded.params),
        tokens_per_second=scores["tokens"] / seconds,
    )
