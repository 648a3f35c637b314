"""A Llama-like model in float64 NumPy, written for the tests: grouped queries, biases, and skips that may turn."""

from __future__ import annotations

import jax
import numpy as np
import scipy.linalg
import scipy.special

from effml.nn import transformer
from effml.quantize.respinquant import RotationSet


def config(layers=2, *, biases=True, tied=False, kv_heads=2):
    return transformer.TransformerConfig(
        vocab_size=31,
        width=16,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=kv_heads,
        mlp_width=24,
        tied_head=tied,
        qkv_bias=biases,
        attention_output_bias=biases,
        mlp_bias=biases,
        norm_epsilon=1e-12,
    )


def random_params(model_config, seed=0):
    """Parameters whose gains and biases are none of the trivial ones."""
    shapes = jax.eval_shape(lambda: transformer.init_params(jax.random.key(0), model_config))
    generator = np.random.default_rng(seed)

    def draw(path, leaf):
        normal = generator.normal(size=leaf.shape)
        return {"scale": 1 + 0.3 * normal, "bias": 0.3 * normal}.get(path[-1].key, 0.2 * normal)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_rotations(spec, seed=0, dtype=np.float64):
    """Every basis drawn alone."""
    generator = np.random.default_rng(seed)

    def draw(count, size):
        return np.linalg.qr(generator.normal(size=(count, size, size)))[0].astype(dtype)

    d, n = spec.width, spec.num_layers
    return RotationSet(draw(n + 1, d), draw(n, d), draw(n, spec.head_dim))


def near_rotations(spec, size=0.05, seed=0, start=None, decay=1.0):
    """Bases a little apart, as training leaves them."""
    generator = np.random.default_rng(seed)

    def draw(count, n):
        directions = decay ** np.arange(n)
        skew = generator.normal(size=(count, n, n)) * size * np.outer(directions, directions)
        return np.stack([scipy.linalg.expm(one - one.T) for one in skew])

    d, n = spec.width, spec.num_layers
    first = np.eye(d) if start is None else start
    return RotationSet(first @ draw(n + 1, d), first @ draw(n, d), draw(n, spec.head_dim))


def logits(params, tokens, model, *, turns=None, down=None):
    """[batch, length, vocab]; `turns` = (attention[L, D, D], mlp[L, D, D]) of the skips, `down` = what h is turned by."""

    def rms(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + model.norm_epsilon) * scale

    def linear(x, p):
        return x @ p["kernel"] + p.get("bias", 0.0)

    h, groups = model.head_dim, model.num_heads // model.kv_heads
    batch, length = tokens.shape
    frequencies = model.rope_base ** (-np.arange(0, h, 2) / h)
    angles = np.arange(length)[:, None] * frequencies

    def rope(x):
        first, second = np.split(x, 2, -1)
        c, s = np.cos(angles)[None, :, None], np.sin(angles)[None, :, None]
        return np.concatenate([first * c - second * s, second * c + first * s], -1)

    x = params["embedding"]["table"][tokens]
    for index, layer in enumerate(params["layers"]):
        weights = layer["attention"]
        n = rms(x, layer["attention_norm"]["scale"])
        q = rope(linear(n, weights["query"]).reshape(batch, length, -1, h))
        k = rope(linear(n, weights["key"]).reshape(batch, length, -1, h))
        v = linear(n, weights["value"]).reshape(batch, length, -1, h)
        k, v = np.repeat(k, groups, 2), np.repeat(v, groups, 2)
        scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(h)
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
        mixed = np.einsum("bhqk,bkhd->bqhd", scipy.special.softmax(scores, -1), v)
        skip = x if turns is None else x @ turns[0][index]
        x = skip + linear(mixed.reshape(batch, length, -1), weights["output"])
        n = rms(x, layer["mlp_norm"]["scale"])
        gate = linear(n, layer["mlp"]["gate"])
        inner = gate * scipy.special.expit(gate) * linear(n, layer["mlp"]["up"])
        skip = x if turns is None else x @ turns[1][index]
        x = skip + linear(inner if down is None else inner @ down, layer["mlp"]["down"])
    x = rms(x, params["final_norm"]["scale"])
    head = params["head"] if "head" in params else {"kernel": params["embedding"]["table"].T}
    return linear(x, head)
