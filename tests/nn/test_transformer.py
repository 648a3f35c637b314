"""The language model against a float64 NumPy forward pass written with loops."""

from __future__ import annotations

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml.nn.transformer import (
    RopeScaling,
    TransformerConfig,
    block,
    decoding_linear,
    dense_attention,
    dense_linear,
    embed,
    forward,
    init_params,
    next_token_loss,
    plain_linear,
    stack_layers,
    sum_residual,
    unembed,
    unstack_layers,
)

run = jax.jit(forward, static_argnums=2)
nats = jax.jit(next_token_loss, static_argnums=2)
differentiate = jax.jit(jax.grad(next_token_loss, has_aux=True), static_argnames=("config", "rematerialize"))
SMALL = TransformerConfig(vocab_size=31, width=16, num_layers=2, num_heads=4, mlp_width=24, max_length=12)


def changed(**fields):
    return TransformerConfig(**{**SMALL.to_dict(), **fields})


VARIANTS = {
    "llama": SMALL,
    "interleaved": changed(rope_layout="interleaved", rope_base=50.0),
    "linear_scaling": changed(rope_scaling=RopeScaling("linear", 3.0)),
    # original length 24: of the pairs' wavelengths 6.3, 11, 20 and 35, all three branches of llama3 are met
    "llama3_scaling": changed(
        head_size=8,
        rope_base=10.0,
        rope_scaling=RopeScaling("llama3", 4.0, 1.0, 3.0, 24),
    ),
    "grouped_query": changed(num_kv_heads=2, attention_scale=0.4),
    "multi_query_wide_head": changed(num_kv_heads=1, head_size=6),
    "qwen2": changed(qkv_bias=True, num_kv_heads=2, norm_epsilon=1e-6),
    "qwen3": changed(qk_norm=True, num_kv_heads=2, head_size=6, norm_epsilon=1e-2),
    "gpt2": changed(
        norm="layer",
        positions="learned",
        mlp="gelu",
        qkv_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
    ),
    "untied_head_with_bias": changed(tied_head=False, head_bias=True),
    "tied_head_with_bias": changed(head_bias=True, embedding_scale=3.0, logit_scale=0.3),
    "swiglu_with_bias": changed(mlp_bias=True, attention_output_bias=True, norm="layer"),
}


def random_params(config, seed=0, scale=0.4):
    """Every leaf random, so that scales other than 1 and biases other than 0 count."""
    params = init_params(jax.random.key(seed), config)
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [jnp.asarray(rng.normal(0, scale, x.shape), x.dtype) for x in leaves])


def random_tokens(config, batch=2, length=7, seed=1):
    return jnp.asarray(np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length)), jnp.int32)


def oracle_norm(x, params, kind, epsilon):
    if kind == "layer":
        x = x - x.sum() / len(x)
    y = x / math.sqrt(sum(v * v for v in x) / len(x) + epsilon) * params["scale"]
    return y + params["bias"] if kind == "layer" else y


def oracle_linear(x, params):
    return x @ params["kernel"] + params.get("bias", 0.0)


def oracle_frequency(pair, config):
    frequency = 1.0 / config.rope_base ** (2 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    if scaling.kind == "linear":
        return frequency / scaling.factor
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_length / scaling.high_frequency_factor:
        return frequency
    if wavelength > scaling.original_max_length / scaling.low_frequency_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_max_length / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def oracle_rotate(x, position, config):
    half, y = len(x) // 2, np.zeros_like(x)
    for pair in range(half):
        a, b = (pair, pair + half) if config.rope_layout == "split" else (2 * pair, 2 * pair + 1)
        turned = complex(x[a], x[b]) * np.exp(1j * position * oracle_frequency(pair, config))
        y[a], y[b] = turned.real, turned.imag
    return y


def oracle_row(params, tokens, config, positions=None, mask=None):
    """Logits [length, vocab] of one sequence."""
    length, size = len(tokens), config.head_dim
    positions = range(length) if positions is None else positions
    table = params["embedding"]["table"]
    stream = [table[token] * config.embedding_scale for token in tokens]
    if config.positions == "learned":
        stream = [x + params["positions"]["table"][p] for x, p in zip(stream, positions)]
    scale = config.attention_scale if config.attention_scale is not None else 1 / math.sqrt(size)
    for layer in params["layers"]:
        weights, heads = layer["attention"], {}
        for t in range(length):
            hidden = oracle_norm(stream[t], layer["attention_norm"], config.norm, config.norm_epsilon)
            for name, count in (
                ("query", config.num_heads),
                ("key", config.kv_heads),
                ("value", config.kv_heads),
            ):
                flat = oracle_linear(hidden, weights[name])
                for head in range(count):
                    x = flat[head * size : (head + 1) * size]
                    if name != "value":
                        if config.qk_norm:
                            x = oracle_norm(x, weights[name + "_norm"], "rms", config.norm_epsilon)
                        if config.positions == "rope":
                            x = oracle_rotate(x, positions[t], config)
                    heads[name, t, head] = x
        mixed = np.zeros((length, config.num_heads * size))
        for t in range(length):
            for head in range(config.num_heads):
                shared = head // (config.num_heads // config.kv_heads)
                seen = [s for s in range(length) if (s <= t if mask is None else mask[t][s])]
                scores = {s: heads["query", t, head] @ heads["key", s, shared] * scale for s in seen}
                total = sum(math.exp(score) for score in scores.values())
                for s in seen:
                    mixed[t, head * size : (head + 1) * size] += (
                        math.exp(scores[s]) / total * heads["value", s, shared]
                    )
        for t in range(length):
            stream[t] = stream[t] + oracle_linear(mixed[t], weights["output"])
            hidden = oracle_norm(stream[t], layer["mlp_norm"], config.norm, config.norm_epsilon)
            up = oracle_linear(hidden, layer["mlp"]["up"])
            if config.mlp == "swiglu":
                gate = oracle_linear(hidden, layer["mlp"]["gate"])
                up = gate / (1 + np.exp(-gate)) * up
            else:
                up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
            stream[t] = stream[t] + oracle_linear(up, layer["mlp"]["down"])
    logits = []
    for x in stream:
        hidden = oracle_norm(x, params["final_norm"], config.norm, config.norm_epsilon)
        kernel = table.T if config.tied_head else params["head"]["kernel"]
        bias = params["head"]["bias"] if config.head_bias else 0.0
        logits.append((hidden @ kernel + bias) * config.logit_scale)
    return np.stack(logits)


def oracle(params, tokens, config, **kwargs):
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    return np.stack([oracle_row(wide, np.asarray(row), config, **kwargs) for row in tokens])


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_numpy_forward_pass(name, scanned):
    config = VARIANTS[name]
    params, tokens = random_params(config), random_tokens(config)
    expected = oracle(params, tokens, config)
    given = stack_layers(params) if scanned else params
    logits = run(given, tokens, config).logits
    assert logits.dtype == jnp.float32
    assert np.abs(expected).max() > 0.3
    np.testing.assert_allclose(logits, expected, atol=3e-5, rtol=3e-5)


def test_mask_and_positions_are_those_of_the_numpy_forward_pass():
    config = VARIANTS["grouped_query"]
    params, tokens = random_params(config), random_tokens(config)
    # a tree of drafts: every row sees itself and its ancestors, siblings share a position
    parents, positions = [-1, 0, 0, 1, 1, 2, 5], [4, 5, 5, 6, 6, 6, 7]
    mask = np.zeros((7, 7), bool)
    for row in range(7):
        ancestor = row
        while ancestor >= 0:
            mask[row, ancestor], ancestor = True, parents[ancestor]
    expected = oracle(params, tokens, config, positions=positions, mask=mask)
    batch_positions = jnp.broadcast_to(jnp.array(positions), tokens.shape)
    for rows in (1, 2):  # one mask for all sequences, or one for each
        batch_mask = jnp.broadcast_to(mask, (rows, 7, 7))
        logits = run(params, tokens, config, positions=batch_positions, mask=batch_mask).logits
        np.testing.assert_allclose(logits, expected, atol=3e-5, rtol=3e-5)
    assert float(jnp.abs(logits - run(params, tokens, config).logits).max()) > 0.01


def test_embeddings_entry_equals_tokens():
    config = changed(embedding_scale=2.0, positions="learned")
    params, tokens = random_params(config), random_tokens(config)
    embeddings = embed(params, tokens, config)
    logits = run(params, None, config, embeddings=embeddings).logits
    np.testing.assert_array_equal(logits, run(params, tokens, config).logits)
    moved = run(params, None, config, embeddings=embeddings + 0.1).logits
    assert float(jnp.abs(moved - logits).max()) > 0.01


def test_token_outside_the_vocabulary_gives_nan_and_does_not_touch_other_sequences():
    params, tokens = random_params(SMALL), random_tokens(SMALL)
    logits = run(params, tokens.at[0, 3].set(SMALL.vocab_size), SMALL).logits
    assert bool(jnp.isnan(logits[0, 3]).all())
    assert not bool(jnp.isnan(logits[1]).any())


def test_logits_for_selects_rows():
    params, tokens = random_params(SMALL), random_tokens(SMALL)
    full = run(params, tokens, SMALL).logits
    last = jax.jit(functools.partial(forward, config=SMALL, logits_for="last"))(params, tokens).logits
    np.testing.assert_allclose(last, full[:, -1:], atol=1e-6)
    rows = jnp.array([[3], [5]])
    chosen = run(params, tokens, SMALL, logits_for=rows).logits
    np.testing.assert_allclose(chosen, jnp.stack([full[0, 3:4], full[1, 5:6]]), atol=1e-6)


def test_unembedding_the_hidden_states_gives_the_logits():
    config = VARIANTS["tied_head_with_bias"]
    params, tokens = random_params(config), random_tokens(config)
    out = run(params, tokens, config)
    np.testing.assert_allclose(unembed(params, out.hidden, config), out.logits, atol=1e-5)


def test_blocks_alone_compose_to_the_forward_pass():
    params, tokens = random_params(SMALL), random_tokens(SMALL)
    x, positions = embed(params, tokens, SMALL), jnp.broadcast_to(jnp.arange(7), (2, 7))
    alone = jax.jit(functools.partial(block, config=SMALL))
    for index, layer in enumerate(params["layers"]):
        x, _ = alone(layer, x, positions=positions, layer=index)
    hidden = np.asarray(x) / np.sqrt(np.square(x).mean(-1, keepdims=True) + SMALL.norm_epsilon)
    hidden = hidden * np.asarray(params["final_norm"]["scale"])
    np.testing.assert_allclose(run(params, tokens, SMALL).hidden, hidden, atol=1e-5)


@pytest.mark.parametrize("rematerialize", [False, True], ids=["kept", "rematerialized"])
def test_scanned_gradient_equals_unrolled_gradient(rematerialize):
    params = random_params(SMALL)
    batch = {"tokens": random_tokens(SMALL, length=8)}
    expected, _ = differentiate(params, batch, SMALL)
    scanned, _ = differentiate(stack_layers(params), batch, SMALL, rematerialize=rematerialize)
    chex.assert_trees_all_close(unstack_layers(scanned), expected, atol=1e-5, rtol=1e-4)
    unrolled, _ = differentiate(params, batch, SMALL, rematerialize=rematerialize)
    chex.assert_trees_all_close(unrolled, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["grouped_query", "gpt2", "qwen3"])
def test_gradient_is_that_of_finite_differences_in_float64(name):
    config = VARIANTS[name]
    params, tokens = random_params(config), random_tokens(config, batch=1, length=5)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    targets = np.asarray(tokens[0, 1:])

    def loss(params):
        logits = oracle_row(params, np.asarray(tokens[0, :-1]), config)
        shifted = logits - logits.max(-1, keepdims=True)
        return np.mean(np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(4), targets])

    gradient, _ = differentiate(params, {"tokens": tokens}, config)
    rng = np.random.default_rng(7)
    for _ in range(3):
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), wide)
        ahead, behind = (jax.tree.map(lambda x, d, s=s: x + s * d, wide, direction) for s in (1e-5, -1e-5))
        expected = (loss(ahead) - loss(behind)) / 2e-5
        got = sum(
            jax.tree.leaves(jax.tree.map(lambda g, d: float((np.asarray(g) * d).sum()), gradient, direction))
        )
        assert got == pytest.approx(expected, rel=2e-3, abs=2e-4)


def test_forward_mode_works_with_plain_products_and_a_mask():
    params, tokens = random_params(SMALL), random_tokens(SMALL)
    batch, mask = {"tokens": tokens}, jnp.tril(jnp.ones((1, 6, 6), bool))
    tangent = random_params(SMALL, seed=5)

    @jax.jit
    def slope(params):
        plain = lambda p: next_token_loss(p, batch, SMALL, linear=plain_linear, mask=mask)[0]
        return jax.jvp(plain, (params,), (tangent,))

    value, directional = slope(params)
    gradient, _ = differentiate(params, batch, SMALL)
    expected = sum(jax.tree.leaves(jax.tree.map(lambda g, t: (g * t).sum(), gradient, tangent)))
    assert float(value) == pytest.approx(float(nats(params, batch, SMALL)[0]), rel=1e-5)
    assert float(directional) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.parametrize("sizes", [(5, 9), (9, 5)], ids=["widening", "narrowing"])
@pytest.mark.parametrize("lead", [(), (4,), (2, 3)], ids=str)
def test_gradient_of_the_default_product_is_that_of_the_plain_one(sizes, lead):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (*lead, sizes[0]))
    params = {"kernel": jax.random.normal(keys[1], sizes), "bias": jax.random.normal(keys[2], sizes[1:])}
    cotangent = jax.random.normal(keys[3], (*lead, sizes[1]))
    for name in ("mlp.up", "head"):
        got, pull = jax.vjp(lambda x, p, name=name: dense_linear(x, p, name), x, params)
        expected, plain_pull = jax.vjp(lambda x, p, name=name: plain_linear(x, p, name), x, params)
        np.testing.assert_array_equal(got, expected)
        chex.assert_trees_all_close(pull(cotangent), plain_pull(cotangent), atol=1e-5)
    narrow, half = x.astype(jnp.bfloat16), cotangent.astype(jnp.bfloat16)
    d_x, d_params = jax.vjp(lambda x, p: dense_linear(x, p, "mlp.up"), narrow, params)[1](half)
    assert (d_x.dtype, d_params["kernel"].dtype) == (jnp.bfloat16, jnp.float32)
    chex.assert_trees_all_close(d_params, pull(cotangent)[1], atol=0.1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["mlp.up", "head"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_product_for_decoding_is_the_default_one(rows, name, dtype):
    random = np.random.default_rng(rows)
    x, kernel, bias = (
        jnp.asarray(random.normal(size=size), dtype) for size in ((rows, 1, 33), (33, 21), (21,))
    )
    params = {"kernel": kernel, "bias": bias}
    expected = plain_linear(x, params, name)
    tolerance = 2e-5 if expected.dtype == jnp.float32 else 0.1
    for given in (params, {**params, "table": kernel.T.copy()}):
        y = decoding_linear(x, given, name)
        assert y.dtype == expected.dtype
        np.testing.assert_allclose(
            np.float32(y), np.float32(expected), atol=tolerance, rtol=0 if tolerance < 0.1 else 0.01
        )
    wide = decoding_linear(x.astype(jnp.float32), params, name)
    narrow = plain_linear(x.astype(jnp.float32), params, name)
    np.testing.assert_allclose(wide, narrow, atol=2e-5)


def test_every_product_goes_through_the_linear_seam():
    config = VARIANTS["untied_head_with_bias"]
    params, seen = init_params(jax.random.key(0), config), []

    def linear(x, weights, name):
        seen.append(name)
        assert set(weights) <= {"kernel", "bias"}
        return dense_linear(x, weights, name)

    jax.eval_shape(lambda p: forward(p, jnp.ones((1, 3), jnp.int32), config, linear=linear), params)
    layer = ["attention.query", "attention.key", "attention.value", "attention.output"]
    layer += ["mlp.up", "mlp.gate", "mlp.down"]
    assert seen == [*layer, *layer, "head"]


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_linear_seam_runs_on_weights_of_any_structure(scanned):
    params, tokens = random_params(SMALL), random_tokens(SMALL)

    def quantize(path, kernel):
        if path[-1].key != "kernel":
            return kernel
        scale = jnp.abs(kernel).max(0) / 127
        return {"codes": jnp.round(kernel / scale).astype(jnp.int8), "scale": scale}

    layers = [jax.tree_util.tree_map_with_path(quantize, layer) for layer in params["layers"]]
    packed = {**params, "layers": layers}
    is_packed = lambda node: isinstance(node, dict) and "codes" in node
    dense = jax.tree.map(
        lambda node: node["codes"] * node["scale"] if is_packed(node) else node, packed, is_leaf=is_packed
    )

    def linear(x, weights, name):
        kernel = weights["kernel"]
        if isinstance(kernel, dict):
            return x @ kernel["codes"].astype(x.dtype) * kernel["scale"]
        return dense_linear(x, weights, name)

    given = stack_layers(packed) if scanned else packed
    call = jax.jit(lambda p, t: forward(p, t, SMALL, linear=linear).logits)
    expected = oracle(dense, tokens, SMALL)
    np.testing.assert_allclose(call(given, tokens), expected, atol=3e-5, rtol=3e-5)
    by_row = jax.vmap(call, in_axes=(None, 0))(given, tokens[:, None])[:, 0]
    np.testing.assert_allclose(by_row, expected, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_attention_seam_gets_gates_and_layers_and_returns_information(scanned):
    params, tokens = random_params(SMALL), random_tokens(SMALL)
    for index, layer in enumerate(params["layers"]):
        layer["attention"]["gate"] = jnp.full((16, 4), 0.1 * (index + 1))
    given = stack_layers(params) if scanned else params

    def gated(inputs):
        output, _ = dense_attention(inputs)
        gate = jax.nn.sigmoid(inputs.hidden @ inputs.params["gate"])
        return output * gate[..., None], {"layer": inputs.layer, "gate": gate.mean()}

    def loss(params, tokens):
        out = forward(params, tokens, SMALL, attention=gated)
        return out.logits.var(), out.info

    (value, info), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(given, tokens)
    if scanned:
        assert info["layer"].tolist() == [0, 1]
        gradient = unstack_layers(gradient)
        gates = info["gate"]
    else:
        assert [int(layer["layer"]) for layer in info] == [0, 1]
        gates = jnp.stack([layer["gate"] for layer in info])
    assert gates.shape == (2,)
    assert len(set(gates.tolist())) == 2
    assert all(float(jnp.abs(layer["attention"]["gate"]).max()) > 0 for layer in gradient["layers"])
    values, _ = jax.vmap(loss, in_axes=(None, 0))(given, jnp.stack([tokens, tokens]))
    np.testing.assert_allclose(values, value, rtol=1e-5)


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_residual_seam_scales_updates_with_its_own_parameters(scanned):
    params, tokens = random_params(SMALL), random_tokens(SMALL)
    factors = {"attention": [0.5, 2.0], "mlp": [3.0, 0.25]}
    folded = jax.tree.map(lambda x: x, params)
    for index, layer in enumerate(params["layers"]):
        layer["factor"] = {name: jnp.array(values[index]) for name, values in factors.items()}
        for name, product in (("attention", "output"), ("mlp", "down")):
            kernel = folded["layers"][index][name][product]
            kernel["kernel"] = kernel["kernel"] * factors[name][index]

    def residual(x, update, name, layer_params):
        return sum_residual(x, layer_params["factor"][name] * update, name, layer_params)

    given = stack_layers(params) if scanned else params
    call = jax.jit(lambda p, t: forward(p, t, SMALL, residual=residual).logits)
    expected = oracle(folded, tokens, SMALL)
    np.testing.assert_allclose(call(given, tokens), expected, atol=3e-5, rtol=3e-5)
    by_row = jax.vmap(call, in_axes=(None, 0))(given, tokens[:, None])[:, 0]
    np.testing.assert_allclose(by_row, expected, atol=3e-5, rtol=3e-5)
    gradient = jax.grad(lambda p: call(p, tokens).var())(given)
    layers = unstack_layers(gradient)["layers"]
    assert all(float(jnp.abs(g)) > 0 for layer in layers for g in layer["factor"].values())


@pytest.mark.parametrize("scanned", [False, True], ids=["unrolled", "scanned"])
def test_taps_see_what_the_products_read(scanned):
    params, tokens = random_params(SMALL), random_tokens(SMALL)
    read = []

    def linear(x, weights, name):
        read.append((name, x))
        return dense_linear(x, weights, name)

    plain = forward(params, tokens, SMALL, linear=linear)
    inputs = {"attention.input": "attention.query", "attention.output.input": "attention.output"}
    inputs |= {"mlp.input": "mlp.up", "mlp.down.input": "mlp.down"}

    def tap(name, layer, value):
        return None if name == "mlp.input" else {"layer": layer, "square": jnp.square(value).sum()}

    given = stack_layers(params) if scanned else params
    out = jax.jit(lambda p, t: forward(p, t, SMALL, tap=tap))(given, tokens)
    np.testing.assert_allclose(out.logits, plain.logits, atol=1e-5)
    taps = out.taps if scanned else jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(dict, out.taps))
    assert set(taps) == {"residual", *inputs} - {"mlp.input"}
    for name in set(taps) - {"residual"}:
        expected = [float(jnp.square(x).sum()) for product, x in read if product == inputs[name]]
        np.testing.assert_allclose(taps[name]["square"], expected, rtol=1e-5)
        assert taps[name]["layer"].tolist() == [0, 1]
    first = float(jnp.square(embed(params, tokens, SMALL)).sum())
    assert float(taps["residual"]["square"][0]) == pytest.approx(first, rel=1e-5)
    vmapped = jax.vmap(lambda t: forward(given, t, SMALL, tap=tap).taps)(tokens[:, None])
    total = jax.tree.map(lambda x: x.sum(0), vmapped)
    last = total["residual"]["square"][1] if scanned else total[1]["residual"]["square"]
    assert float(last) == pytest.approx(float(taps["residual"]["square"][1]), rel=1e-5)


def test_bfloat16_compute_stays_near_float32():
    config = changed(width=64, mlp_width=128, num_kv_heads=2)
    params, tokens = random_params(config, scale=0.15), random_tokens(config)
    wide = run(params, tokens, config).logits
    narrow = run(params, tokens, TransformerConfig(**{**config.to_dict(), "compute_dtype": "bfloat16"}))
    assert narrow.logits.dtype == jnp.float32
    assert narrow.hidden.dtype == jnp.bfloat16
    error = float(jnp.sqrt(jnp.square(narrow.logits - wide).mean() / jnp.square(wide).mean()))
    # bfloat16 rounds to 2^-9 relative; about ten roundings a block, added as a random walk
    assert 1e-4 < error < 0.03


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_softmax_norms_and_products_are_float32_under_bfloat16(norm):
    config = changed(compute_dtype="bfloat16", param_dtype="bfloat16", norm=norm, qk_norm=True)
    params = init_params(jax.random.key(0), config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    jaxpr = jax.make_jaxpr(lambda p: forward(p, jnp.ones((1, 4), jnp.int32), config).logits)(params)
    counts = {}
    for equation in equations(jaxpr.jaxpr):
        name = equation.primitive.name
        if name in {"exp", "rsqrt", "reduce_max", "reduce_sum", "dot_general", "cos", "sin"}:
            assert equation.outvars[0].aval.dtype == jnp.float32, name
            counts[name] = counts.get(name, 0) + 1
    assert counts["exp"] == 2
    assert counts["dot_general"] == 2 * 9 + 1


def test_second_call_does_not_trace_again():
    config = SMALL
    params, tokens = random_params(config), random_tokens(config)

    @functools.partial(jax.jit, static_argnums=2)
    @chex.assert_max_traces(1)
    def step(params, batch, config):
        return next_token_loss(params, batch, config)[0]

    step(params, {"tokens": tokens, "weights": jnp.ones((2, 6))}, config)
    step(params, {"tokens": tokens + 1, "weights": jnp.zeros((2, 6))}, changed())


def test_row_that_may_see_nothing_is_finite_and_so_is_its_gradient():
    params, tokens = random_params(SMALL), random_tokens(SMALL)
    mask = jnp.tril(jnp.ones((2, 7, 7), bool)).at[:, 2].set(False)

    def loss(params):
        return forward(params, tokens, SMALL, mask=mask).logits.var()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    chex.assert_tree_all_finite((value, gradient))


def test_loss_is_the_weighted_mean_of_nats():
    params, tokens = random_params(SMALL), random_tokens(SMALL, length=6)
    weights = np.array([[1, 0, 2, 1, 0.5], [0, 0, 1, 1, 1]], np.float32)
    logits = oracle(params, tokens[:, :-1], SMALL)
    targets = np.asarray(tokens[:, 1:])
    total = correct = 0.0
    for row in range(2):
        for t in range(5):
            z = logits[row, t]
            total += weights[row, t] * (math.log(sum(math.exp(v) for v in z)) - z[targets[row, t]])
            correct += weights[row, t] * (z.argmax() == targets[row, t])
    batch = {"tokens": tokens, "weights": jnp.asarray(weights)}
    loss, metrics = nats(params, batch, SMALL)
    assert float(loss) == pytest.approx(total / weights.sum(), rel=1e-5)
    assert float(metrics["tokens"]) == weights.sum()
    assert float(metrics["correct"]) == pytest.approx(correct)
    best = tokens.at[:, 1:].set(
        jnp.asarray(logits.argmax(-1))
    )  # targets only: inputs of the next rows differ
    relabelled, metrics = nats(params, {"tokens": best[:, :2]}, SMALL)
    assert float(metrics["correct"]) == 2
    assert float(relabelled) < float(loss)


def test_loss_without_any_weight_is_zero_with_zero_gradient():
    params = random_params(SMALL)
    batch = {"tokens": random_tokens(SMALL), "weights": jnp.zeros((2, 6))}
    gradient, _ = differentiate(params, batch, SMALL)
    assert float(nats(params, batch, SMALL)[0]) == 0
    assert all(float(jnp.abs(g).max()) == 0 for g in jax.tree.leaves(gradient))


def test_loss_of_huge_logits_is_finite():
    config = changed(logit_scale=1e6)
    loss, _ = nats(random_params(config), {"tokens": random_tokens(config)}, config)
    assert bool(jnp.isfinite(loss))
    assert float(loss) > 1e3


def test_bad_inputs_of_the_forward_pass_are_named():
    params, tokens = init_params(jax.random.key(0), SMALL), random_tokens(SMALL)
    embeddings = embed(params, tokens, SMALL)
    with pytest.raises(ValueError, match="either tokens or embeddings"):
        forward(params, None, SMALL)
    with pytest.raises(ValueError, match="either tokens or embeddings"):
        forward(params, tokens, SMALL, embeddings=embeddings)
    with pytest.raises(ValueError, match="width 15"):
        forward(params, None, SMALL, embeddings=embeddings[..., :15])
    with pytest.raises(ValueError, match=r"\(2, 0\)"):
        forward(params, tokens[:, :0], SMALL)
    with pytest.raises(ValueError, match="num_layers=3"):
        forward(params, tokens, changed(num_layers=3))
    with pytest.raises(ValueError, match="logits_for"):
        forward(params, tokens, SMALL, logits_for="lats")
    learned = changed(positions="learned", max_length=6)
    with pytest.raises(ValueError, match="7 tokens are more than the 6"):
        forward(init_params(jax.random.key(0), learned), tokens, learned)


@pytest.mark.parametrize("length", [1, 7, 70])
def test_jitted_bfloat16_gradients_are_near_the_float32_ones(length):
    # Every product of the backward pass has to exist in bfloat16, for kernels that widen and that narrow.
    wide = TransformerConfig(
        vocab_size=61, width=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_width=88, tied_head=False
    )
    narrow = dataclasses.replace(wide, compute_dtype="bfloat16")
    params = init_params(jax.random.key(0), wide)
    batch = {"tokens": jax.random.randint(jax.random.key(1), (3, length + 1), 0, 61)}

    def gradient(config):
        return jax.jit(jax.grad(lambda p: next_token_loss(p, batch, config)[0]))(params)

    exact, rounded = jax.tree.leaves(gradient(wide)), jax.tree.leaves(gradient(narrow))
    error = sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(exact, rounded))
    size = sum(float(jnp.sum(a**2)) for a in exact)
    # bfloat16 keeps 8 bits: each rounding is within 2^-8 = 0.4 %, a few of them add up.
    assert 0 < (error / size) ** 0.5 < 0.02
