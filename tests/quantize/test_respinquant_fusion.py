from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effml import linalg
from effml.nn import transformer
from effml.quantize import respinquant
from tests.quantize import numpy_model

TOKENS = np.random.default_rng(0).integers(0, 31, (2, 7))


def fused_in_float64(params, rotations, spec, **kwargs):
    folded = respinquant.fold_norms(params, spec, dtype=np.float64)
    return respinquant.fuse_rotations(folded, rotations, spec, dtype=np.float64, **kwargs)


def hadamard_24():
    with jax.enable_x64(True):
        return np.asarray(linalg.hadamard(24, dtype=jnp.float64))


@pytest.mark.parametrize(("layers", "biases", "kv_heads"), [(1, False, 4), (2, True, 2), (3, True, 1)])
def test_fused_model_with_distinct_bases_and_exact_transitions_is_the_model(layers, biases, kv_heads):
    config = numpy_model.config(layers, biases=biases, kv_heads=kv_heads)
    spec = respinquant.transformer_spec(config)
    params = numpy_model.random_params(config)
    rotations = numpy_model.random_rotations(spec)
    expected = numpy_model.logits(params, TOKENS, config)
    fused = fused_in_float64(params, rotations, spec)
    turns = respinquant.transitions(rotations)
    actual = numpy_model.logits(fused, TOKENS, config, turns=turns, down=hadamard_24())
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-9)
    # The skips do need their turn, and the down projection its transform.
    without_turns = numpy_model.logits(fused, TOKENS, config, down=hadamard_24())
    assert np.abs(without_turns - expected).max() > 0.1
    assert np.abs(numpy_model.logits(fused, TOKENS, config, turns=turns) - expected).max() > 0.1


def test_one_basis_for_all_is_plain_spinquant():
    config = numpy_model.config(2)
    spec = respinquant.transformer_spec(config)
    params = numpy_model.random_params(config)
    drawn = numpy_model.random_rotations(spec)
    basis = drawn.m[0]
    shared = drawn._replace(a=np.stack([basis] * 3), m=np.stack([basis] * 2))
    for change in respinquant.transitions(shared):
        np.testing.assert_allclose(change, np.broadcast_to(np.eye(16), (2, 16, 16)), atol=1e-12)
    fused = fused_in_float64(params, shared, spec, hadamard=False)
    # SpinQuant's fusion, written out: R^T W R for what reads and writes, head by head for the values.
    layer, old = fused["layers"][1], params["layers"][1]
    gain = np.diag(old["attention_norm"]["scale"])
    value = np.kron(np.eye(2), drawn.v[1])
    np.testing.assert_allclose(
        layer["attention"]["value"]["kernel"],
        basis.T @ gain @ old["attention"]["value"]["kernel"] @ value,
        atol=1e-12,
    )
    np.testing.assert_allclose(
        layer["attention"]["output"]["kernel"],
        np.kron(np.eye(4), drawn.v[1]).T @ old["attention"]["output"]["kernel"] @ basis,
        atol=1e-12,
    )
    expected = numpy_model.logits(params, TOKENS, config)
    np.testing.assert_allclose(numpy_model.logits(fused, TOKENS, config), expected, atol=1e-9)


def test_float32_rounds_once_and_the_library_model_runs_it():
    config = numpy_model.config(2, tied=True)
    spec = respinquant.transformer_spec(config)
    params = numpy_model.random_params(config)
    rotations = numpy_model.near_rotations(spec)
    ready = respinquant.rotate(params, config, rotations, rank=None, hadamard=False)
    assert not ready.config.tied_head

    actual = library_logits(ready.params, ready.config)
    np.testing.assert_allclose(actual, numpy_model.logits(params, TOKENS, config), rtol=2e-6, atol=2e-4)
    untied = respinquant.untie(params, config)[0]
    fused64 = fused_in_float64(untied, rotations, spec, hadamard=False)
    for exact, rounded in zip(jax.tree.leaves(fused64), jax.tree.leaves(strip(ready.params))):
        np.testing.assert_array_equal(rounded, exact.astype(np.float32))


def test_learned_positions_and_an_ungated_perceptron_turn_too():
    config = dataclasses.replace(numpy_model.config(2), positions="learned", mlp="gelu", max_length=16)
    params = jax.tree.map(np.float32, numpy_model.random_params(config))
    spec = respinquant.transformer_spec(config)
    assert spec.tables == (("embedding", "table"), ("positions", "table"))
    rotations = numpy_model.random_rotations(spec)
    ready = respinquant.rotate(params, config, rotations, rank=None, hadamard=False)
    whole = library_logits(params, config)
    np.testing.assert_allclose(library_logits(ready.params, ready.config), whole, atol=1e-3)
    assert np.abs(whole).max() > 1
    # The positions do count, and so does their basis.
    unturned = {**ready.params, "positions": params["positions"]}
    assert np.abs(library_logits(unturned, ready.config) - whole).max() > 0.1


def turned_residual(x, update, name, layer_params):
    change = layer_params.get("residual")
    return x + update if change is None else x @ change[name]["t"] + update


@functools.partial(jax.jit, static_argnames="config")
def compiled_forward(params, tokens, config):
    return transformer.forward(params, tokens, config, residual=turned_residual).logits


def library_logits(params, config):
    return np.asarray(compiled_forward(params, TOKENS, config))


def strip(params):
    layers = [{k: v for k, v in layer.items() if k != "residual"} for layer in params["layers"]]
    return {**params, "layers": layers}


def test_norm_commutes_with_a_rotation_only_without_its_gain():
    config = numpy_model.config(1)
    spec = respinquant.transformer_spec(config)
    generator = np.random.default_rng(0)
    x, gain = generator.normal(size=(5, 16)), 1 + 0.5 * generator.normal(size=16)
    r = numpy_model.random_rotations(spec).m[0]

    def rms(x, gain):
        return x / np.sqrt((x**2).mean(-1, keepdims=True)) * gain

    np.testing.assert_allclose(rms(x @ r, 1.0), rms(x, 1.0) @ r, atol=1e-12)
    assert np.abs(rms(x @ r, gain) - rms(x, gain) @ r).max() > 0.1
    params = numpy_model.random_params(config)
    unfolded = {**params, "final_norm": {"scale": np.ones(16)}}
    with pytest.raises(ValueError, match=r"attention_norm.scale is not 1.*fold_norms"):
        respinquant.fuse_rotations(unfolded, numpy_model.random_rotations(spec), spec)


def test_folding_keeps_the_function_and_the_embedding_mean():
    config = numpy_model.config(2, tied=True)
    params = numpy_model.random_params(config)
    params["embedding"]["table"] += 3.0
    untied, _ = respinquant.untie(params, config)
    folded = respinquant.fold_norms(untied, respinquant.transformer_spec(config), dtype=np.float64)
    expected = numpy_model.logits(params, TOKENS, config)
    np.testing.assert_allclose(numpy_model.logits(folded, TOKENS, config), expected, atol=1e-9)
    np.testing.assert_array_equal(folded["embedding"]["table"], params["embedding"]["table"])
    stacked = respinquant.fold_norms(transformer.stack_layers(untied), respinquant.transformer_spec(config))
    for one, other in zip(jax.tree.leaves(transformer.unstack_layers(stacked)), jax.tree.leaves(folded)):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_all_bases_start_from_one_matrix_and_values_from_their_own():
    config = numpy_model.config(3)
    for kind in ("hadamard", "walsh", "orthogonal", "identity"):
        start = respinquant.init_rotations(jax.random.key(3), config, kind)
        for change in respinquant.transitions(start):
            np.testing.assert_allclose(change, np.broadcast_to(np.eye(16), change.shape), atol=1e-6)
        for leaf in start:
            assert leaf.dtype == jnp.float32
            np.testing.assert_allclose(
                leaf.mT @ leaf, np.broadcast_to(np.eye(leaf.shape[-1]), leaf.shape), atol=1e-6
            )
    start = respinquant.init_rotations(jax.random.key(3), config)
    assert np.abs(np.abs(start.a) - 0.25).max() < 1e-6
    assert np.abs(start.v[0] - start.v[1]).max() > 0.1
    # Independent signs: T - I has full rank, and a subspace of half the width leaves most of it.
    apart = respinquant.init_rotations(jax.random.key(3), config, shared=False)
    transition = respinquant.transitions(apart)[0][0]
    found = respinquant.residual_subspace(transition, 8)
    assert np.linalg.matrix_rank(transition - np.eye(16), 1e-3) > 8
    assert found.error > 0.3 * np.linalg.norm(transition - np.eye(16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": "layer"}, "norm='layer' subtracts the mean"),
        ({"tied_head": True}, "tied to the embedding.*untie"),
    ],
)
def test_models_that_cannot_turn_are_refused(change, message):
    config = dataclasses.replace(numpy_model.config(1), **change)
    params = transformer.init_params(jax.random.key(0), config)
    with pytest.raises(ValueError, match=message):
        respinquant.fold_norms(params, respinquant.transformer_spec(config))


def test_shapes_that_do_not_fit_are_named():
    config = numpy_model.config(2)
    spec = respinquant.transformer_spec(config)
    rotations = respinquant.init_rotations(jax.random.key(0), spec)
    folded = respinquant.fold_norms(numpy_model.random_params(config), spec)
    with pytest.raises(ValueError, match=r"rotations.a of shape \(2, 16, 16\) must have shape \(3, 16, 16\)"):
        respinquant.fuse_rotations(folded, rotations._replace(a=rotations.a[:-1]), spec)
    with pytest.raises(ValueError, match=r"layers have no attention.query.kernel"):
        respinquant.fuse_rotations(transformer.join_projections(folded), rotations, spec)
    with pytest.raises(ValueError, match="kv_heads=3 must divide num_heads=4"):
        dataclasses.replace(spec, kv_heads=3)
    with pytest.raises(ValueError, match="no Hadamard matrix of size 22 here"):
        respinquant.init_rotations(jax.random.key(0), dataclasses.replace(spec, width=22))
    with pytest.raises(ValueError, match="kind='hadamart' is not known; did you mean 'hadamard'"):
        respinquant.init_rotations(jax.random.key(0), spec, "hadamart")
