"""A small model and small texts that the tests of packed models share."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np

from effml.nn import transformer

CONFIG = transformer.TransformerConfig(
    vocab_size=64,
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    mlp_width=48,
    qkv_bias=True,
    mlp_bias=True,
)


@functools.cache
def params():
    """Parameters of `CONFIG` with biases and gains that are not trivial, the same bits in every process.

    NumPy draws them: what `jax.random` draws may differ in a last bit between compiler settings.
    """
    noise = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: transformer.init_params(jax.random.key(0), CONFIG))
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(
            (path[-1].key == "scale") + 0.2 * noise.normal(size=leaf.shape), leaf.dtype
        ),
        shapes,
    )


@contextlib.contextmanager
def quickly_compiled():
    """Without most of XLA's optimisations."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def flipped(path, place):
    """One bit of a file turned, at a fraction of its length."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def tokens(windows=4, length=12, seed=0):
    """int32[windows, length + 1]."""
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, (windows, length + 1)).astype(np.int32)
