r"""SSA: train once, then run with full attention or with any budget of key blocks.

A model trained on full attention loses quality when it reads only some blocks, and one trained on blocks alone never
learns to ignore what it did not read. SSA trains one set of weights on both: every layer computes its full and its
block-sparse output from the same queries, keys and values, each is pulled towards the other, and a coin decides at
every step which of the two goes on to the loss.

$$L = \mathrm{CE}_\mathrm{mode} + \frac{\alpha}{\text{layers}} \sum_\ell
  \left[ H(o_\mathrm{full}, \bar o_\mathrm{sparse}) + H(\bar o_\mathrm{full}, o_\mathrm{sparse}) \right]$$

with outputs [batch, length, heads, head] before the output projection and after the gate, H the mean smooth L1 distance
and a bar for what gets no gradient.

The heart: two streams with the same weights, both in training; the alignment at every layer; selection by mean-pooled
rotated keys, shared by the query heads of a group, with the own block forced; real sparse compute at inference, with a
cache too. Details: the gate, the smooth L1 distance, the weight 10.

    >>> import jax, jax.numpy as jnp
    >>> from effml.nn import TransformerConfig
    >>> model = TransformerConfig(vocab_size=256, width=32, num_layers=1, num_heads=4, mlp_width=64, num_kv_heads=2)
    >>> config = SSATransformerConfig(model, SSAConfig(block_size=8, num_blocks=2))
    >>> params = init_params(jax.random.key(0), config)
    >>> batch = {"tokens": jnp.ones((1, 49), int)}
    >>> loss, metrics = jax.jit(training_loss, static_argnums=2)(params, batch, config, step_key=jax.random.key(1))
    >>> sorted(metrics)
    ['align', 'correct', 'cross_entropy', 'sparse', 'tokens']
    >>> serve = jax.jit(forward, static_argnames=("config", "mode", "num_blocks"))
    >>> serve(params, batch["tokens"], config=config, mode="sparse", num_blocks=4).logits.shape
    (1, 49, 256)

Source: Shen et al., "SSA: Sparse Sparse Attention by Aligning Full and Sparse Attention Outputs in Feature Space",
arXiv 2511.20102.
"""

from __future__ import annotations

from effml.attend.ssa._attention import (
    SSAInfo,
    Streams,
    attention_entropy,
    dropped_mass,
    full_attention,
    keep_indices,
    smooth_l1,
    sparse_attention,
    ssa_attention,
)
from effml.attend.ssa._cache import SSACache, append, attend, init_cache
from effml.attend.ssa._config import ALIGNMENTS, MODES, SSAConfig, SSATransformerConfig, with_budget
from effml.attend.ssa._module import SSAAttention
from effml.attend.ssa._select import BlockSelection, select_blocks
from effml.attend.ssa._transformer import (
    attention,
    decoding_options,
    forward,
    init_params,
    next_token_loss,
    sample_mode,
    ssa_loss,
    training_loss,
)

__all__ = [
    "ALIGNMENTS",
    "MODES",
    "BlockSelection",
    "SSAAttention",
    "SSACache",
    "SSAConfig",
    "SSAInfo",
    "SSATransformerConfig",
    "Streams",
    "append",
    "attend",
    "attention",
    "attention_entropy",
    "decoding_options",
    "dropped_mass",
    "forward",
    "full_attention",
    "init_cache",
    "init_params",
    "keep_indices",
    "next_token_loss",
    "sample_mode",
    "select_blocks",
    "smooth_l1",
    "sparse_attention",
    "ssa_attention",
    "ssa_loss",
    "training_loss",
    "with_budget",
]
