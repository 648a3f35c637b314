"""The two compiled programs of generation (reading the prompt, writing tokens) and the sizes they run at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from effml.decode.sampling import SamplingConfig, sample
from effml.nn import cache as dense
from effml.nn.transformer import TransformerConfig

__all__ = ["Model", "State", "bucket", "capacities", "freeze", "grow", "prefill", "token_keys", "write"]

_NEVER = np.iinfo(np.int32).max


class Model(NamedTuple):
    """The static part of a model, hashable: equal ones share their compiled programs.

    Attributes:
        function: `forward(params, tokens, cache=..., logits_for=..., **keywords)`.
        keywords: name and value of what `function` is always given.
        config: has what `cache_init` reads.
        cache_init: `(config, batch, capacity) -> caches`, as `effml.nn.init_cache`; None is the dense cache.
        append: `(layer_cache, keys, values, rows, counts) -> layer_cache`; None is the dense one.
    """

    function: Callable[..., Any]
    keywords: tuple[tuple[str, Any], ...]
    config: Any
    cache_init: Callable[..., Any] | None
    append: Callable[..., Any] | None

    def forward(self, params: Any, tokens: Array | None, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.function(params, tokens, **dict(self.keywords), **kwargs)

    def empty_cache(self, params: Any, batch: int, capacity: int) -> Any:
        """Caches without committed rows."""
        if self.cache_init is not None:
            return self.cache_init(self.config, batch, capacity)
        return dense.init_cache(self.config, batch, capacity, stacked=_is_stacked(params))

    def commit(
        self, params: Any, cache: Any, keys: Any, values: Any, counts: Array, rows: Array | None = None
    ) -> Any:
        """The caches with the first `counts` new rows of each sequence in them, or the first of those named."""
        append = dense.append if self.append is None else self.append

        def one(layer: Any, k: Array, v: Array) -> Any:
            return append(layer, k, v, rows, counts)

        if _is_stacked(params):
            return jax.vmap(one)(cache, keys, values)
        return [one(*layer) for layer in zip(cache, keys, values)]


class State(NamedTuple):
    """Where every sequence of a batch stands.

    Attributes:
        cache: the caches, without the row of `token`.
        token: int32[batch], the token written last.
        counts: int32[batch], tokens written, without the one that ended the sequence.
        done: bool[batch], whether a stop id has come.
        step: int32[], tokens written by the longest sequence, with the one that ends it.
        failed: int32[batch], the step at which the logits were NaN, or a very large number.
        kept: float32[2], the shares of the cache's blocks that steps read, summed, and how many were summed.
    """

    cache: Any
    token: Array
    counts: Array
    done: Array
    step: Array
    failed: Array
    kept: Array

    @property
    def running(self) -> Array:
        """Whether there is anything left to do."""
        return ~jnp.all(self.done) & jnp.all(self.failed == _NEVER)


def freeze(
    forward: Callable[..., Any],
    config: Any,
    attention: Callable[..., Any] | None,
    cache_init: Callable[..., Any] | None,
    append: Callable[..., Any] | None,
) -> Model:
    """The static part of a model; a `functools.partial` is opened, so that two loads of one model are equal."""
    keywords: dict[str, Any] = {} if attention is None else {"attention": attention}
    inner = getattr(config, "model", None)  # a packed model's configuration holds that of its transformer
    if isinstance(inner, TransformerConfig):
        config = inner
    if isinstance(forward, functools.partial) and not forward.args:
        opened = {**forward.keywords, **keywords}
        try:
            hash(tuple(opened.values()))
        except TypeError:  # then the partial itself is the identity, as for any other callable
            pass
        else:
            forward, keywords = forward.func, opened
    return Model(forward, tuple(sorted(keywords.items())), config, cache_init, append)


def bucket(length: int, smallest: int = 16) -> int:
    """The next power of two, so that nearby lengths share a compiled program.

    Example:
        >>> bucket(3), bucket(16), bucket(100)
        (16, 16, 128)
    """
    return max(smallest, 1 << (length - 1).bit_length())


def capacities(prompt: int, total: int, growing: bool) -> list[int]:
    """Cache sizes to go through: attention reads the whole cache, so it starts small and doubles.

    Example:
        >>> capacities(20, 100, True), capacities(20, 1500, True), capacities(20, 1500, False)
        ([128], [512, 1024, 2048], [2048])
    """
    last = bucket(total, 128)
    size = min(last, bucket(prompt + 1, 512)) if growing else last
    sizes = [size]
    while sizes[-1] < last:
        sizes.append(2 * sizes[-1])
    return sizes


@functools.partial(jax.jit, static_argnames=("capacity",))
def grow(state: Any, capacity: int) -> Any:
    """A `State`, or another NamedTuple with a `cache`, with dense caches of a larger capacity."""

    def larger(layer: dense.DenseCache) -> dense.DenseCache:
        more, kept = (0, capacity - layer.capacity), [(0, 0)] * (layer.keys.ndim - 2)
        return layer._replace(
            keys=jnp.pad(layer.keys, [*kept, (0, 0), more]),
            values=jnp.pad(layer.values, [*kept, more, (0, 0)]),
        )

    return state._replace(
        cache=jax.tree.map(larger, state.cache, is_leaf=lambda node: isinstance(node, dense.DenseCache))
    )


@functools.partial(jax.jit, static_argnames=("model", "sampling", "capacity"))
def prefill(
    params: Any,
    tokens: Array,
    lengths: Array,
    key: PRNGKeyArray | None,
    stop_ids: Array,
    *,
    model: Model,
    sampling: SamplingConfig,
    capacity: int,
) -> State:
    """Reads the prompts (int32[batch, length], padded on the right) and chooses the first new tokens."""
    batch = tokens.shape[0]
    cache = model.empty_cache(params, batch, capacity)
    # Nothing is committed yet, and attention costs by capacity: a dense cache of one row reads the same.
    seen = cache if model.cache_init is not None else model.empty_cache(params, batch, 1)
    out = model.forward(params, tokens, cache=seen, logits_for=lengths[:, None] - 1)
    cache = model.commit(params, cache, out.keys, out.values, lengths)
    start = State(
        cache=cache,
        token=jnp.zeros(batch, jnp.int32),
        counts=jnp.zeros(batch, jnp.int32),
        done=jnp.zeros(batch, bool),
        step=jnp.zeros((), jnp.int32),
        failed=jnp.full(batch, _NEVER, jnp.int32),
        kept=jnp.zeros(2, jnp.float32),
    )
    return _choose(start, out.logits[:, 0], key, stop_ids, sampling)


@functools.partial(jax.jit, static_argnames=("model", "sampling", "room"), donate_argnames=("state",))
def write(
    params: Any,
    state: State,
    key: PRNGKeyArray | None,
    stop_ids: Array,
    limit: Array,
    *,
    model: Model,
    sampling: SamplingConfig,
    room: int,
) -> tuple[Array, State]:
    """Writes at most `limit <= room` tokens; ends early when every sequence has ended.

    Returns:
        int32[batch, room] with -1 after each sequence's end, and the state.
    """
    batch = state.token.shape[0]

    def wanted(carry: tuple[Array, Array, State]) -> Array:
        i, _, state = carry
        return (i < limit) & state.running

    def advance(carry: tuple[Array, Array, State]) -> tuple[Array, Array, State]:
        i, written, state = carry
        out = model.forward(params, state.token[:, None], cache=state.cache, logits_for="last")
        # A step that failed commits nothing. That makes the commit depend on the logits, without which XLA
        # (CPU, JAX 0.10) sees no order between attention's reading and the write, and copies every cache twice.
        fed = jnp.where(state.done | _failed(out.logits[:, 0]), 0, 1)
        cache = model.commit(params, state.cache, out.keys, out.values, fed)
        kept = state.kept + _kept(getattr(out, "info", None), fed)
        state = _choose(state._replace(cache=cache, kept=kept), out.logits[:, 0], key, stop_ids, sampling)
        column = jnp.where(state.done, -1, state.token)
        return i + 1, jax.lax.dynamic_update_slice(written, column[:, None], (0, i)), state

    empty = jnp.full((batch, room), -1, jnp.int32)
    _, written, state = jax.lax.while_loop(wanted, advance, (jnp.zeros((), jnp.int32), empty, state))
    return written, state


def token_keys(key: PRNGKeyArray, indices: Array) -> Array:
    """The key of each row's new token with this index, `fold_in(fold_in(key, row), index)`.

    By row and index alone, so that neither the chunks, nor the other sequences, nor how many tokens a pass of the
    model gives change what is drawn.
    """
    rows = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(indices.shape[0]))
    return jax.vmap(jax.random.fold_in)(rows, indices)


def _kept(info: Any, fed: Array) -> Array:
    """float32[2], what the layers' `keep_ratio` [batch] adds up to over the sequences that were fed, and their number.

    Zeros where a layer reports none.
    """
    layers = info if isinstance(info, list) else [info]
    ratios: list[Any] = [getattr(layer, "keep_ratio", None) for layer in layers]
    if not ratios or any(ratio is None for ratio in ratios):
        return jnp.zeros(2, jnp.float32)
    ratio = jnp.stack(ratios).reshape(-1, fed.shape[0]).mean(0)
    return jnp.stack([(ratio * fed).sum(), fed.sum()]).astype(jnp.float32)


def _failed(logits: Array) -> Array:
    return jnp.isnan(logits).any(-1)


def _choose(
    state: State, logits: Array, key: PRNGKeyArray | None, stop_ids: Array, sampling: SamplingConfig
) -> State:
    """The state after one more token of each sequence that still runs."""
    keys = None
    if key is not None and not sampling.greedy:
        keys = token_keys(key, jnp.broadcast_to(state.step, logits.shape[:1]))
    token = sample(keys, logits, sampling)
    bad = _failed(logits) & ~state.done
    done = state.done | (token[:, None] == stop_ids).any(-1)
    return State(
        cache=state.cache,
        token=token,
        counts=state.counts + ~done,
        done=done,
        step=state.step + 1,
        failed=jnp.where(bad, jnp.minimum(state.failed, state.step), state.failed),
        kept=state.kept,
    )


def _is_stacked(params: Any) -> bool:
    return isinstance(params["layers"], Mapping)


def room_left(config: Any) -> int | None:
    """The most tokens a model reads, or None if its configuration does not say."""
    return config.max_length if isinstance(config, TransformerConfig) else getattr(config, "max_length", None)
