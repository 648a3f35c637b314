"""Generation: prompts in, new tokens out, in one go, or as they come.

Both run the same two compiled programs. One reads the prompts into a key-value cache; one is a
`jax.lax.while_loop` that writes tokens until every sequence has ended. Prompt and cache lengths are rounded up
to powers of two, so a second prompt of about the same length compiles nothing.

    >>> import functools, types, jax
    >>> from effml.nn.transformer import TransformerConfig, forward, init_params
    >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
    >>> model = types.SimpleNamespace(
    ...     config=config,
    ...     params=init_params(jax.random.key(0), config),
    ...     forward=functools.partial(forward, config=config),
    ... )
    >>> generate(model, np.array([[1, 2, 3]]), max_new_tokens=4).tokens.shape
    (1, 4)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int, PRNGKeyArray

from effml._validate import count
from effml.decode import _loop
from effml.decode.chat import StopTexts
from effml.decode.sampling import SamplingConfig

__all__ = ["Generation", "TextStream", "generate", "pad_prompts", "stream", "stream_text"]


class Generation(NamedTuple):
    """New tokens of a batch.

    Attributes:
        tokens: int32[batch, max_new_tokens], padded with 0 behind each sequence's end.
        lengths: int32[batch], how many of them count; a stop id ends a sequence and is not counted.
        stopped: bool[batch], whether a stop id ended the sequence (otherwise `max_new_tokens` did).
        kept: share of the cache's blocks that a step read, mean over steps, layers and sequences; None where attention
            does not report it, as dense attention, or no step was needed.
    """

    tokens: Int[np.ndarray, "batch new"]
    lengths: Int[np.ndarray, " batch"]
    stopped: Bool[np.ndarray, " batch"]
    kept: float | None = None


class TextStream:
    """An iterator of (piece of text, number of tokens) that knows what share of the cache was read so far.

    Args:
        pieces: what it gives.
        run: where the number comes from.
    """

    def __init__(self, pieces: Iterator[tuple[str, int]], run: Run):
        self._pieces, self._run = pieces, run

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return self

    def __next__(self) -> tuple[str, int]:
        return next(self._pieces)

    @property
    def kept(self) -> float | None:
        """As `Generation.kept`."""
        return self._run.kept


def pad_prompts(
    prompts: Sequence[Any],
) -> tuple[Int[np.ndarray, "batch longest"], Int[np.ndarray, " batch"]]:
    """Prompts of different lengths as the two arrays that `generate` takes.

    Args:
        prompts: one sequence of ids each.

    Returns:
        int32 ids, padded with 0 on the right, and the lengths.

    Raises:
        ValueError: if there is no prompt, or an empty one.

    Example:
        >>> pad_prompts([[1, 2, 3], [4]])[0].tolist()
        [[1, 2, 3], [4, 0, 0]]
    """
    rows = [as_ids(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts is empty: give at least one prompt")
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max()), np.int32)
    for row, ids in zip(tokens, rows):
        row[: len(ids)] = ids
    return tokens, lengths


def generate(
    model: Any,
    prompt_tokens: Any,
    *,
    max_new_tokens: int,
    lengths: Any = None,
    sampling: SamplingConfig | None = None,
    key: PRNGKeyArray | None = None,
    stop_ids: Iterable[int] = (),
    cache_init: Callable[..., Any] | None = None,
    append: Callable[..., Any] | None = None,
    attention: Callable[..., Any] | None = None,
) -> Generation:
    """Continues a batch of prompts.

    The token at step t of row b is drawn with `fold_in(fold_in(key, b), t)`.

    Args:
        model: has `params`, `config` and `forward(params, tokens, cache=..., logits_for=...)`, as
            `effml.models.LoadedModel` does.
        prompt_tokens: int[batch, length] ids, padded on the right (with anything) where prompts are shorter.
        max_new_tokens: most tokens to write for each prompt.
        lengths: int[batch], tokens of each prompt; None means all of `length`.
        sampling: how tokens are chosen; None is greedy.
        key: random key; needed unless greedy.
        stop_ids: ids that end a sequence.
        cache_init: `(config, batch, capacity) -> caches` of another kind; None is the dense cache, which is
            the only one that grows while it is written.
        append: `(layer_cache, keys, values, rows, counts) -> layer_cache` for that cache.
        attention: attention function for that cache; None leaves the model's own.

    Returns:
        A `Generation`, on the host.

    Raises:
        ValueError: for an empty prompt, ids outside the vocabulary, `max_new_tokens` below 1, more tokens
            than the model's `max_length`, a random choice without a key, or NaN logits.

    Example:
        >>> import functools, types, jax
        >>> from effml.nn.transformer import TransformerConfig, forward, init_params
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> params = init_params(jax.random.key(0), config)
        >>> model = types.SimpleNamespace(
        ...     config=config, params=params, forward=functools.partial(forward, config=config)
        ... )
        >>> tokens, lengths = pad_prompts([[1, 2, 3], [4]])
        >>> generate(model, tokens, lengths=lengths, max_new_tokens=4).lengths.tolist()
        [4, 4]
    """
    tokens, sizes = as_prompts(prompt_tokens, lengths)
    run = Run(model, tokens, sizes, max_new_tokens, sampling, key, stop_ids, cache_init, append, attention)
    columns = list(run.chunks(None))
    written = np.concatenate(columns, axis=1)[:, :max_new_tokens]
    padded = np.zeros((len(tokens), max_new_tokens), np.int32)
    padded[:, : written.shape[1]] = np.maximum(written, 0)
    return Generation(padded, np.asarray(run.state.counts), np.asarray(run.state.done), run.kept)


def stream(
    model: Any,
    prompt: Any,
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    key: PRNGKeyArray | None = None,
    stop_ids: Iterable[int] = (),
    chunk: int = 16,
    cache_init: Callable[..., Any] | None = None,
    append: Callable[..., Any] | None = None,
    attention: Callable[..., Any] | None = None,
) -> Iterator[int]:
    """Continues one prompt and gives each new token out as it is known.

    The tokens are those of `generate` with the same arguments, whatever `chunk` is.

    Args:
        model: as for `generate`.
        prompt: int[length] ids.
        max_new_tokens: most tokens to write.
        sampling: how tokens are chosen; None is greedy.
        key: random key; needed unless greedy.
        stop_ids: ids that end the text; they are not given out.
        chunk: tokens computed between two looks by the host (the first token comes alone).
        cache_init: as for `generate`.
        append: as for `generate`.
        attention: as for `generate`.

    Returns:
        An iterator of ids. Arguments are checked at once, not at the first token.

    Raises:
        ValueError: as `generate` does.

    Example:
        >>> import functools, types, jax
        >>> from effml.nn.transformer import TransformerConfig, forward, init_params
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> params = init_params(jax.random.key(0), config)
        >>> model = types.SimpleNamespace(
        ...     config=config, params=params, forward=functools.partial(forward, config=config)
        ... )
        >>> len(list(stream(model, [1, 2, 3], max_new_tokens=5, chunk=2)))
        5
    """
    count("chunk", chunk)
    tokens = as_ids("prompt", prompt)[None]
    sizes = np.array([tokens.shape[1]], np.int32)
    run = Run(model, tokens, sizes, max_new_tokens, sampling, key, stop_ids, cache_init, append, attention)
    return (int(token) for column in run.chunks(chunk) for token in column[0] if token >= 0)


def stream_text(
    model: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    sampling: SamplingConfig | None = None,
    key: PRNGKeyArray | None = None,
    stop: Sequence[str] = (),
    stop_ids: Iterable[int] | None = None,
    special_tokens: bool = True,
    prefix: bool = True,
    chunk: int = 16,
    cache_init: Callable[..., Any] | None = None,
    append: Callable[..., Any] | None = None,
    attention: Callable[..., Any] | None = None,
) -> TextStream:
    """Continues a text and gives out whole characters as they come.

    Args:
        model: as for `generate`, and has a `tokenizer`.
        prompt: the text.
        max_new_tokens: most tokens to write.
        sampling: how tokens are chosen; None is greedy.
        key: random key; needed unless greedy.
        stop: texts that end the answer; neither they nor what follows is given out.
        stop_ids: ids that end it; None means the tokenizer's own.
        special_tokens: whether names of special tokens in `prompt` are read as those tokens.
        prefix: whether the tokenizer's `prefix_ids` go in front; False for a rendered chat, whose template
            writes what the model expects.
        chunk: tokens computed between two looks by the host.
        cache_init: as for `generate`.
        append: as for `generate`.
        attention: as for `generate`.

    Returns:
        An iterator of (piece of text, number of tokens computed for it); pieces may be empty. Its `kept` is the share
        of the cache's blocks that steps read, where attention reports it.

    Raises:
        ValueError: as `generate` does, and if the model has no tokenizer.

    Example:
        >>> import functools, types, jax
        >>> from effml.data import ByteTokenizer
        >>> from effml.nn.transformer import TransformerConfig, forward, init_params
        >>> config = TransformerConfig(vocab_size=256, width=32, num_layers=2, num_heads=4, mlp_width=64)
        >>> model = types.SimpleNamespace(
        ...     config=config,
        ...     params=init_params(jax.random.key(0), config),
        ...     forward=functools.partial(forward, config=config),
        ...     tokenizer=ByteTokenizer(),
        ... )
        >>> sum(count for _, count in stream_text(model, "def ", max_new_tokens=5, stop_ids=()))
        5
    """
    count("chunk", chunk)
    stops = StopTexts(stop)
    tokenizer, tokens = encode_text(model, prompt, special_tokens=special_tokens, prefix=prefix)
    sizes = np.array([tokens.shape[1]], np.int32)
    ids = tokenizer.stop_ids if stop_ids is None else stop_ids
    run = Run(model, tokens, sizes, max_new_tokens, sampling, key, ids, cache_init, append, attention)

    return TextStream(text_pieces(tokenizer, stops, (column[0] for column in run.chunks(chunk))), run)


def encode_text(
    model: Any, prompt: str, *, special_tokens: bool, prefix: bool
) -> tuple[Any, Int[np.ndarray, "1 length"]]:
    """The model's tokenizer, and the ids of a prompt."""
    from effml.data import encode_prompt

    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise ValueError("the model has no tokenizer: use `stream` with token ids")
    if prefix:
        ids = encode_prompt(tokenizer, prompt, special_tokens=special_tokens)
    else:
        ids = tokenizer.encode(prompt, special_tokens=special_tokens)
    return tokenizer, as_ids("prompt", ids)[None]


def text_pieces(tokenizer: Any, stops: StopTexts, chunks: Iterable[np.ndarray]) -> Iterator[tuple[str, int]]:
    """Chunks of one sequence's new tokens (-1 is none) as pieces of text, with the number of tokens of each."""
    from effml.data import StreamDecoder

    decoder = StreamDecoder(tokenizer)
    for chunk in chunks:
        new = chunk[chunk >= 0]
        yield stops.push(decoder.push(new)), len(new)
        if stops.found is not None:
            return
    yield stops.push(decoder.finish()) + stops.finish(), 0


class Run:
    """One checked call: holds the arguments of the compiled programs, and the state between two of them.

    Shared with `effml.decode.esp`, which has programs of its own.
    """

    def __init__(
        self,
        model: Any,
        tokens: np.ndarray,
        lengths: np.ndarray,
        max_new_tokens: int,
        sampling: SamplingConfig | None,
        key: PRNGKeyArray | None,
        stop_ids: Iterable[int],
        cache_init: Callable[..., Any] | None,
        append: Callable[..., Any] | None,
        attention: Callable[..., Any] | None,
    ):
        count("max_new_tokens", max_new_tokens)
        for name in ("params", "config", "forward"):
            if not hasattr(model, name):
                raise TypeError(
                    f"model={type(model).__name__!r} must have params, config and forward: no {name}"
                )
        sampling = SamplingConfig() if sampling is None else sampling
        if not isinstance(sampling, SamplingConfig):
            raise TypeError(f"sampling={sampling!r} must be a SamplingConfig")
        _check_key(key)
        if not sampling.greedy and key is None:
            raise ValueError(f"temperature={sampling.temperature!r} draws at random: give a key")
        if (append is not None or attention is not None) and cache_init is None:
            raise ValueError("append and attention belong to another kind of cache: give its cache_init too")
        longest = int(lengths.max())
        _check_vocabulary(tokens, lengths, model.config)
        limit = _loop.room_left(model.config)
        if limit is not None and longest + max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} are more than "
                f"the model's max_length={limit}"
            )
        self.params = model.params
        self.max_new_tokens = max_new_tokens
        self.longest = longest
        self.key = None if sampling.greedy else key
        self.static: dict[str, Any] = {
            "model": _loop.freeze(model.forward, model.config, attention, cache_init, append),
            "sampling": sampling,
        }
        # A prompt of a learned-position model may not be padded beyond its table.
        width = min(_loop.bucket(longest), limit or _loop.bucket(longest))
        self.tokens = np.zeros((len(tokens), width), np.int32)
        visible = min(width, tokens.shape[1])
        self.tokens[:, :visible] = tokens[:, :visible]
        self.tokens[np.arange(width) >= lengths[:, None]] = 0
        self.lengths = lengths
        self.capacities = _loop.capacities(
            width, max(width, longest + max_new_tokens), growing=cache_init is None
        )
        stops = _as_stops(stop_ids)
        if stops and not 0 <= stops[0] <= stops[-1] < model.config.vocab_size:
            raise ValueError(
                f"stop_ids={stops} must be within the vocabulary 0..{model.config.vocab_size - 1}"
            )
        # Padded, so that the number of stop ids is no new program; no token is -1.
        self.stop_ids = np.array(stops + [-1] * (-len(stops) % 4 or (0 if stops else 4)), np.int32)
        self.state: _loop.State
        self.kept: float | None = None

    def chunks(self, chunk: int | None) -> Iterator[np.ndarray]:
        """int32[batch, some] of new tokens at a time, -1 behind the end; `chunk` None is as few as can be."""
        capacity, *larger = self.capacities
        self.state = _loop.prefill(
            self.params,
            self.tokens,
            self.lengths,
            self.key,
            self.stop_ids,
            capacity=capacity,
            **self.static,
        )
        yield np.where(self.state.done, -1, self.state.token)[:, None]
        left = self.max_new_tokens - 1
        used = self.longest
        while left and self._goes_on():
            if used == capacity:
                capacity, *larger = larger
                self.state = _loop.grow(self.state, capacity)
            steps = min(left, capacity - used, chunk or left)
            written, self.state = _loop.write(
                self.params,
                self.state,
                self.key,
                self.stop_ids,
                jnp.int32(steps),
                room=_loop.bucket(steps) if chunk is None else chunk,
                **self.static,
            )
            shares, steps_fed = np.asarray(self.state.kept).tolist()
            self.kept = shares / steps_fed if steps_fed else None
            yield np.asarray(written)[:, :steps]
            left -= steps
            used += steps
        self._goes_on()

    def _goes_on(self) -> bool:
        self._check_failed(np.asarray(self.state.failed))
        return not bool(np.asarray(self.state.done).all())

    def _check_failed(self, failed: np.ndarray) -> None:
        row = int(failed.argmin())
        if failed[row] < np.iinfo(np.int32).max:
            raise ValueError(
                f"the logits of sequence {row} are NaN at new token {failed[row]}: the parameters hold NaN or "
                "infinity, or the model overflows"
            )


def as_ids(name: str, ids: Any) -> np.ndarray:
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{name} must be one sequence of integer ids, got shape {array.shape}, {array.dtype}"
        )
    if not array.size:
        raise ValueError(f"{name} is empty: a model needs at least one token to go on from")
    return array


def as_prompts(prompt_tokens: Any, lengths: Any) -> tuple[np.ndarray, np.ndarray]:
    try:
        tokens = np.asarray(prompt_tokens)
    except ValueError:
        raise ValueError(
            "prompt_tokens are rows of different lengths: pad_prompts makes one array and the lengths of them"
        ) from None
    if tokens.ndim != 2 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(
            "prompt_tokens must be integer ids of shape [batch, length] (see pad_prompts), "
            f"got shape {tokens.shape}, {tokens.dtype}"
        )
    if not tokens.size:
        raise ValueError(f"prompt_tokens is empty, shape {tokens.shape}: at least one token is needed")
    batch, width = tokens.shape
    sizes = np.full(batch, width) if lengths is None else np.asarray(lengths)
    if sizes.shape != (batch,) or sizes.dtype.kind not in "iu":
        raise ValueError(f"lengths must be {batch} integers, one per prompt, got {lengths!r}")
    if sizes.min() < 1 or sizes.max() > width:
        raise ValueError(
            f"lengths must be between 1 (no empty prompt) and {width} (the width of prompt_tokens), got "
            f"{sizes.tolist()}"
        )
    return tokens, sizes.astype(np.int32)


def _as_stops(stop_ids: Any) -> list[int]:
    try:
        return sorted({operator.index(token) for token in stop_ids})
    except TypeError:
        raise TypeError(f"stop_ids={stop_ids!r} must be integer ids, such as [2]") from None


def _check_key(key: Any) -> None:
    """One key of either kind; rows and tokens get theirs from it."""
    if key is None:
        return
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not typed and dtype != np.uint32:
        raise TypeError(f"key={key!r} must be a jax.random.key")
    if shape != () and (typed or len(shape or ()) != 1):
        raise ValueError(f"keys of shape {shape} were given: one jax.random.key serves the whole batch")


def _check_vocabulary(tokens: np.ndarray, lengths: np.ndarray, config: Any) -> None:
    vocab = getattr(config, "vocab_size", None)
    if vocab is None:
        return
    outside = ((tokens < 0) | (tokens >= vocab)) & (np.arange(tokens.shape[1]) < lengths[:, None])
    if outside.any():
        row, column = np.argwhere(outside)[0]
        raise ValueError(
            f"token id {tokens[row, column]} at position {column} of prompt {row} is outside the vocabulary "
            f"0..{vocab - 1}"
        )
