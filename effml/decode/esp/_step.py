"""One pass of the model that verifies a tree and lets the next one be drafted, and the compiled loop around it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from effml.decode._loop import Model
from effml.decode.esp._drafters import Drafter, Extra, Prompt, Seen, Text
from effml.decode.esp._tree import Tree, TreeSpec
from effml.decode.esp._verify import Choice, choose, choose_by_rejection, index_keys, verify
from effml.decode.sampling import SamplingConfig
from effml.nn.transformer import embed

__all__ = ["Rules", "State", "esp_step", "prefill", "rows_of_pass", "write"]

_NEVER = np.iinfo(np.int32).max


class Rules(NamedTuple):
    """How candidates are judged; hashable.

    Attributes:
        rejection: whether by rejection sampling.
        strict: whether near-ties are decided by a pass over one row.
        tie_tolerance: what a near-tie is.
        block: rows of a block of the cache that no pass may write across, or None.
    """

    rejection: bool = False
    strict: bool = False
    tie_tolerance: float | int = 1e-2
    block: int | None = None


class State(NamedTuple):
    """Where every sequence of a batch stands. The cache holds `length - 1` rows: all but that of the last token.

    Attributes:
        cache: the caches.
        text: int32[batch, room], prompts and what was written.
        length: int32[batch], tokens in it.
        written: int32[batch], new ones, with the one that ended the sequence.
        done: bool[batch], whether a stop id has come.
        failed: int32[batch], the index of the new token whose logits were NaN, or a very large number.
        memory: the drafter's.
        calls: int32[batch], passes of the model.
        accepted: int32[batch, depths], passes in which a candidate of this depth was accepted.
        near_ties: int32[batch], tokens chosen by less than the tolerance.
        divergences: int32[batch], near-ties that the pass over one row decided otherwise.
    """

    cache: Any
    text: Array
    length: Array
    written: Array
    done: Array
    failed: Array
    memory: Any
    calls: Array
    accepted: Array
    near_ties: Array
    divergences: Array

    def running(self, limit: Array | int) -> Array:
        """bool[batch], whether a sequence goes on.

        Example:
            >>> empty = jnp.zeros(1, jnp.int32)
            >>> state = State(None, None, empty, empty, empty > 0, empty + 9, None, *[empty] * 4)
            >>> state.running(1).tolist()
            [False]
        """
        return ~self.done & (self.written < limit) & jnp.all(self.failed == _NEVER)


@functools.partial(jax.jit, static_argnames=("model", "sampling", "drafter", "rules", "capacity", "room"))
def prefill(
    params: Any,
    tokens: Array,
    lengths: Array,
    key: PRNGKeyArray | None,
    stop_ids: Array,
    given: Any,
    *,
    model: Model,
    sampling: SamplingConfig,
    drafter: Drafter,
    rules: Rules,
    capacity: int,
    room: int,
) -> State:
    """Reads the prompts (int32[batch, length], padded on the right), chooses the first new tokens, and probes."""
    batch, width = tokens.shape
    embed_ = functools.partial(embed, params, config=model.config)
    x = embed_(tokens)
    memory = drafter.start(Prompt(params, model.config, tokens, x, lengths, key, given))
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    extra = drafter.extra(memory, TreeSpec((), 0).tree(last), embed_)
    chosen, positions, mask = lengths[:, None] - 1, jnp.arange(width, dtype=jnp.int32)[None], None
    if extra is not None:
        rows = extra.embeddings.shape[1]
        x = jnp.concatenate([x, extra.embeddings.astype(x.dtype)], axis=1)
        behind = chosen + extra.offsets
        positions = jnp.concatenate([jnp.broadcast_to(positions, (batch, width)), behind], axis=1)
        chosen = jnp.concatenate([chosen, jnp.broadcast_to(width + jnp.arange(rows), (batch, rows))], axis=1)
        mask = _prompt_mask(width, lengths, extra)
    cache = model.empty_cache(params, batch, capacity)
    # Nothing is committed yet, and attention costs by capacity: a dense cache of one row reads the same.
    seen = cache if model.cache_init is not None else model.empty_cache(params, batch, 1)
    positions = jnp.broadcast_to(positions, x.shape[:2]).astype(jnp.int32)
    out = model.forward(
        params, None, embeddings=x, positions=positions, mask=mask, cache=seen, logits_for=chosen
    )
    keys, values = jax.tree.map(lambda side: side[..., :width, :, :], (out.keys, out.values))
    cache = model.commit(params, cache, keys, values, lengths)
    zeros = jnp.zeros(batch, jnp.int32)
    first = choose(out.logits[:, 0], index_keys(key, zeros), sampling)
    near, differs = first.margin < rules.tie_tolerance, zeros > 0
    if rules.strict:
        alone = jax.lax.cond(
            near.any(),
            lambda: model.forward(params, tokens, cache=seen, logits_for=lengths[:, None] - 1).logits[:, 0],
            lambda: out.logits[:, 0],
        )
        decided = choose(jnp.where(near[:, None], alone, out.logits[:, 0]), index_keys(key, zeros), sampling)
        first, differs = decided, near & (decided.token != first.token)
    ok = (~first.failed).astype(jnp.int32)
    shown = Seen(out.logits, zeros, first.token[:, None], ok, embed_, first=1)
    text = jnp.zeros((batch, room), jnp.int32).at[:, :width].set(tokens)
    return State(
        cache=cache,
        text=text.at[jnp.arange(batch), lengths].set(first.token),
        length=lengths + 1,
        written=zeros + 1,
        done=(first.token[:, None] == stop_ids).any(-1),
        failed=jnp.where(first.failed, zeros, _NEVER),
        memory=drafter.observe(memory, shown),
        calls=zeros,
        accepted=jnp.zeros((batch, drafter.depths), jnp.int32),
        near_ties=near.astype(jnp.int32),
        divergences=differs.astype(jnp.int32),
    )


def _prompt_mask(width: int, lengths: Array, extra: Extra) -> Array:
    batch, rows = len(lengths), extra.embeddings.shape[1]
    causal = jnp.broadcast_to(np.tri(width, width + rows, dtype=bool), (batch, width, width + rows))
    seen = jnp.broadcast_to((jnp.arange(width) < lengths[:, None])[:, None], (batch, rows, width))
    own = jnp.broadcast_to(extra.sees[:, :, 1:], (batch, rows, rows))
    return jnp.concatenate([causal, jnp.concatenate([seen, own], axis=2)], axis=1)


def rows_of_pass(
    params: Any, tree: Tree, extra: Extra | None, root: Array, config: Any
) -> tuple[Array, Array, Array]:
    """Embeddings, positions and attention mask of the rows of a pass: the tree's, then the drafter's.

    Args:
        params: of the model.
        tree: the candidates.
        extra: the drafter's rows.
        root: int32[batch], position of the root.
        config: of the transformer.

    Returns:
        [batch, rows, width], int32[batch, rows], bool[#batch, rows, rows].

    Example:
        >>> from effml.nn.transformer import TransformerConfig
        >>> config = TransformerConfig(8, 4, 1, 2, 4)
        >>> tree = TreeSpec((2,), 0).tree(jnp.array([[1, 2, 3]]))
        >>> params = {"embedding": {"table": jnp.ones((8, 4))}}
        >>> rows_of_pass(params, tree, None, jnp.array([5]), config)[1].tolist()
        [[5, 6, 6]]
    """
    x = embed(params, tree.tokens, config)
    positions = root[:, None] + tree.depth
    if extra is None:
        return x, positions.astype(jnp.int32), jnp.asarray(tree.sees)
    lead = max(tree.sees.shape[0], extra.sees.shape[0])
    nodes, rows = tree.sees.shape[-1], extra.sees.shape[1]
    sees = jnp.pad(jnp.asarray(tree.sees), ((0, 0), (0, 0), (0, rows)))
    mask = jnp.concatenate(
        [jnp.broadcast_to(part, (lead, *part.shape[1:])) for part in (sees, jnp.asarray(extra.sees))], axis=1
    )
    assert mask.shape[1:] == (nodes + rows, nodes + rows)
    x = jnp.concatenate([x, extra.embeddings.astype(x.dtype)], axis=1)
    positions = jnp.concatenate([positions, root[:, None] + extra.offsets], axis=1)
    return x, positions.astype(jnp.int32), mask


def esp_step(
    params: Any,
    state: State,
    key: PRNGKeyArray | None,
    stop_ids: Array,
    limit: Array,
    *,
    model: Model,
    sampling: SamplingConfig,
    drafter: Drafter,
    rules: Rules,
) -> State:
    """One pass: drafts a tree, verifies it, commits the accepted rows and remembers what the extra rows have shown.

    Args:
        params: of the model.
        state: before the pass.
        key: of the tokens; None when greedy.
        stop_ids: int32[n].
        limit: int32[], new tokens at most.
        model: static part of the model.
        sampling: how tokens are chosen.
        drafter: proposes candidates.
        rules: how they are judged.

    Returns:
        The state after it; sequences that have ended do not change.
    """
    running = state.running(limit)
    text = Text(state.text, state.length, state.written, key)
    tree = drafter.draft(state.memory, text)
    embed_ = functools.partial(embed, params, config=model.config)
    extra = drafter.extra(state.memory, tree, embed_)
    x, positions, mask = rows_of_pass(params, tree, extra, state.length - 1, model.config)
    out = model.forward(
        params, None, embeddings=x, positions=positions, mask=mask, cache=state.cache, logits_for="all"
    )
    nodes = tree.tokens.shape[1]
    # Rows are gathered from all of them: a slice of the tree's would copy every row of the vocabulary.
    logits, ties = out.logits, state.near_ties
    divergences, calls = state.divergences, state.calls + running

    def choice(depth: int, rows: Array) -> Choice:
        keys = index_keys(key, state.written + depth)
        of = jnp.take_along_axis(logits, rows[:, None, None], axis=1)[:, 0]
        if depth == 0 and rules.strict:
            of = root_logits
        if not rules.rejection:
            return choose(of, keys, sampling)
        assert keys is not None
        if depth == drafter.depths:  # no candidate is that deep
            return choose(of, jax.vmap(jax.random.fold_in, (0, None))(keys, 2), sampling)
        places = np.flatnonzero(tree.depth[0] == depth + 1)  # drawn trees are static: host arrays
        follows = tree.parent[0, places[0]] == rows
        return choose_by_rejection(of, keys, sampling, tree.tokens[:, places], tree.scores[:, depth], follows)

    root_logits = logits[:, 0]
    if rules.strict:
        first = choose(root_logits, index_keys(key, state.written), sampling)
        near = running & (first.margin < rules.tie_tolerance)
        again = functools.partial(model.forward, params, None, cache=state.cache, logits_for="all")
        alone = jax.lax.cond(
            near.any(),
            lambda: again(embeddings=x[:, :1], positions=positions[:, :1]).logits[:, 0],
            lambda: root_logits,
        )
        root_logits = jnp.where(near[:, None], alone, root_logits)
        decided = choose(root_logits, index_keys(key, state.written), sampling)
        divergences = divergences + (near & (decided.token != first.token))
        calls = calls + near

    path = verify(tree, drafter.depths, choice)
    places = jnp.arange(drafter.depths + 1)
    near = path.margins < rules.tie_tolerance
    if rules.strict:  # one that was decided again was near before
        near = near.at[:, 0].set(first.margin < rules.tie_tolerance)
    stops = (path.tokens[:, :, None] == stop_ids).any(-1)
    count = jnp.minimum(path.count, limit - state.written)
    count = jnp.minimum(count, jnp.where(stops, places + 1, _NEVER).min(1))
    if rules.block is not None:
        count = jnp.minimum(count, rules.block - (state.length - 1) % rules.block)
    if rules.strict:  # what follows a near-tie is chosen at the root of the next pass
        count = jnp.minimum(count, jnp.where(near & (places > 0), places, _NEVER).min(1))
    bad = running & path.failed
    count = jnp.where(running & ~bad, count, 0)
    written = places < count[:, None]

    cache = model.commit(params, state.cache, out.keys, out.values, count, path.rows)
    index = jnp.where(written, state.length[:, None] + places, state.text.shape[1])
    row = jnp.take_along_axis(path.rows, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
    shown = Seen(out.logits, row, path.tokens, count, embed_, first=nodes)
    return State(
        cache=cache,
        text=state.text.at[jnp.arange(len(count))[:, None], index].set(path.tokens, mode="drop"),
        length=state.length + count,
        written=state.written + count,
        done=state.done | (stops & written).any(1),
        failed=jnp.where(bad, jnp.minimum(state.failed, state.written), state.failed),
        memory=drafter.observe(state.memory, shown),
        calls=calls,
        accepted=state.accepted + written[:, 1:],
        near_ties=ties + (near & written).sum(1),
        divergences=divergences,
    )


@functools.partial(
    jax.jit, static_argnames=("model", "sampling", "drafter", "rules"), donate_argnames=("state",)
)
def write(
    params: Any,
    state: State,
    key: PRNGKeyArray | None,
    stop_ids: Array,
    until: Array,
    limit: Array,
    full: Array,
    *,
    model: Model,
    sampling: SamplingConfig,
    drafter: Drafter,
    rules: Rules,
) -> State:
    """Passes until every sequence that goes on has `until` new tokens, or one has no room left for a whole path.

    Args:
        params: of the model.
        state: donated.
        key: of the tokens.
        stop_ids: int32[n].
        until: int32[], new tokens wanted now.
        limit: int32[], new tokens at most.
        full: int32[], rows of the cache that may be used; a very large number for one that cannot grow.
        model: static part of the model.
        sampling: how tokens are chosen.
        drafter: proposes candidates.
        rules: how they are judged.

    Returns:
        The state.
    """

    def wanted(state: State) -> Array:
        running = state.running(limit)
        room = jnp.where(running, state.length + drafter.depths, 0).max() <= full
        return (running & (state.written < until)).any() & room

    step = functools.partial(esp_step, params, model=model, sampling=sampling, drafter=drafter, rules=rules)
    return jax.lax.while_loop(wanted, lambda state: step(state, key, stop_ids, limit), state)
