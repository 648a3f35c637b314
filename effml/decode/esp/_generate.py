"""Generation with verified drafts: in one go for a batch, or streamed for one prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, PRNGKeyArray

from effml._validate import count as check_count
from effml.decode import _loop
from effml.decode.chat import StopTexts
from effml.decode.esp import _step
from effml.decode.esp._config import ESPConfig
from effml.decode.esp._drafters import Drafter, ESPDrafter
from effml.decode.generation import Run, as_ids, as_prompts, encode_text, text_pieces
from effml.decode.sampling import SamplingConfig
from effml.nn.transformer import TransformerConfig

__all__ = ["ESPGeneration", "ESPStats", "ESPStream", "generate", "stream", "stream_text"]

Item = TypeVar("Item")
_NEVER = np.iinfo(np.int32).max


class ESPStats(NamedTuple):
    """How many passes of the model a batch took. The pass that reads the prompts is not counted.

    Attributes:
        calls: int32[batch], passes until each sequence had ended (with those that decided near-ties again).
        tokens: int32[batch], tokens that they wrote, stop ids among them; not the one that follows the prompt.
        accepted: int32[batch, depths], passes in which a candidate of that depth was accepted.
        near_ties: tokens, the one that follows the prompt too, whose choice was closer than
            `ESPConfig.tie_tolerance`.
        divergences: near-ties that a pass without drafts decided otherwise (with `strict`).
    """

    calls: Int[np.ndarray, " batch"]
    tokens: Int[np.ndarray, " batch"]
    accepted: Int[np.ndarray, "batch depths"]
    near_ties: int
    divergences: int

    @property
    def tau(self) -> float:
        """Tokens per pass, all sequences together; 1 if there was no pass.

        Example:
            >>> ESPStats(np.array([2]), np.array([3]), np.array([[1]]), 0, 0).tau
            1.5
        """
        calls = int(self.calls.sum())
        return float(self.tokens.sum() / calls) if calls else 1.0

    @property
    def calls_saved(self) -> float:
        r"""Share of plain decoding's passes that were not needed, $1 - 1/\tau$.

        Example:
            >>> ESPStats(np.array([1]), np.array([2]), np.array([[1]]), 0, 0).calls_saved
            0.5
        """
        return 1.0 - 1.0 / self.tau

    @property
    def accepted_by_depth(self) -> list[float]:
        """Share of passes in which a candidate of depth 1, 2, ... was accepted.

        Example:
            >>> ESPStats(np.array([4]), np.array([6]), np.array([[2, 0]]), 0, 0).accepted_by_depth
            [0.5, 0.0]
        """
        calls = max(int(self.calls.sum()), 1)
        return [float(share) for share in self.accepted.sum(0) / calls]


class ESPGeneration(NamedTuple):
    """New tokens of a batch, as `effml.decode.Generation` has them, and what they took.

    Attributes:
        tokens: int32[batch, max_new_tokens], padded with 0 behind each sequence's end.
        lengths: int32[batch], how many of them count.
        stopped: bool[batch], whether a stop id ended the sequence.
        stats: an `ESPStats`.
    """

    tokens: Int[np.ndarray, "batch new"]
    lengths: Int[np.ndarray, " batch"]
    stopped: Bool[np.ndarray, " batch"]
    stats: ESPStats


class ESPStream(Generic[Item]):
    """An iterator that knows, at any time, what was written so far took.

    Args:
        items: what it gives.
        run: where the numbers come from.
    """

    def __init__(self, items: Iterator[Item], run: ESPRun):
        self._items, self._run = items, run

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return next(self._items)

    @property
    def stats(self) -> ESPStats:
        """The numbers so far.

        Raises:
            ValueError: before the first item.
        """
        return self._run.stats()


def generate(
    model: Any,
    prompt_tokens: Any,
    *,
    max_new_tokens: int,
    config: ESPConfig | None = None,
    lengths: Any = None,
    sampling: SamplingConfig | None = None,
    key: PRNGKeyArray | None = None,
    stop_ids: Iterable[int] = (),
    drafter: Drafter | None = None,
    given: Any = None,
    cache_init: Callable[..., Any] | None = None,
    append: Callable[..., Any] | None = None,
    attention: Callable[..., Any] | None = None,
    block_size: int | None = None,
) -> ESPGeneration:
    """Continues a batch of prompts with the tokens that `effml.decode.generate` would write, in fewer passes.

    Every token is chosen from the model's own logits behind its true prefix, with the key that `effml.decode.generate`
    gives to that row and index, so in float32 the two write the same (near-ties apart, which roundings decide; see
    `ESPConfig.strict`). With `verify="rejection"` they only have the same distribution.

    Args:
        model: as for `effml.decode.generate`; its `forward` takes `embeddings`, `positions` and `mask`.
        prompt_tokens: int[batch, length] ids, padded on the right.
        max_new_tokens: most tokens to write for each prompt.
        config: masks, tree and verification; None is `ESPConfig()`.
        lengths: int[batch], tokens of each prompt; None means all of `length`.
        sampling: how tokens are chosen; None is greedy.
        key: random key; needed unless greedy, and for `mask_init="sample"`.
        stop_ids: ids that end a sequence.
        drafter: proposes candidates instead of the masks; `config` then only says how they are verified.
        given: a pytree for the drafter; for the masks float[k, width], or anything that broadcasts to
            [batch, k, width], to begin with instead of `mask_init`.
        cache_init: as for `effml.decode.generate`.
        append: as there.
        attention: as there.
        block_size: for a cache that changes what it holds when a block of so many rows is full: no pass writes across
            the end of a block, so that all rows are attended to as plain decoding would.

    Returns:
        An `ESPGeneration`, on the host.

    Raises:
        ValueError: as `effml.decode.generate` does; for a model that reads no embeddings, has a sliding window, or has
            no learned positions left for masks; for sparse attention that changes as blocks fill; for
            `verify="rejection"` when greedy or with another drafter; for masks of another shape.

    Source: Goel et al. 2026, arXiv:2603.17942.

    Example:
        >>> import functools, types, jax
        >>> from effml.nn.transformer import TransformerConfig, forward, init_params
        >>> config = TransformerConfig(vocab_size=64, width=16, num_layers=1, num_heads=2, mlp_width=24)
        >>> model = types.SimpleNamespace(
        ...     config=config,
        ...     params=init_params(jax.random.key(0), config),
        ...     forward=functools.partial(forward, config=config),
        ... )
        >>> written = generate(model, [[1, 2, 3]], max_new_tokens=4, config=ESPConfig(widths=(2,)))
        >>> written.tokens.shape, written.stats.tau >= 1
        ((1, 4), True)
    """
    tokens, sizes = as_prompts(prompt_tokens, lengths)
    run = ESPRun(
        model, tokens, sizes, max_new_tokens, sampling, key, stop_ids, cache_init, append, attention
    ).drafting(config, drafter, given, key, block_size)
    for _ in run.passes(None):
        pass
    state = run.spec_state
    text, done = np.asarray(state.text), np.asarray(state.done)
    counts = np.asarray(state.written) - done
    columns = np.arange(max_new_tokens)
    new = np.take_along_axis(text, np.minimum(sizes[:, None] + columns, text.shape[1] - 1), axis=1)
    new = np.where(columns < counts[:, None], new, 0).astype(np.int32)
    return ESPGeneration(new, counts.astype(np.int32), done, run.stats())


def stream(
    model: Any,
    prompt: Any,
    *,
    max_new_tokens: int,
    config: ESPConfig | None = None,
    sampling: SamplingConfig | None = None,
    key: PRNGKeyArray | None = None,
    stop_ids: Iterable[int] = (),
    chunk: int = 16,
    drafter: Drafter | None = None,
    given: Any = None,
    cache_init: Callable[..., Any] | None = None,
    append: Callable[..., Any] | None = None,
    attention: Callable[..., Any] | None = None,
    block_size: int | None = None,
) -> ESPStream[int]:
    """Continues one prompt and gives each new token out as it is known: the tokens of `generate`.

    Args:
        model: as for `generate`.
        prompt: int[length] ids.
        max_new_tokens: most tokens to write.
        config: as for `generate`.
        sampling: how tokens are chosen; None is greedy.
        key: random key.
        stop_ids: ids that end the text; they are not given out.
        chunk: tokens computed, at least, between two looks by the host.
        drafter: as for `generate`.
        given: as for `generate`.
        cache_init: as for `generate`.
        append: as for `generate`.
        attention: as for `generate`.
        block_size: as for `generate`.

    Returns:
        An iterator of ids, whose `stats` are those of what it has given so far.

    Raises:
        ValueError: as `generate` does.

    Example:
        >>> import functools, types, jax
        >>> from effml.nn.transformer import TransformerConfig, forward, init_params
        >>> config = TransformerConfig(vocab_size=64, width=16, num_layers=1, num_heads=2, mlp_width=24)
        >>> model = types.SimpleNamespace(
        ...     config=config,
        ...     params=init_params(jax.random.key(0), config),
        ...     forward=functools.partial(forward, config=config),
        ... )
        >>> len(list(stream(model, [1, 2, 3], max_new_tokens=4, config=ESPConfig(widths=(2,)))))
        4
    """
    check_count("chunk", chunk)
    tokens = as_ids("prompt", prompt)[None]
    sizes = np.array([tokens.shape[1]], np.int32)
    run = ESPRun(model, tokens, sizes, max_new_tokens, sampling, key, stop_ids, cache_init, append, attention)
    run.drafting(config, drafter, given, key, block_size)
    return ESPStream((int(token) for new in run.passes(chunk) for token in new), run)


def stream_text(
    model: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    config: ESPConfig | None = None,
    sampling: SamplingConfig | None = None,
    key: PRNGKeyArray | None = None,
    stop: Sequence[str] = (),
    stop_ids: Iterable[int] | None = None,
    special_tokens: bool = True,
    prefix: bool = True,
    chunk: int = 16,
    drafter: Drafter | None = None,
    given: Any = None,
    cache_init: Callable[..., Any] | None = None,
    append: Callable[..., Any] | None = None,
    attention: Callable[..., Any] | None = None,
    block_size: int | None = None,
) -> ESPStream[tuple[str, int]]:
    """Continues a text and gives out whole characters as they come: the text of `effml.decode.stream_text`.

    Args:
        model: as for `generate`, and has a `tokenizer`.
        prompt: the text.
        max_new_tokens: most tokens to write.
        config: as for `generate`.
        sampling: how tokens are chosen; None is greedy.
        key: random key.
        stop: texts that end the answer.
        stop_ids: ids that end it; None means the tokenizer's own.
        special_tokens: as for `effml.decode.stream_text`.
        prefix: as for `effml.decode.stream_text`.
        chunk: tokens computed, at least, between two looks by the host.
        drafter: as for `generate`.
        given: as for `generate`.
        cache_init: as for `generate`.
        append: as for `generate`.
        attention: as for `generate`.
        block_size: as for `generate`.

    Returns:
        An iterator of (piece of text, number of tokens computed for it), with `stats`.

    Raises:
        ValueError: as `generate` does, and if the model has no tokenizer.

    Example:
        >>> import functools, types, jax
        >>> from effml.data import ByteTokenizer
        >>> from effml.nn.transformer import TransformerConfig, forward, init_params
        >>> config = TransformerConfig(vocab_size=256, width=16, num_layers=1, num_heads=2, mlp_width=24)
        >>> model = types.SimpleNamespace(
        ...     config=config,
        ...     params=init_params(jax.random.key(0), config),
        ...     forward=functools.partial(forward, config=config),
        ...     tokenizer=ByteTokenizer(),
        ... )
        >>> pieces = stream_text(model, "def ", max_new_tokens=4, stop_ids=(), config=ESPConfig(widths=(2,)))
        >>> sum(count for _, count in pieces)
        4
    """
    check_count("chunk", chunk)
    stops = StopTexts(stop)
    tokenizer, tokens = encode_text(model, prompt, special_tokens=special_tokens, prefix=prefix)
    sizes = np.array([tokens.shape[1]], np.int32)
    ids = tokenizer.stop_ids if stop_ids is None else stop_ids
    run = ESPRun(model, tokens, sizes, max_new_tokens, sampling, key, ids, cache_init, append, attention)
    run.drafting(config, drafter, given, key, block_size)
    return ESPStream(text_pieces(tokenizer, stops, run.passes(chunk)), run)


class ESPRun(Run):
    """One checked call, with a drafter."""

    _stats: ESPStats | None = None

    def drafting(
        self,
        config: ESPConfig | None,
        drafter: Drafter | None,
        given: Any,
        key: PRNGKeyArray | None,
        block_size: int | None,
    ) -> ESPRun:
        """Checks what plain decoding does not know, and returns itself."""
        config = ESPConfig() if config is None else config
        if not isinstance(config, ESPConfig):
            raise TypeError(f"config={config!r} must be an ESPConfig")
        if drafter is not None and not isinstance(drafter, Drafter):
            raise TypeError(f"drafter={drafter!r} must be a Drafter, such as PromptLookup()")
        frozen, sampling = self.static["model"], self.static["sampling"]
        _check_model(frozen, self.params)
        config = config.for_vocabulary(frozen.config.vocab_size)
        rejection = config.verify == "rejection" and config.num_masks > 0
        if config.verify == "rejection" and sampling.greedy:
            raise ValueError("verify='rejection' draws tokens: give a temperature above 0, or verify='exact'")
        if config.verify == "rejection" and drafter is not None:
            raise ValueError(
                "verify='rejection' needs the probabilities that candidates were drawn with, which only the masks give"
            )
        if drafter is None:
            drafter = ESPDrafter(config)
            if config.mask_init == "sample" and given is None and config.num_masks and key is None:
                raise ValueError("mask_init='sample' draws at random: give a key")
            _check_masks(given, len(self.tokens), config.num_masks, frozen.config.width)
        if block_size is not None:
            check_count("block_size", block_size)
        if frozen.config.positions == "learned":
            self._fit(drafter, frozen.config.max_length, drafter.reach)
        # Masks draw from the key even when tokens do not.
        self.given, self.start_key = given, key
        self.static |= {
            "drafter": drafter,
            "rules": _step.Rules(rejection, config.strict, float(config.tie_tolerance), block_size),
        }
        self.room = self.capacities[-1] + drafter.depths + 1
        self.spec_state: _step.State
        return self

    def _fit(self, drafter: Drafter, table: int, reach: int) -> None:
        """Checks that a table of learned positions is long enough, and pads prompts no further than it allows."""
        needed = self.longest + self.max_new_tokens + reach
        if needed > table:
            raise ValueError(
                f"a prompt of {self.longest} tokens, max_new_tokens={self.max_new_tokens} and rows up to {reach} "
                f"places ahead need {needed} positions, but the model has learned {table}"
            )
        # The rows that read the prompt are counted too: those of the masks take the place of padding.
        self.tokens = self.tokens[:, : max(self.longest, table - drafter.prompt_rows)]

    def passes(self, chunk: int | None) -> Iterator[np.ndarray]:
        """int32[some]: new tokens of the first sequence, `chunk` or some more at a time (None: all at once)."""
        capacity, *larger = self.capacities
        depths = self.static["drafter"].depths
        self.spec_state = _step.prefill(
            self.params,
            self.tokens,
            self.lengths,
            self.key if self.key is not None else self.start_key,
            self.stop_ids,
            self.given,
            capacity=capacity,
            room=self.room,
            **self.static,
        )
        self._count()
        given_out = 0
        while True:
            yield (new := self._new(given_out))
            given_out += len(new)
            if not self._open():
                return
            target = self.max_new_tokens if chunk is None else min(given_out + chunk, self.max_new_tokens)
            while self._open() and int(np.asarray(self.spec_state.written)[self._going()].min()) < target:
                fullest = int(np.asarray(self.spec_state.length)[self._going()].max())
                if larger and fullest + depths > capacity:
                    capacity, *larger = larger
                    self.spec_state = _loop.grow(self.spec_state, capacity)
                self.spec_state = _step.write(
                    self.params,
                    self.spec_state,
                    self.key,
                    self.stop_ids,
                    jnp.int32(target),
                    jnp.int32(self.max_new_tokens),
                    jnp.int32(capacity if larger else _NEVER),
                    **self.static,
                )
                self._count()

    def stats(self) -> ESPStats:
        """The numbers so far."""
        if self._stats is None:
            raise ValueError("nothing has been written yet")
        return self._stats

    def _count(self) -> None:
        # Taken at once: a stop in the next call finds the state donated, and its arrays gone.
        state = self.spec_state
        self._stats = ESPStats(
            np.asarray(state.calls),
            np.asarray(state.written) - 1,
            np.asarray(state.accepted),
            int(np.asarray(state.near_ties).sum()),
            int(np.asarray(state.divergences).sum()),
        )

    def _going(self) -> np.ndarray:
        return np.asarray(self.spec_state.running(self.max_new_tokens))

    def _open(self) -> bool:
        failed = np.asarray(self.spec_state.failed)
        self._check_failed(failed)
        return bool(self._going().any())

    def _new(self, given_out: int) -> np.ndarray:
        state, start = self.spec_state, int(self.lengths[0])
        end = int(state.written[0]) - bool(state.done[0])
        return np.asarray(state.text)[0, start + given_out : start + end]


def _check_model(model: _loop.Model, params: Any) -> None:
    config = model.config
    if not isinstance(config, TransformerConfig) or "embedding" not in params:
        raise ValueError(
            f"a model of {type(config).__name__} can't read embeddings, which soft masks are: "
            "decode it with effml.decode.generate"
        )
    if getattr(config, "sliding_window", None):
        raise ValueError("sliding-window attention is not supported: a tree's rows see the whole cache")
    for function in [value for _, value in model.keywords]:
        while function is not None:
            keywords = getattr(function, "keywords", {})
            if "sparse" in (getattr(function, "mode", None), keywords.get("mode")):
                raise ValueError(
                    "attention in sparse mode is not supported: a block that fills up within a path changes what is "
                    "selected; use its full mode"
                )
            function = getattr(function, "func", None)


def _check_masks(given: Any, batch: int, masks: int, width: int) -> None:
    if given is None:
        return
    wanted = (batch, masks, width)
    try:
        shape, dtype = (
            np.shape(given),
            jnp.result_type(given if hasattr(given, "dtype") else np.asarray(given)),
        )
    except (TypeError, ValueError):
        raise TypeError(f"given={given!r} must be an array of masks, that broadcasts to {wanted}") from None
    fits = len(shape) <= 3 and all(a in (1, b) for a, b in zip(shape[::-1], wanted[::-1]))
    if not fits or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"masks of shape {shape}, {dtype}, were given; floating-point numbers of shape "
            f"{wanted} (batch, num_masks, width), or what broadcasts to it, are needed"
        )
